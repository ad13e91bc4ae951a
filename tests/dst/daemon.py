"""A PC's daemon: keeper, address book and streams of the product, in shells as thin as its own."""

import contextlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from molink.errors import MolinkError
from molink.facts.device import Device
from molink.sim.agenda import Appointment
from molink.swarm.agent.keeper import (
    Decision,
    Fetch,
    Keeper,
    StartWorker,
    StopWorker,
    TellCoordinator,
    TellWorker,
    tells_more,
)
from molink.swarm.election.replica import Replica
from molink.swarm.frontend.generation import GeneratedToken, GenerationRequest
from molink.swarm.frontend.stream import (
    Act,
    Emit,
    Fail,
    HeadEpoch,
    SendSubmit,
    SendToHead,
    Stream,
    StreamLimits,
)
from molink.swarm.membership.address_book import AddressBook
from molink.swarm.running_time import RunningTime
from molink.wire.messages.base import Payload
from molink.wire.messages.instructions import (
    Assign,
    Form,
    Member,
    MemberGone,
    Prefetch,
    Route,
    RouteGone,
    StageProfile,
    Unassign,
)
from molink.wire.messages.leading import SendState, SharedState
from molink.wire.messages.pipe import MemberKey, Start
from molink.wire.messages.reports import PeerReport, Prefetched, Reached, StageFailed
from molink.wire.messages.serving import Prompt, Rejected, Token, Tokens
from tests.dst.connections import Heads, Session
from tests.dst.coordinator import Disk
from tests.dst.leadership import CONTROL, Leadership, Membership
from tests.dst.process import Failure, Pc, Process
from tests.dst.worker import Worker

if TYPE_CHECKING:
    from tests.dst.world import World

REPORT_INTERVAL = 0.5
SWEEP = 5.0
GRACE = 5.0
#: The product looks twice as often.
WATCH = 1.0
#: Seconds that another peer has to let a connection in, and until it is tried again.
PATIENCE, PROBE_AGAIN = 3.0, 5.0
#: One-way delays that a connection takes.
_TRY = 5.0


@dataclass
class Peer:
    """What a PC keeps whatever its processes do: its key, and the swarm that it belongs to."""

    pc: Pc
    key: str
    id: str
    membership: Membership
    #: The copy of the coordinator's state.
    replica: Replica
    #: The state itself, where the coordinator has run.
    disk: Disk | None = None
    #: The highest term of a coordinator that was obeyed.
    obeyed: int = 0
    stage: str = "auto"
    device: Device = field(default_factory=lambda: Device(kind="cpu", name="CPU", memory=1 << 40))


@dataclass
class Active:
    """A request that is under way."""

    stream: Stream
    on_token: Callable[[GeneratedToken, Token], None]
    on_error: Callable[[MolinkError], None]
    target: HeadEpoch | None = None
    timer: Appointment | None = None


class Daemon(Process):
    """One run of a PC's daemon."""

    def __init__(self, world: "World", peer: Peer) -> None:
        super().__init__(peer.pc, "daemon")
        self.world = world
        self.peer = peer
        self.pid = world.network.next_number()
        self._rng = Random(world.seed * 6007 + self.pid)
        self.book = AddressBook(MemberKey(peer=peer.id, public_key=peer.key))
        self.book.on_member = self._member_came
        self.book.on_gone = self._members_changed
        self.keeper = Keeper()
        self.workers: dict[int, Worker] = {}
        self._fetches: dict[int, None] = {}
        self.prefetched: Prefetched | None = None
        self.heads = Heads(self)
        self.active: dict[str, Active] = {}
        self._running = RunningTime(self.time())
        self._keys = 0
        self._sweep: Appointment | None = None
        #: Newest epoch that was assigned, by pipeline.
        self._epochs: dict[str, int] = {}
        self._forming: dict[str, Form] = {}
        self._reached: dict[str, bool] = {}
        self.session = Session(self)
        self.leadership = Leadership(self)
        self.on_death.append(self._orphan)
        self._remember_members()
        self.session.start()
        self.leadership.start()
        self._watch()

    def _orphan(self) -> None:
        """Workers read the end of their pipe."""
        for worker in self.workers.values():
            worker.later(0.01, worker.stop)
        self.leadership.orphan()

    # --- the coordinator -------------------------------------------------------------------------

    def report(self) -> PeerReport:
        """What the coordinator is told each second."""
        peer = self.peer
        return PeerReport(
            name=peer.pc.name,
            version="1",
            addresses=(peer.pc.name,),
            control_port=CONTROL,
            endpoint="",
            daemon_pid=self.pid,
            stage=peer.stage,
            device=peer.device,
            models=tuple(self.world.models),
            workers=self.keeper.states({}, {}),
            prefetched=self.prefetched,
            replica=peer.replica.version,
            routes=self.heads.known,
        )

    def welcomed(self) -> None:
        """The coordinator knows us."""
        self.book.welcomed()
        self.heads.welcomed()
        for known, ok in self._reached.items():
            self.session.tell(self._tried(known, ok))
        if self._sweep is not None:
            self._sweep.cancel()
        self._sweep = self.call_at(self.time() + SWEEP, self.book.sweep)
        self._carry_out([*self.keeper.repeat()])

    def told(self, message: Any, payload: Any) -> None:
        """The coordinator says something."""
        match message:
            case SharedState() | SendState():
                self._share(payload)
            case Member():
                if not self.book.add(message):
                    raise Failure(f"{self} takes {message} for false")
            case MemberGone():
                self.book.remove(message.peer)
            case Prefetch():
                self._prefetch(message)
            case Assign():
                self.prefetched = None
                self._carry_out(self.keeper.assign(message))
                self._check_epochs()
            case StageProfile():
                self.keeper.profile(message)
            case Form():
                self._form_soon(message)
            case Unassign():
                self._forming.pop(message.pipeline, None)
                self._epochs.pop(message.pipeline, None)
                self._carry_out(self.keeper.unassign(message.pipeline))
            case Route():
                self.heads.update(message)
            case RouteGone():
                self.heads.remove(message.pipeline)

    def _share(self, payload: Any) -> None:
        if payload is None:
            data = self.peer.replica.encode()
            self.session.tell(SharedState(payload=Payload("u8", (len(data),))), data)
        else:
            self.leadership.shared(payload)
            self._remember_members()

    def _remember_members(self) -> None:
        for member in self.peer.replica.members:
            known = self.book.get(member.peer) is not None
            if member.standing == "member" and member.announced is not None and not known:
                self.book.add(member.announced)

    def _form_soon(self, order: Form) -> None:
        """Form the ring once the next stage can be reached."""
        if self._forming.get(order.pipeline) != order:
            self._forming[order.pipeline] = order
            self.later(_TRY * self.world.network.latency, self._form, order, False)

    def _form(self, order: Form, again: bool) -> None:
        if self._forming.get(order.pipeline) is not order:
            return
        places = [stage for stage, one in enumerate(order.ring) if one.peer == self.peer.id]
        after = order.ring[(places[0] + 1) % len(order.ring)]
        network = self.world.network
        if len(order.ring) == 1 or network.reaches(self, self.world.where(after)):
            del self._forming[order.pipeline]
            self._carry_out(self.keeper.form(order))
        elif not again:
            self.later(PATIENCE, self._form, order, True)
        else:
            del self._forming[order.pipeline]
            self.session.tell(
                StageFailed(
                    pipeline=order.pipeline,
                    epoch=order.epoch,
                    stage=places[0],
                    reason="can't connect to the next stage",
                    next_lost=True,
                )
            )

    def _probe(self, member: Member) -> None:
        """Try a member's control port until it answers."""
        known = self.book.get(member.peer)
        if known is None or known != member or not member.addresses:
            return
        ok = self.world.network.reaches(self, (member.addresses[0], CONTROL))
        self._reached[member.peer] = ok
        self.session.tell(self._tried(member.peer, ok))
        if not ok:
            self.later(PROBE_AGAIN, self._probe, member)

    def _tried(self, peer: str, ok: bool) -> Reached:
        """Some are said to be farther away than others: placement goes by it."""
        far = 1 + (self.pc.number + 3 * self.world.pc_of(peer).number) % 4
        return Reached(peer=peer, ok=ok, latency=far * self.world.network.latency if ok else None)

    def _member_came(self, member: Member) -> None:
        self._members_changed(member)
        self.later(_TRY * self.world.network.latency, self._probe, member)

    def _check_epochs(self) -> None:
        for state in self.keeper.states({}, {}):
            if state.epoch < self._epochs.get(state.pipeline, 0):
                raise Failure(f"{self} went back to epoch {state.epoch}")
            self._epochs[state.pipeline] = state.epoch

    def _prefetch(self, message: Prefetch) -> None:
        before = self.prefetched
        if before is None or before.number != message.number:
            self.prefetched = Prefetched(number=message.number, state="fetching")
            self.later(self._rng.uniform(0.1, 1.0), self._fetched_ahead, message.number)
        self.session.report()

    def _fetched_ahead(self, number: int) -> None:
        if self.prefetched is not None and self.prefetched.number == number:
            self.prefetched = Prefetched(number=number, state="done")
            self.session.report()

    # --- stages ----------------------------------------------------------------------------------

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Fetch(generation, assign):
                    self._fetches[generation] = None
                    seconds = self._rng.uniform(0.05, 0.3)
                    self.later(seconds, self._fetched, generation, assign)
                case StartWorker(generation, start):
                    self._start(generation, start)
                case TellWorker(generation, message):
                    self._tell(generation, message)
                case StopWorker(generation, kill):
                    self._stop(generation, kill=kill)
                case TellCoordinator(message):
                    self.session.tell(message)
        self.keeper.validate()
        if any(tells_more(decision) for decision in decisions):
            self.session.report()

    def _fetched(self, generation: int, assign: Assign) -> None:
        if generation not in self._fetches:
            return
        del self._fetches[generation]
        start = Start(
            pipeline=assign.pipeline,
            stage=assign.stage,
            stages=assign.stages,
            layers=assign.layers,
            model_dir="",
            dtype=assign.dtype,
            device="cpu",
            threads=1,
            public_key=self.peer.key,
            secret_key=self.peer.key,
            bind="",
            ports=(5468, 5480),
            kv_bytes=1,
            block_size=assign.block_size,
            max_context=self.world.context,
        )
        self._carry_out(self.keeper.fetched(generation, start))

    def _start(self, generation: int, start: Start) -> None:
        def say(number: int, message: Any) -> None:
            self.later(0.001, self._worker_said, number, message)

        worker = Worker(self.world, self.pc, self.peer.id, generation, start, say)
        self.workers[generation] = worker
        worker.on_death.append(lambda: self.world.network.died(worker))
        worker.on_death.append(lambda: self.later(0.01, self._worker_exited, generation))
        self._tell(generation, self.book.keys())
        self.keeper.started(generation, 1 + generation)

    def _tell(self, generation: int, message: Any) -> None:
        worker = self.workers.get(generation)
        if worker is not None:
            worker.later(0.001, worker.order, message)

    def _stop(self, generation: int, *, kill: bool) -> None:
        self._fetches.pop(generation, None)
        worker = self.workers.pop(generation, None)
        if worker is not None:
            worker.later(0.02, worker.stop)
            # One that stands still is killed.
            self.later(0.02 if kill else GRACE, worker.die)

    def _watch(self) -> None:
        self._carry_out(self.keeper.watch(self.time()))
        self.later(WATCH, self._watch)

    def _worker_said(self, generation: int, message: Any) -> None:
        if generation in self.workers:
            self._carry_out(self.keeper.worker_said(generation, message))

    def _worker_exited(self, generation: int) -> None:
        if self.workers.pop(generation, None) is not None:
            self._carry_out(self.keeper.failed(generation, "the worker was killed"))

    def _members_changed(self, _: object) -> None:
        for generation in self.workers:
            self._tell(generation, self.book.keys())

    def running(self) -> float:
        """Seconds in which this daemon ran; looked at with each tick."""
        return self._running.at(self.time())

    # --- requests, as molinkd.peer.frontend.streams has them ---

    def ask(
        self,
        request: GenerationRequest,
        limits: StreamLimits,
        on_token: Callable[[GeneratedToken, Token], None],
        on_error: Callable[[MolinkError], None],
    ) -> str:
        """A client asks; returns the request's key."""
        self._keys += 1
        key = f"{self.pid}-{self._keys}"
        stream = Stream(key, request, limits, self.running())
        active = self.active[key] = Active(stream, on_token, on_error)
        self._choose(active)
        return key

    def taken(self, key: str, count: int) -> None:
        """The client has taken so many more."""
        active = self.active.get(key)
        if active is not None:
            self._act(active, active.stream.taken(count))

    def close(self, key: str) -> None:
        """The client is gone, or has all."""
        active = self.active.pop(key, None)
        if active is not None:
            self._act(active, active.stream.cancel())

    def heads_changed(self) -> None:
        """Targets may be others."""
        for active in list(self.active.values()):
            self._choose(active)

    def head_said(self, pipeline: str, message: Any) -> None:
        """A head answers."""
        if isinstance(message, Tokens):
            for token in message.tokens:
                active = self._served_by(pipeline, token.key)
                if active is not None:
                    self._act(active, active.stream.token(token, self.running()), token)
        elif isinstance(message, Rejected):
            active = self._served_by(pipeline, message.key)
            if active is not None:
                self.world.monitor.rejected(message)
                self._act(active, active.stream.rejected(message, self.running()))

    def _served_by(self, pipeline: str, key: str) -> Active | None:
        active = self.active.get(key.rpartition(".")[0])
        if active is None or active.target is None or active.target.pipeline != pipeline:
            return None
        return active

    def _choose(self, active: Active) -> None:
        model = active.stream.request.model
        targets = self.heads.targets(model)
        if active.target not in targets:
            active.target = targets[0] if targets else None
        now = self.running()
        active.stream.forming(self.heads.forming(model), now)
        self._act(active, active.stream.head(active.target, now))

    def _wake(self, active: Active) -> None:
        self._act(active, active.stream.wake(self.running()))

    def _act(self, active: Active, acts: list[Act], token: Token | None = None) -> None:
        for act in acts:
            match act:
                case Emit(generated):
                    assert token is not None
                    active.on_token(generated, token)
                case Fail(error):
                    active.on_error(error)
                case SendToHead(target, message):
                    self._mention(target, message)
                case SendSubmit():
                    self._submit(active, act)
        active.stream.validate()
        if active.timer is not None:
            active.timer.cancel()
            active.timer = None
        when = active.stream.next_wake
        if when is not None:
            active.timer = self.call_at(when + self._running.lost, lambda: self._wake(active))

    def _submit(self, active: Active, act: SendSubmit) -> None:
        ids = array("i", act.ids)
        prompt = Prompt(act.submit.key, 0, Payload("i32", (len(ids),)))
        try:
            self.heads.send(act.target, act.submit, act.grammar)
            self.heads.send(act.target, prompt, ids)
        except MolinkError as error:
            refused = Rejected(act.target.epoch, act.submit.key, "epoch", str(error))
            self.call_soon(lambda: self.head_said(act.target.pipeline, refused))

    def _mention(self, target: HeadEpoch, message: Any) -> None:
        with contextlib.suppress(MolinkError):
            self.heads.send(target, message)
