"""A stage's place in the ring of one epoch: everything that ends with the epoch."""

import asyncio
import time
from collections.abc import Callable

import zmq.asyncio

from molink.head.head import Head
from molink.head.limits import HeadLimits
from molink.link.create import create_policy
from molink.link.dial import dial
from molink.link.inlink import InLink
from molink.link.outlink import OutLink, Progress
from molink.link.receiver import Arrival, LinkReceiver
from molink.link.sender import LinkSender
from molink.stage.stage import Stage
from molink.wire.data import Cancel, Credit, DataMessage, Prompt, Submit
from molink.wire.endpoints import endpoints
from molink.wire.keys import KeyPair
from molink.wire.pipe import FormRing, Start
from molink.wire.server import Sender, Server
from molink.worker.desk import Desk
from molink.worker.executor import Executor
from molink.worker.ring import Ring

POLICY = "fifo"


class Place:
    """Builds and owns the head, desk, links and executor of one epoch.

    ``on_dead`` is told why the next stage counts as dead.
    """

    def __init__(
        self,
        start: Start,
        order: FormRing,
        stage: Stage,
        context: zmq.asyncio.Context,
        server: Server[DataMessage],
        on_dead: Callable[[str], None],
    ) -> None:
        self.epoch = order.epoch
        self._start = start
        self._order = order
        self._stage = stage
        self._executor = Executor(stage)
        self._head: Head | None = None
        self.desk: Desk | None = None
        if stage.is_first:
            self._head = self._make_head()
            vocabulary = stage.config.vocab_size
            self.desk = Desk(self._head, start.pipeline, vocabulary, server.send)
        self.ring = Ring(stage, self._executor, self._head, self.desk)
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
        await asyncio.to_thread(self._executor.close)

    def handle(self, sender: Sender, message: DataMessage, payload: memoryview | None) -> None:
        """Take a message that came to the worker's socket."""
        if self._in is not None and self._in.handle(sender, message, payload):
            return
        if self.desk is not None and isinstance(message, Submit | Prompt | Cancel | Credit):
            self.desk.handle(sender, message, payload, time.monotonic())
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
                "link_resent_frames_total": float(link.resent),
                "link_connects_total": float(link.connects),
            }
            gauges |= {
                "link_rtt_seconds": link.rtt,
                "link_queued_bytes": float(link.queued_bytes),
                "link_unacknowledged_bytes": float(link.unacknowledged_bytes),
            }
        return counters, gauges

    def _make_head(self) -> Head:
        start, order = self._start, self._order
        limits = HeadLimits(
            blocks=order.blocks,
            block_size=start.block_size,
            micro_batches=max(1, order.micro_batches),
            chunk_tokens=start.chunk_tokens,
            max_running=start.max_running,
            max_waiting=start.max_waiting,
            max_context=min(start.max_context, order.blocks * start.block_size),
        )
        return Head(limits, order.epoch)

    def _make_outlink(
        self, context: zmq.asyncio.Context, on_dead: Callable[[str], None]
    ) -> OutLink:
        start, ring = self._start, self._order.ring
        after = ring[(start.stage + 1) % len(ring)]
        keys = KeyPair(start.public_key, start.secret_key)
        targets = endpoints(after.addresses, after.port)
        return OutLink(
            dial(context, keys, after.public_key, targets),
            LinkSender(self.epoch, create_policy(POLICY)),
            start.pipeline,
            start.stage,
            self._progress,
            on_dead,
        )

    def _make_inlink(self, server: Server[DataMessage]) -> InLink:
        start, ring = self._start, self._order.ring
        stages = len(ring)
        before = (start.stage - 1) % stages
        hidden = self._stage.config.hidden_size
        return InLink(
            server,
            LinkReceiver(self.epoch, hidden, self._stage.travel_dtype),
            start.pipeline,
            before,
            ring[before].peer,
            self._progress,
            self._arrived,
        )

    def _arrived(self, arrival: Arrival) -> None:
        self.ring.arrive(arrival.body, arrival.payload)

    def _progress(self) -> Progress:
        if self._out is not None:
            # The next stage is taken to be about as slow as this one.
            self._out.liveness.predicted = self.ring.predicted
        board = self.ring.scoreboard
        return Progress(board.last_completed, board.queued, self.ring.busy)
