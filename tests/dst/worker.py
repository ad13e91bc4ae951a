"""A worker process: the product's ring, scheduler, receiver and links around a fake model."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from molink.facts.profile import UNKNOWN_PROFILE
from molink.facts.ring_times import LinkFacts
from molink.link.base import OutConnectionEvents
from molink.ring.build import LinkEnvironment, RingPlan, RingStage, StageEnvironment, build_ring
from molink.ring.stage import StageShape
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.scheduler import Scheduler
from molink.scheduler.speculation.base import DraftProposal
from molink.wire.messages.data_plane import Channel, Frame, LinkHello
from molink.wire.messages.serving import Cancel, Credit, PromptFragment, Rejected, Submit
from molink.wire.messages.worker_pipe import (
    FormRing,
    LoadStage,
    NextStageLost,
    PeerKeys,
    Ping,
    Pong,
    RingFormed,
    WorkerLoaded,
)
from molinkd.worker.request_receiver import ReceiverModel, RequestReceiver
from tests.dst.model import BLOCK, HIDDEN, VOCABULARY, Executor, Requests
from tests.dst.network import Dial, Listener, Sender
from tests.dst.process import Failure, Pc, Process

if TYPE_CHECKING:
    from tests.dst.world import World

#: Preset, so that links need no measurement.
KNOWN = LinkFacts(0.01, 10e6)
SWEEP_INTERVAL = 2.0


@dataclass(frozen=True)
class Mode:
    """Options of all stages of a swarm; each occurs in some seeds."""

    policy: str = "fifo"
    cut_through: bool = True
    #: Rows of a sub-chunk of a prefill volume; 0: whole volumes.
    sub_chunk: int = 0
    chunk: int = 6
    micro_batches: int = 0
    blocks: int = 40
    prefill_only: bool = True
    num_speculative_tokens: int = 0
    lookahead: int = 0


@dataclass
class Guesses:
    """Drafts of the expected answer with every third token wrong."""

    world: "World"

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        """Implements :class:`molink.scheduler.speculation.base.DraftSource`."""
        for client in self.world.clients:
            text = (*client.prompt, *client.expected)
            if text[: len(tokens)] == tuple(tokens):
                drafts = list(enumerate(text[len(tokens) :], len(tokens)))[:count]
                return DraftProposal([(token + (at % 3 == 0)) % VOCABULARY for at, token in drafts])
        return DraftProposal()


@dataclass
class SubChunks:
    """Splits prefill volumes into sub-chunks of ``size`` rows."""

    size: int

    def next_rows(self, here: int, coming: int, riding: int, pace: float) -> int:
        return min(here, self.size)


@dataclass
class StageEpoch:
    """A stage's part in the ring of one epoch."""

    epoch: int
    stages: int
    previous: str
    runtime: RingStage
    requests: Requests
    dials: list[Dial] = field(default_factory=list)
    receiver: RequestReceiver | None = None


class Worker(Process):
    """One stage of one peer, as long as its daemon lets it run."""

    def __init__(
        self,
        world: "World",
        pc: Pc,
        peer: str,
        generation: int,
        start: LoadStage,
        say: Callable[[int, Any], None],
    ) -> None:
        """``say(generation, message)`` sends to the daemon."""
        super().__init__(pc, f"worker{generation}")
        self.world = world
        self.peer = peer
        self.generation = generation
        self.start = start
        self.say = say
        self.epoch_state: StageEpoch | None = None
        self.listener: Listener | None = None
        self._members: frozenset[str] = frozenset((peer,))
        self._orders: deque[FormRing | LoadStage] = deque()
        self._busy = True
        self._rng = Random(world.seed * 7919 + world.network.next_number())
        self.later(self._rng.uniform(*world.load_s), self._loaded)

    # --- orders of the daemon --------------------------------------------------------------------

    def order(self, message: PeerKeys | FormRing | LoadStage | Ping) -> None:
        """Process a message from the pipe."""
        if isinstance(message, Ping):
            self.say(self.generation, Pong())
            return
        if not isinstance(message, PeerKeys):
            self._orders.append(message)
            self._obey()
            return
        before, self._members = self._members, frozenset(one.peer for one in message.peers)
        for gone in before - self._members:
            if self.listener is not None:
                self.listener.expel(gone)
            if self.epoch_state is not None and self.epoch_state.receiver is not None:
                self.epoch_state.receiver.drop_peer(gone, self.time())
                self.epoch_state.runtime.ring.run_pending()

    def _loaded(self) -> None:
        if self.listener is None:
            port = 5468
            while (self.pc.name, port) in self.world.network.listeners:
                port += 1
            network = self.world.network
            self.listener = Listener(network, self, port, self.peer, self._handle, self._admits)
            self.later(SWEEP_INTERVAL, self._sweep)
        blocks, port = self.world.mode.blocks, self.listener.port
        self._busy = False
        self.say(self.generation, WorkerLoaded(port=port, max_blocks=blocks, weight_bytes=1))
        self._obey()

    def _admits(self, user: str) -> bool:
        return user in self._members

    def _obey(self) -> None:
        while self._orders and not self._busy:
            order, state = self._orders.popleft(), self.epoch_state
            if isinstance(order, LoadStage):
                self._leave()
                self.start, self._busy = order, True
                self.later(self._rng.uniform(*self.world.load_s), self._loaded)
            elif state is None or order.epoch > state.epoch:
                self._leave()
                self._busy = True
                self.later(0.05, self._form, order)
            elif order.epoch == state.epoch:
                self.say(self.generation, RingFormed(epoch=order.epoch))

    def _form(self, order: FormRing) -> None:
        self._busy = False
        self.world.monitor.on_epoch_started(self, order.epoch)
        self.epoch_state = self._start_epoch(order)
        self.epoch_state.runtime.start()
        self.say(self.generation, RingFormed(epoch=order.epoch))
        self._obey()

    def _leave(self) -> None:
        state, self.epoch_state = self.epoch_state, None
        if state is not None:
            self.world.monitor.on_epoch_ended(self, state)
            state.runtime.close()
            for dial in state.dials:
                dial.close()

    def stop(self) -> None:
        """Shut down in good order."""
        self._leave()
        self.die()

    # --- an epoch -------------------------------------------------------------------------------

    def _start_epoch(self, order: FormRing) -> StageEpoch:
        start, count = self.start, len(order.ring)
        shape = StageShape(start.stage, count, HIDDEN, VOCABULARY, "u8")
        requests = Requests()
        last = start.stage == count - 1
        executor = Executor(self, start.layers, last, order.blocks, requests, self._rng)
        previous = order.ring[start.stage - 1].peer if count > 1 else ""
        dials: list[Dial] = []
        receivers: list[RequestReceiver] = []

        def receiver(scheduler: Scheduler) -> RequestReceiver:
            assert self.listener is not None
            receivers.append(
                RequestReceiver(
                    scheduler, start.pipeline, ReceiverModel(VOCABULARY), self.listener.send
                )
            )
            return receivers[0]

        link = self._link(order, dials) if count > 1 else None
        around = StageEnvironment(self, requests, executor, receiver, self._broken, link)
        runtime = build_ring(self._plan(order, shape, previous), around)
        state = StageEpoch(order.epoch, count, previous, runtime, requests, dials)
        state.receiver = receivers[0] if receivers else None
        return state

    def _plan(self, order: FormRing, shape: StageShape, previous: str) -> RingPlan:
        mode = self.world.mode
        limits = SchedulerConfig(
            num_blocks=order.blocks,
            block_size=BLOCK,
            micro_batches=order.micro_batches or mode.micro_batches,
            max_num_batched_tokens=mode.chunk,
            max_model_len=self.world.context,
            num_stages=shape.stages,
            row_bytes=shape.row_bytes,
            prefill_only_batches=mode.prefill_only,
            num_speculative_tokens=mode.num_speculative_tokens,
            lookahead_volumes=mode.lookahead,
        )
        return RingPlan(
            order.epoch,
            self.start.pipeline,
            shape,
            limits,
            self.world.context,
            UNKNOWN_PROFILE,
            mode.policy,
            mode.cut_through,
            previous,
            SubChunks(mode.sub_chunk) if mode.sub_chunk else None,
            create_draft_source=lambda: Guesses(self.world),
        )

    def _link(self, order: FormRing, dials: list[Dial]) -> LinkEnvironment:
        after = order.ring[(self.start.stage + 1) % len(order.ring)]
        assert self.listener is not None

        def connect(channel: Channel, events: OutConnectionEvents) -> Dial:
            where = self.world.where(after)
            network = self.world.network
            key, twice = after.peer, "up down"
            dials.append(Dial(network, self, self.peer, lambda: where, key, events, echoes=twice))
            return dials[-1]

        def dead(reason: str) -> None:
            self.say(self.generation, NextStageLost(epoch=order.epoch, reason=reason))

        return LinkEnvironment(connect, self.listener, dead, remembered=KNOWN)

    def _broken(self, reason: str) -> None:
        raise Failure(f"{self}: {reason}")

    # --- messages --------------------------------------------------------------------------------

    def _handle(self, sender: Sender, message: Any, payload: Any) -> None:
        state = self.epoch_state
        if state is None:
            if isinstance(message, Submit):
                assert self.listener is not None
                why = "the ring is being formed"
                rejected = Rejected(message.epoch, message.key, "epoch", why)
                self.listener.send(sender.identity, rejected)
            return
        if isinstance(message, Frame | LinkHello) and message.epoch != state.epoch:
            self.world.monitor.stale(self, state, sender, message, payload)
            return
        incoming = state.runtime.incoming
        data = None if payload is None else memoryview(payload).cast("B")
        if incoming is not None and incoming.handle_message(sender, message, data):
            return
        if state.receiver is not None and isinstance(
            message, Submit | PromptFragment | Cancel | Credit
        ):
            state.receiver.handle_message(sender, message, data, self.time())
            if isinstance(message, Submit):
                self.world.monitor.submitted(self, state, message)
            state.runtime.ring.run_pending()

    def _sweep(self) -> None:
        state = self.epoch_state
        if state is not None and state.receiver is not None:
            state.receiver.sweep_connections(self.time())
            state.runtime.ring.run_pending()
        self.later(SWEEP_INTERVAL, self._sweep)
