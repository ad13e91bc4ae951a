"""A stage's place in the ring of one epoch: everything that ends with the epoch."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import zmq.asyncio

from molink.facts.drafts import AUTO_DRAFTS, MAX_AHEAD
from molink.facts.dtypes import DTYPE_SIZES
from molink.facts.ringtimes import LinkFacts
from molink.link.estimate.remembered import LinkMemory
from molink.link.packing.compressor import Compressor
from molink.link.packing.packer import RowPacker
from molink.link.stats import LinkStats
from molink.ring.build import LinkSurroundings, RingPlan, Surroundings, build_ring
from molink.ring.hosted import NO_ROOM, HostRoom
from molink.ring.ring import Ring
from molink.ring.stage import Guesser, StageShape
from molink.scheduler.head import Head
from molink.scheduler.limits import HeadLimits
from molink.scheduler.policies.lengths import AnswerLengths
from molink.wire.messages.codec import DataMessage
from molink.wire.messages.instructions import StageAddress
from molink.wire.messages.load import HeadLoad, StageLoad
from molink.wire.messages.pipe import FormRing, Start
from molink.wire.messages.serving import Cancel, Credit, Prompt, Submit
from molink.wire.sockets.congestion import forgets_in_pauses
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.endpoints import endpoints
from molink.wire.sockets.server import Sender, Server
from molinkd.worker.desk import Desk
from molinkd.worker.dial import Dialer
from molinkd.worker.engine import Engine
from molinkd.worker.recordfile import RecordFile
from molinkd.worker.request_table import RequestTable


class Place:
    """Builds and owns the deciders, connections and executor of one epoch.

    ``on_dead`` is told why the next stage counts as dead; ``memory`` and ``answers``
    outlive the epoch. ``host`` is the stage's host memory for KV.
    """

    def __init__(
        self,
        start: Start,
        order: FormRing,
        engine: Engine,
        context: zmq.asyncio.Context,
        server: Server[DataMessage],
        on_dead: Callable[[str], None],
        on_broken: Callable[[str], None],
        memory: LinkMemory | None = None,
        host: HostRoom = NO_ROOM,
        answers: AnswerLengths | None = None,
    ) -> None:
        self.epoch = order.epoch
        #: The peer that runs the previous stage; nobody in a ring of one.
        self.previous_peer = order.ring[start.stage - 1].peer if len(order.ring) > 1 else ""
        self._start = start
        self._order = order
        self._server = server
        self._vocabulary = engine.stage.config.vocab_size
        self._weights = engine.stage.weight_bytes
        self._kv = order.blocks * engine.stage.block_bytes(start.block_size)
        self._host_kv = host.blocks * engine.stage.block_bytes(start.block_size)
        self._memory = memory or LinkMemory(None)
        self._record: RecordFile | None = None
        self._dialer: Dialer | None = None
        self.desk: Desk | None = None
        requests = RequestTable(engine.grammars)
        loop = asyncio.get_running_loop()
        self._executor = engine.executor(requests, loop.call_soon_threadsafe)
        link = self._link(context, on_dead) if len(order.ring) > 1 else None
        model: Guesser | None = None
        if engine.draft is not None and start.stage == 0:
            model = engine.draft.open(self._executor.between, loop.call_soon_threadsafe)
        self._seat = build_ring(
            _plan(start, order, engine, self.previous_peer, host),
            Surroundings(
                loop,
                requests,
                self._executor,
                self._make_desk,
                on_broken,
                link,
                model,
                answers or AnswerLengths(),
            ),
        )

    @property
    def ring(self) -> Ring:
        """The order of this stage's work."""
        return self._seat.ring

    def open(self) -> None:
        """Connect to the next stage and begin."""
        self._seat.start()

    async def close(self) -> None:
        """Leave the ring; waits for the step that is running."""
        self._seat.close()
        if self._dialer is not None:
            await self._dialer.close()
        if self._record is not None:
            self._record.close()
        await asyncio.to_thread(self._executor.close)

    def handle(self, sender: Sender, message: DataMessage, payload: memoryview | None) -> None:
        """Take a message that came to the worker's socket."""
        incoming = self._seat.incoming
        if incoming is not None and incoming.handle(sender, message, payload):
            return
        if self.desk is not None and isinstance(message, Submit | Prompt | Cancel | Credit):
            self.desk.handle(sender, message, payload, time.perf_counter())
            self.ring.pump()

    def stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges of this epoch, by name."""
        counters, gauges = self._seat.stats()
        gauges |= {"stage_weight_bytes": float(self._weights), "stage_kv_bytes": float(self._kv)}
        gauges["stage_host_kv_bytes"] = float(self._host_kv)
        return counters, gauges

    def load(self) -> StageLoad:
        """What others are told of this stage and its link."""
        bubbles, out = self.ring.bubbles, self._seat.outgoing
        link = out.stats if out is not None else LinkStats()
        return StageLoad(
            self._start.pipeline,
            self._start.stage,
            min(100, round(100 * bubbles.busy)),
            min(100, round(100 * bubbles.share)),
            self.ring.live,
            self._weights,
            self._kv,
            round(link.min_rtt / 2 * 1e6),
            round(link.rate),
            link.queued,
            link.in_flight,
        )

    def head_load(self) -> HeadLoad | None:
        """What others are told of the head, where it is."""
        head = self._seat.head
        return None if head is None else head.load(self._start.pipeline, time.perf_counter())

    def _make_desk(self, head: Head) -> Desk:
        self.desk = Desk(head, self._start.pipeline, self._vocabulary, self._server.send)
        return self.desk

    # --- links -----------------------------------------------------------------------------------

    def _link(
        self, context: zmq.asyncio.Context, on_dead: Callable[[str], None]
    ) -> LinkSurroundings:
        start, after = self._start, self._after
        keys = KeyPair(start.public_key, start.secret_key)
        targets = endpoints(after.addresses, after.port)
        self._dialer = Dialer(context, keys, after.public_key, targets)
        if start.settings.record:
            self._record = RecordFile(
                Path(start.settings.record), start.pipeline, start.stage, self.epoch
            )
        packs = start.settings.compression != "none"
        return LinkSurroundings(
            self._dialer.connect,
            self._server,
            on_dead,
            RowPacker(Compressor(start.settings.compression), time.perf_counter) if packs else None,
            self._memory.find(after.peer),
            self._remember,
            None if self._record is None else self._record.write,
            start.settings.keep_warm and forgets_in_pauses(),
        )

    def _remember(self, facts: LinkFacts) -> None:
        self._memory.keep(self._after.peer, facts, time.perf_counter())

    @property
    def _after(self) -> StageAddress:
        """The next stage."""
        return self._order.ring[(self._start.stage + 1) % len(self._order.ring)]


def _plan(
    start: Start, order: FormRing, engine: Engine, previous_peer: str, host: HostRoom
) -> RingPlan:
    config = engine.stage.config
    shape = StageShape(
        start.stage,
        len(order.ring),
        config.hidden_size,
        config.vocab_size,
        engine.stage.travel_dtype,
    )
    return RingPlan(
        order.epoch,
        start.pipeline,
        shape,
        _head_limits(start, order, engine),
        config.context,
        engine.profile,
        start.settings.link_policy,
        start.settings.cut_through,
        previous_peer,
        scheduling_policy=start.settings.scheduling_policy,
        host=host,
    )


def _head_limits(start: Start, order: FormRing, engine: Engine) -> HeadLimits:
    stage = engine.stage
    config = stage.config
    return HeadLimits(
        blocks=order.blocks,
        block_size=start.block_size,
        micro_batches=order.micro_batches,
        stages=len(order.ring),
        row_bytes=config.hidden_size * DTYPE_SIZES[stage.travel_dtype],
        chunk_tokens=start.settings.chunk_tokens,
        max_running=start.settings.max_running,
        max_waiting=start.settings.max_waiting,
        max_queue_s=start.settings.max_queue_time,
        max_context=start.max_context,
        # Requests can share only what does not depend on whose it is.
        prefix_cache=start.settings.prefix_cache and not config.keys_depend_on_length,
        short_context=config.short_context,
        profiles=order.profiles,
        unpaired=start.settings.unpaired_prefill,
        draft_tokens=start.settings.draft_tokens,
        ahead=MAX_AHEAD if start.settings.draft_tokens == AUTO_DRAFTS else 0,
        draft_model=None if engine.draft is None else engine.draft.facts,
        preemption_mode=start.settings.preemption_mode,
    )
