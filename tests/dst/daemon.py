"""A PC's daemon: the product's stage agent, address book and streams in thin shells."""

import contextlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from molink.errors import MolinkError
from molink.facts.device import Device
from molink.sim.event_queue import ScheduledCallback
from molink.swarm.agent.stage_agent import (
    AgentAction,
    FetchFilesAction,
    SendToCoordinatorAction,
    SendToWorkerAction,
    StageAgent,
    StartWorkerAction,
    StopWorkerAction,
    is_reportable,
)
from molink.swarm.election.replica import Replica
from molink.swarm.frontend.generated_token import GeneratedToken
from molink.swarm.frontend.stream import (
    EmitTokenAction,
    FailStreamAction,
    PipelineEpoch,
    RequestStream,
    SendToSchedulerAction,
    StreamAction,
    StreamLimits,
    SubmitAction,
)
from molink.swarm.membership.address_book import AddressBook
from molink.swarm.running_time import RunningTime
from molink.wire.messages.base import Payload
from molink.wire.messages.election import StateReplica, StateRequest
from molink.wire.messages.instructions import (
    Assign,
    FormPipeline,
    PeerInfo,
    PeerRemoved,
    Prefetch,
    Route,
    RouteRemoved,
    StageProfile,
    Unassign,
)
from molink.wire.messages.peer_reports import PeerReport, PrefetchState, ReachReport, StageFailed
from molink.wire.messages.serving import (
    OutputToken,
    OutputTokens,
    PromptFragment,
    Rejected,
    Request,
)
from molink.wire.messages.worker_pipe import LoadStage, PeerKey
from tests.dst.connections import SchedulerConnections, Session
from tests.dst.coordinator import Disk
from tests.dst.leadership import CONTROL, Leadership, Membership
from tests.dst.process import Failure, Pc, Process
from tests.dst.worker import Worker

if TYPE_CHECKING:
    from tests.dst.world import World

REPORT_INTERVAL = 0.5
SWEEP = 5.0
GRACE = 5.0
#: The product checks twice as often.
WATCH = 1.0
#: Seconds in which another peer must accept a connection, and until the next attempt.
PATIENCE, PROBE_AGAIN = 3.0, 5.0
#: One-way delays of a handshake.
_RETRY_INTERVAL = 5.0


@dataclass
class Peer:
    """What a PC keeps across its processes: its key and its swarm."""

    pc: Pc
    key: str
    id: str
    membership: Membership
    #: Replica of the coordinator's state.
    replica: Replica
    #: The state itself, if the coordinator has run here.
    disk: Disk | None = None
    #: Highest term of an obeyed coordinator.
    obeyed: int = 0
    stage: str = "auto"
    device: Device = field(default_factory=lambda: Device(kind="cpu", name="CPU", memory=1 << 40))


@dataclass
class Active:
    """A running request."""

    stream: RequestStream
    on_token: Callable[[GeneratedToken, OutputToken], None]
    on_error: Callable[[MolinkError], None]
    target: PipelineEpoch | None = None
    timer: ScheduledCallback | None = None


class Daemon(Process):
    """One run of a PC's daemon."""

    def __init__(self, world: "World", peer: Peer) -> None:
        super().__init__(peer.pc, "daemon")
        self.world = world
        self.peer = peer
        self.pid = world.network.next_number()
        self._rng = Random(world.seed * 6007 + self.pid)
        self.book = AddressBook(PeerKey(peer=peer.id, public_key=peer.key))
        self.book.on_peer_changed = self._on_member
        self.book.on_peer_removed = self._members_changed
        self.keeper = StageAgent()
        self.workers: dict[int, Worker] = {}
        self._fetches: dict[int, None] = {}
        self.prefetched: PrefetchState | None = None
        self.schedulers = SchedulerConnections(self)
        self.active: dict[str, Active] = {}
        self._running = RunningTime(self.time())
        self._keys = 0
        self._sweep: ScheduledCallback | None = None
        #: Announced peers that are no members by this PC's log.
        self._unproven: dict[str, PeerInfo] = {}
        #: Newest assigned epoch by pipeline.
        self._epochs: dict[str, int] = {}
        self._forming: dict[str, FormPipeline] = {}
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
        """The report sent to the coordinator."""
        peer = self.peer
        return PeerReport(
            name=peer.pc.name,
            version="1",
            addresses=(peer.pc.name,),
            control_port=CONTROL,
            api_address="",
            daemon_pid=self.pid,
            stage=peer.stage,
            device=peer.device,
            models=tuple(self.world.models),
            workers=self.keeper.worker_states({}, {}),
            prefetch=self.prefetched,
            replica=peer.replica.version,
            log_digest=peer.replica.log.digest,
            routes=self.schedulers.known_routes,
        )

    def on_welcome(self) -> None:
        """The coordinator has accepted this peer."""
        self.book.mark_unconfirmed()
        self.schedulers.on_welcome()
        for known, ok in self._reached.items():
            self.session.send_if_welcome(self._on_probe(known, ok))
        if self._sweep is not None:
            self._sweep.cancel()
        self._sweep = self.call_at(self.time() + SWEEP, self.book.drop_unconfirmed)
        self._carry_out([*self.keeper.resend_reports()])

    def on_instruction(self, message: Any, payload: Any) -> None:
        """Process an instruction of the coordinator."""
        match message:
            case StateReplica() | StateRequest():
                self._share(payload)
            case PeerInfo() | PeerRemoved():
                self._on_peer(message)
            case Prefetch():
                self._prefetch(message)
            case Assign():
                self.prefetched = None
                self._carry_out(self.keeper.assign_stage(message))
                self._check_epochs()
            case StageProfile():
                self.keeper.record_profile(message)
            case FormPipeline():
                self._form_soon(message)
            case Unassign():
                self._forming.pop(message.pipeline, None)
                self._epochs.pop(message.pipeline, None)
                self._carry_out(self.keeper.unassign_pipeline(message.pipeline))
            case Route():
                self.schedulers.update_route(message)
            case RouteRemoved():
                self.schedulers.remove_route(message.pipeline)

    def _on_peer(self, message: PeerInfo | PeerRemoved) -> None:
        if isinstance(message, PeerRemoved):
            self._unproven.pop(message.peer, None)
            self.book.remove_peer(message.peer)
        elif not self.peer.replica.log.is_member(message.peer):
            self._unproven[message.peer] = message
        elif not self.book.add_peer(message):
            raise Failure(f"{self} takes {message} for false")

    def _share(self, payload: Any) -> None:
        if payload is None:
            data = self.peer.replica.encode()
            self.session.send_if_welcome(StateReplica(payload=Payload("u8", (len(data),))), data)
        else:
            self.leadership.on_replica(payload)
            self._remember_members()

    def _remember_members(self) -> None:
        log = self.peer.replica.log
        for peer in sorted(self.book.peers - {self.peer.id}):
            if not log.is_member(peer):
                self.book.remove_peer(peer)
        for peer in [one for one in self._unproven if log.is_member(one)]:
            self.book.add_peer(self._unproven.pop(peer))
        for member in self.peer.replica.members:
            known = self.book.get_peer(member.peer) is not None
            if member.standing == "member" and member.announced is not None and not known:
                self.book.add_peer(member.announced)

    def _form_soon(self, order: FormPipeline) -> None:
        """Form the ring once the next stage is reachable."""
        if self._forming.get(order.pipeline) != order:
            self._forming[order.pipeline] = order
            self.later(_RETRY_INTERVAL * self.world.network.latency, self._form, order, False)

    def _form(self, order: FormPipeline, again: bool) -> None:
        if self._forming.get(order.pipeline) is not order:
            return
        places = [stage for stage, one in enumerate(order.ring) if one.peer == self.peer.id]
        after = order.ring[(places[0] + 1) % len(order.ring)]
        network = self.world.network
        if len(order.ring) == 1 or network.reaches(self, self.world.where(after)):
            del self._forming[order.pipeline]
            self._carry_out(self.keeper.form_ring(order))
        elif not again:
            self.later(PATIENCE, self._form, order, True)
        else:
            del self._forming[order.pipeline]
            self.session.send_if_welcome(
                StageFailed(
                    pipeline=order.pipeline,
                    epoch=order.epoch,
                    stage=places[0],
                    reason="can't connect to the next stage",
                    next_lost=True,
                )
            )

    def _probe(self, member: PeerInfo) -> None:
        """Try a member's control port until it answers."""
        known = self.book.get_peer(member.peer)
        if known is None or known != member or not member.addresses:
            return
        ok = self.world.network.reaches(self, (member.addresses[0], CONTROL))
        self._reached[member.peer] = ok
        self.session.send_if_welcome(self._on_probe(member.peer, ok))
        if not ok:
            self.later(PROBE_AGAIN, self._probe, member)

    def _on_probe(self, peer: str, ok: bool) -> ReachReport:
        """Report a latency: some peers count as farther away, which affects placement."""
        far = 1 + (self.pc.number + 3 * self.world.pc_of(peer).number) % 4
        return ReachReport(
            peer=peer, is_reachable=ok, latency=far * self.world.network.latency if ok else None
        )

    def _on_member(self, member: PeerInfo) -> None:
        self._members_changed(member)
        self.later(_RETRY_INTERVAL * self.world.network.latency, self._probe, member)

    def _check_epochs(self) -> None:
        for state in self.keeper.worker_states({}, {}):
            if state.epoch < self._epochs.get(state.pipeline, 0):
                raise Failure(f"{self} went back to epoch {state.epoch}")
            self._epochs[state.pipeline] = state.epoch

    def _prefetch(self, message: Prefetch) -> None:
        before = self.prefetched
        if before is None or before.number != message.number:
            self.prefetched = PrefetchState(number=message.number, state="fetching")
            self.later(self._rng.uniform(0.1, 1.0), self._on_prefetched, message.number)
        self.session.report()

    def _on_prefetched(self, number: int) -> None:
        if self.prefetched is not None and self.prefetched.number == number:
            self.prefetched = PrefetchState(number=number, state="done")
            self.session.report()

    # --- stages ----------------------------------------------------------------------------------

    def _carry_out(self, decisions: list[AgentAction]) -> None:
        for decision in decisions:
            match decision:
                case FetchFilesAction(generation, assign):
                    self._fetches[generation] = None
                    seconds = self._rng.uniform(0.05, 0.3)
                    self.later(seconds, self._on_fetched, generation, assign)
                case StartWorkerAction(generation, start):
                    self._start(generation, start)
                case SendToWorkerAction(generation, message):
                    self._order_worker(generation, message)
                case StopWorkerAction(generation, kill):
                    self._stop(generation, kill=kill)
                case SendToCoordinatorAction(message):
                    self.session.send_if_welcome(message)
        self.keeper.validate()
        if any(is_reportable(decision) for decision in decisions):
            self.session.report()

    def _on_fetched(self, generation: int, assign: Assign) -> None:
        if generation not in self._fetches:
            return
        del self._fetches[generation]
        start = LoadStage(
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
            max_model_len=self.world.context,
        )
        self._carry_out(self.keeper.on_files_fetched(generation, start))

    def _start(self, generation: int, start: LoadStage) -> None:
        def say(number: int, message: Any) -> None:
            self.later(0.001, self._on_worker_message, number, message)

        worker = Worker(self.world, self.pc, self.peer.id, generation, start, say)
        self.workers[generation] = worker
        worker.on_death.append(lambda: self.world.network.died(worker))
        worker.on_death.append(lambda: self.later(0.01, self._on_worker_exit, generation))
        self._order_worker(generation, self.book.peer_keys())
        self.keeper.on_worker_started(generation, 1 + generation)

    def _order_worker(self, generation: int, message: Any) -> None:
        worker = self.workers.get(generation)
        if worker is not None:
            worker.later(0.001, worker.order, message)

    def _stop(self, generation: int, *, kill: bool) -> None:
        self._fetches.pop(generation, None)
        worker = self.workers.pop(generation, None)
        if worker is not None:
            worker.later(0.02, worker.stop)
            # A frozen worker is killed.
            self.later(0.02 if kill else GRACE, worker.die)

    def _watch(self) -> None:
        self._carry_out(self.keeper.check_liveness(self.time()))
        self.later(WATCH, self._watch)

    def _on_worker_message(self, generation: int, message: Any) -> None:
        if generation in self.workers:
            self._carry_out(self.keeper.on_worker_message(generation, message))

    def _on_worker_exit(self, generation: int) -> None:
        if self.workers.pop(generation, None) is not None:
            self._carry_out(self.keeper.on_failure(generation, "the worker was killed"))

    def _members_changed(self, _: object) -> None:
        for generation in self.workers:
            self._order_worker(generation, self.book.peer_keys())

    def running(self) -> float:
        """Seconds in which this daemon ran, updated with each timer."""
        return self._running.counted_time(self.time())

    # --- requests, as molinkd.peer.frontend.swarm_backend has them ---

    def ask(
        self,
        request: Request,
        limits: StreamLimits,
        on_token: Callable[[GeneratedToken, OutputToken], None],
        on_error: Callable[[MolinkError], None],
    ) -> str:
        """Start a client's request; returns its key."""
        self._keys += 1
        key = f"{self.pid}-{self._keys}"
        stream = RequestStream(key, request, limits, self.running())
        active = self.active[key] = Active(stream, on_token, on_error)
        self._choose(active)
        return key

    def on_consumed(self, key: str, count: int) -> None:
        """The client has consumed ``count`` more tokens."""
        active = self.active.get(key)
        if active is not None:
            self._act(active, active.stream.on_tokens_consumed(count))

    def close(self, key: str) -> None:
        """The client is gone or has its full answer."""
        active = self.active.pop(key, None)
        if active is not None:
            self._act(active, active.stream.cancel())

    def on_routes_changed(self) -> None:
        """Schedulers may have changed."""
        for active in list(self.active.values()):
            self._choose(active)

    def on_scheduler_message(self, pipeline: str, message: Any) -> None:
        """Process a scheduler's answer."""
        if isinstance(message, OutputTokens):
            for token in message.tokens:
                active = self._served_by(pipeline, token.key)
                if active is not None:
                    self._act(active, active.stream.on_token(token, self.running()), token)
        elif isinstance(message, Rejected):
            active = self._served_by(pipeline, message.key)
            if active is not None:
                self.world.monitor.rejected(message)
                self._act(active, active.stream.on_rejected(message, self.running()))

    def _served_by(self, pipeline: str, key: str) -> Active | None:
        active = self.active.get(key.rpartition(".")[0])
        if active is None or active.target is None or active.target.pipeline != pipeline:
            return None
        return active

    def _choose(self, active: Active) -> None:
        model = active.stream.request.model
        targets = self.schedulers.targets(model)
        if active.target not in targets:
            active.target = targets[0] if targets else None
        now = self.running()
        active.stream.on_formation_progress(self.schedulers.forming(model), now)
        self._act(active, active.stream.set_target(active.target, now))

    def _wake(self, active: Active) -> None:
        self._act(active, active.stream.wake(self.running()))

    def _act(
        self, active: Active, acts: list[StreamAction], token: OutputToken | None = None
    ) -> None:
        for act in acts:
            match act:
                case EmitTokenAction(generated):
                    assert token is not None
                    active.on_token(generated, token)
                case FailStreamAction(error):
                    active.on_error(error)
                case SendToSchedulerAction(target, message):
                    self._mention(target, message)
                case SubmitAction():
                    self._submit(active, act)
        active.stream.validate()
        if active.timer is not None:
            active.timer.cancel()
            active.timer = None
        when = active.stream.next_wake_at
        if when is not None:
            active.timer = self.call_at(when + self._running.skipped_s, lambda: self._wake(active))

    def _submit(self, active: Active, act: SubmitAction) -> None:
        ids = array("i", act.token_ids)
        prompt = PromptFragment(act.submit.key, 0, Payload("i32", (len(ids),)))
        try:
            self.schedulers.send(act.target, act.submit, act.grammar)
            self.schedulers.send(act.target, prompt, ids)
        except MolinkError as error:
            refused = Rejected(act.target.epoch, act.submit.key, "epoch", str(error))
            self.call_soon(lambda: self.on_scheduler_message(act.target.pipeline, refused))

    def _mention(self, target: PipelineEpoch, message: Any) -> None:
        with contextlib.suppress(MolinkError):
            self.schedulers.send(target, message)
