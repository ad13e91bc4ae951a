"""A stage's place in the ring of one epoch: everything that ends with the epoch."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import zmq.asyncio

from molink.facts.dtypes import DTYPE_SIZES
from molink.facts.profile import MAX_CHUNK_ROWS
from molink.facts.ringtimes import LinkFacts
from molink.head.chunk import max_chunk_rows
from molink.head.head import Head
from molink.head.limits import HeadLimits
from molink.head.policies.create import create_scheduling_policy
from molink.link.estimate.estimator import LinkEstimator
from molink.link.estimate.remembered import LinkMemory
from molink.link.heartbeat import StageProgress
from molink.link.packing.compressor import Compressor
from molink.link.packing.packer import RowPacker
from molink.link.policies.base import LanePolicy
from molink.link.policies.create import create_policy
from molink.link.receiver import Arrival, LinkReceiver, ReceiverLimits
from molink.link.recording import RecordedPolicy
from molink.link.sender import LinkSender
from molink.ring.board_limits import BoardLimits
from molink.ring.ring import Ring
from molink.ring.segment import StageShape
from molink.wire.messages.control import StageAddress
from molink.wire.messages.data import (
    MAX_GROUPS,
    MAX_MICRO_BATCHES,
    Cancel,
    Credit,
    DataMessage,
    Prompt,
    Submit,
)
from molink.wire.messages.pipe import FormRing, Start
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.endpoints import endpoints
from molink.wire.sockets.server import Sender, Server
from molinkd.worker.desk import Desk
from molinkd.worker.dial import dial
from molinkd.worker.engine import Engine
from molinkd.worker.inlink import InLink
from molinkd.worker.outlink import OutLink
from molinkd.worker.recordfile import RecordFile
from molinkd.worker.request_table import RequestTable

#: Requests that any head may run: ``max_running`` of its worker, which we don't know.
MAX_RUNNING = 1024
#: Bytes of rows that a stage is ready to keep, whatever its own settings make of it.
MIN_BYTES = 256 << 20


class Place:
    """Builds and owns the head, desk, links and executor of one epoch.

    ``on_dead`` is told why the next stage counts as dead; ``memory`` outlives the epoch.
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
    ) -> None:
        self.epoch = order.epoch
        #: The peer that runs the previous stage; nobody in a ring of one.
        self.previous_peer = order.ring[start.stage - 1].peer if len(order.ring) > 1 else ""
        self._start = start
        self._order = order
        self._stage = stage = engine.stage
        requests = RequestTable()
        loop = asyncio.get_running_loop()
        self._executor = engine.executor(requests, loop.call_soon_threadsafe)
        self._head: Head | None = None
        self.desk: Desk | None = None
        if stage.is_first:
            self._head = self._make_head()
            vocabulary = stage.config.vocab_size
            self.desk = Desk(self._head, start.pipeline, vocabulary, server.send)
        self.ring = Ring(
            StageShape(
                stage.is_last,
                stage.config.hidden_size,
                stage.config.vocab_size,
                stage.travel_dtype,
                start.stage,
                len(order.ring),
            ),
            requests,
            self._executor,
            self._head,
            self.desk,
            engine.profile,
            on_broken,
            # The loop's own clock on Windows, where time.monotonic ticks at 15.6 ms.
            time.perf_counter,
            self._board_limits(),
            cut_through=start.settings.cut_through,
            profiles=order.profiles,
        )
        self._memory = memory or LinkMemory(None)
        self._record: RecordFile | None = None
        self._out: OutLink | None = None
        self._in: InLink | None = None
        if len(order.ring) > 1:
            self._out = self._make_outlink(context, on_dead)
            self._in = self._make_inlink(server)

    def open(self) -> None:
        """Connect to the next stage and begin."""
        if self._out is not None:
            self._out.start()
        self.ring.open(self._out)

    async def close(self) -> None:
        """Leave the ring; waits for the step that is running."""
        self.ring.close()
        if self._in is not None:
            self._in.close()
        if self._out is not None:
            await self._out.close()
        if self._record is not None:
            self._record.close()
        await asyncio.to_thread(self._executor.close)

    def handle(self, sender: Sender, message: DataMessage, payload: memoryview | None) -> None:
        """Take a message that came to the worker's socket."""
        if self._in is not None and self._in.handle(sender, message, payload):
            return
        if self.desk is not None and isinstance(message, Submit | Prompt | Cancel | Credit):
            self.desk.handle(sender, message, payload, time.perf_counter())
            self.ring.pump()

    def stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges of this epoch, by name."""
        counters, gauges = self.ring.stats()
        if self._head is not None:
            more_counters, more_gauges = self._head.stats()
            counters |= more_counters
            gauges |= more_gauges
        if self._out is not None:
            link = self._out.stats
            counters |= {
                "link_sent_frames_total": float(link.sent_frames),
                "link_sent_bytes_total": float(link.sent_bytes),
                "link_plain_bytes_total": float(link.plain_bytes),
                "link_packed_bytes_total": float(link.packed_bytes),
                "link_resent_frames_total": float(link.resent),
                "link_connects_total": float(link.connects),
            }
            gauges |= {
                "link_rtt_seconds": link.rtt,
                "link_latency_seconds": link.min_rtt / 2,
                "link_rate_bytes_per_second": link.rate,
                "link_queued_bytes": float(link.queued_bytes),
                "link_unacknowledged_bytes": float(link.unacknowledged_bytes),
            }
        if self._in is not None:
            counters |= self._in.counts
            gauges |= self._in.gauges
        return counters, gauges

    def _make_head(self) -> Head:
        start, order = self._start, self._order
        settings = start.settings
        limits = HeadLimits(
            blocks=order.blocks,
            block_size=start.block_size,
            micro_batches=order.micro_batches,
            stages=len(order.ring),
            row_bytes=self._row_bytes,
            chunk_tokens=settings.chunk_tokens,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            max_context=start.max_context,
            # Requests can share only what does not depend on whose it is.
            prefix_cache=settings.prefix_cache and not self._stage.config.keys_depend_on_length,
            profiles=order.profiles,
        )
        policy = create_scheduling_policy(settings.scheduling_policy)
        return Head(limits, order.epoch, policy)

    def _board_limits(self) -> BoardLimits:
        order, size, context = self._order, self._start.block_size, self._stage.config.context
        return BoardLimits(
            requests=MAX_RUNNING + self._max_volumes * MAX_GROUPS,
            context=context,
            table=min(order.blocks, -(-context // size)),
            blocks=order.blocks,
            block_size=size,
            waiting_bytes=self._max_bytes,
        )

    @property
    def _max_bytes(self) -> int:
        """Bytes of rows that the previous stage may have us keep: twice what we expect of it."""
        chunk = max_chunk_rows(self._start.settings.chunk_tokens)
        if not self._order.micro_batches:
            chunk = max(chunk, MAX_CHUNK_ROWS)  # as chunks that go unpaired may have, in all
        rows = 2 * self._max_micro_batches * (chunk + MAX_GROUPS)
        return max(MIN_BYTES, rows * self._row_bytes)

    @property
    def _row_bytes(self) -> int:
        """Bytes of a row on its way to the next stage."""
        return self._stage.config.hidden_size * DTYPE_SIZES[self._stage.travel_dtype]

    @property
    def _max_micro_batches(self) -> int:
        """Micro-batches that there may be in flight, whoever decides that."""
        return self._order.micro_batches or 2 * len(self._order.ring)

    @property
    def _max_volumes(self) -> int:
        """Decode and prefill volumes in flight, of which more may go unpaired."""
        decode = self._max_micro_batches
        return decode + (decode if self._order.micro_batches else MAX_MICRO_BATCHES)

    def _make_outlink(
        self, context: zmq.asyncio.Context, on_dead: Callable[[str], None]
    ) -> OutLink:
        start, after = self._start, self._after
        keys = KeyPair(start.public_key, start.secret_key)
        targets = endpoints(after.addresses, after.port)
        return OutLink(
            dial(context, keys, after.public_key, targets),
            LinkSender(
                self.epoch,
                self._make_policy(),
                packer=self._make_packer(),
                estimator=LinkEstimator(self._memory.find(after.peer)),
            ),
            start.pipeline,
            start.stage,
            self._progress,
            on_dead,
            self.ring.pump,
            self._link_measured,
            probe=True,
        )

    def _link_measured(self, facts: LinkFacts) -> None:
        now = time.perf_counter()
        self._memory.keep(self._after.peer, facts, now)
        self.ring.link_measured(facts, now)

    @property
    def _after(self) -> StageAddress:
        """The next stage."""
        return self._order.ring[(self._start.stage + 1) % len(self._order.ring)]

    def _make_policy(self) -> LanePolicy:
        start, settings = self._start, self._start.settings
        policy = create_policy(settings.link_policy)
        if not settings.record:
            return policy
        self._record = RecordFile(Path(settings.record), start.pipeline, start.stage, self.epoch)
        return RecordedPolicy(policy, self._record.write)

    def _make_packer(self) -> RowPacker | None:
        setting = self._start.settings.compression
        return RowPacker(Compressor(setting), time.perf_counter) if setting != "none" else None

    def _make_inlink(self, server: Server[DataMessage]) -> InLink:
        start, stages = self._start, len(self._order.ring)
        hidden = self._stage.config.hidden_size
        return InLink(
            server,
            LinkReceiver(
                self.epoch,
                hidden,
                self._stage.travel_dtype,
                ReceiverLimits(assembly=self._max_bytes),
                cut_through=start.settings.cut_through,
            ),
            start.pipeline,
            (start.stage - 1) % stages,
            self.previous_peer,
            self._progress,
            self._arrived,
        )

    def _arrived(self, arrival: Arrival) -> None:
        self.ring.arrive(arrival.body, arrival.payload, arrival.rows)

    def _progress(self) -> StageProgress:
        return self.ring.progress
