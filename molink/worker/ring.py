"""One stage's place in the ring during one epoch: receive, order, fuse, run, send."""

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec

from molink.head.batch import Batch
from molink.head.head import Head
from molink.stage.stage import Stage
from molink.wire.base import Payload
from molink.wire.codec import Buffer
from molink.wire.data import (
    Admit,
    History,
    Release,
    RingBody,
    Sampled,
    Tombstone,
    TopLogprobs,
    Volume,
)
from molink.worker.desk import Desk
from molink.worker.executor import Executor, StepDone
from molink.worker.requests import RequestTable
from molink.worker.scoreboard import Scoreboard
from molink.worker.step import Segment, SegmentResult
from molink.worker.work import Control, ControlBody

#: Tops that wait for their ``Sampled``: a bound against a tail that sends nothing but tops.
MAX_TOPS = 4096


class Outlet(Protocol):
    """Toward the next stage; the tail's leads back to the head."""

    def control(self, body: RingBody, payload: Buffer | None = None) -> None:
        """Send a control message on the decode lane."""
        ...

    def volume(self, header: Volume, rows: Buffer) -> None:
        """Send rows ``[n, hidden]``, as ``header.payload`` says, on the lane of their kind."""
        ...

    @property
    def full(self) -> bool:
        """Whether so much is unsent that this stage had better wait."""
        ...


class Ring:
    """The shell around a stage's deciders: scoreboard, head (at stage 0), executor, outgoing link.

    Everything here runs on the event loop; ``executor`` computes on its own thread and keeps at
    most one step. ``pump`` is called after every event and does whatever can be done now.
    """

    def __init__(
        self,
        stage: Stage,
        executor: Executor,
        head: Head | None,
        desk: Desk | None,
    ) -> None:
        self._stage = stage
        self._executor = executor
        self._head = head
        self._desk = desk
        self._loop = asyncio.get_running_loop()
        self._outlet: Outlet | None = None
        self._requests = RequestTable()
        self._tops: dict[tuple[int, int], TopLogprobs] = {}
        self._computing = False
        self._closed = False
        self.scoreboard = Scoreboard()
        self.steps = 0
        self.step_seconds = 0.0
        self.rows = 0
        self.failed_steps = 0
        #: Messages that make no sense at this place of the ring.
        self.strays = 0
        #: Duration of the last steps with decode rows, for liveness predictions, in seconds.
        self.predicted = 0.0

    def open(self, outlet: Outlet | None) -> None:
        """Begin; without an outlet this stage is the whole ring."""
        self._outlet = outlet
        self.pump()

    def close(self) -> None:
        """The epoch is over: what is still computing is ignored."""
        self._closed = True
        if self._desk is not None:
            self._desk.close()

    # --- events ----------------------------------------------------------------------------------

    def arrive(self, body: RingBody, data: bytearray | memoryview | None) -> None:
        """A whole message came from the previous stage; volumes come with all of their rows."""
        now = time.monotonic()
        match body:
            case Admit() | History() | Release() | Tombstone() | Volume() if self._head is None:
                self.scoreboard.arrive(body, data, now)
            case Sampled() | TopLogprobs() | Release() | Tombstone():
                self._came_round(body, now)
            case _:
                self.strays += 1
        self.pump()

    def pump(self) -> None:
        """Do what can be done: ask the head, forward controls, start a step."""
        if self._closed:
            return
        now = time.monotonic()
        if self._head is not None and not self._computing:
            while self.scoreboard.queued == 0 and (batch := self._head.next(now)) is not None:
                self._take_batch(batch, now)
                self._forward(self.scoreboard.complete((), now))
        self._forward(self.scoreboard.complete((), now))
        if self._computing or (self._outlet is not None and self._outlet.full):
            return
        work = self.scoreboard.take(now)
        if work is not None:
            segments = [Segment(part.volume, part.data, part.kept) for part in work.parts]
            self._computing = True
            self._executor.submit(self._requests, segments, self._hand_over)

    # --- from the head ---------------------------------------------------------------------------

    def _take_batch(self, batch: Batch, now: float) -> None:
        """Feed a micro-batch of the head into this stage's own scoreboard."""
        for control in batch.control:
            data = None if control.tokens is None else array("i", control.tokens).tobytes()
            self.scoreboard.arrive(control.body, data, now)
        for volume in batch.volumes:
            self.scoreboard.arrive(volume.header, volume.tokens, now)

    def _came_round(self, body: Sampled | TopLogprobs | Release | Tombstone, now: float) -> None:
        """Something arrived at the head from the tail."""
        if self._head is None or self._desk is None:
            return
        match body:
            case TopLogprobs():
                if len(self._tops) < MAX_TOPS:
                    self._tops[body.request, body.position] = body
            case Sampled():
                emissions = self._head.sampled(body, self._tops, now)
                for choice in body.choices:
                    self._tops.pop((choice.request, choice.position), None)
                self._desk.deliver(emissions, now)
            case Tombstone():
                self._desk.deliver(self._head.tombstone(body.tick, now), now)
            case Release():
                self._head.released(body.tick, now)

    # --- to the next stage -----------------------------------------------------------------------

    def _forward(self, controls: Sequence[Control]) -> None:
        """Apply completed controls here and pass them on."""
        for control in controls:
            body = control.body
            match body:
                case Admit():
                    self._requests.admit(body)
                    if not self._stage.is_last:
                        self._pass_on(body)
                case History():
                    self._history(body, control.data)
                case Release():
                    self._requests.release(body.request)
                    self._pass_on(body)
                case Tombstone():
                    self._pass_on(body)

    def _history(self, body: History, data: object) -> None:
        """Tokens for penalties (``i32``): kept at the tail, passed on before it."""
        if not isinstance(data, bytes | bytearray | memoryview):
            return
        if self._stage.is_last:
            ids = memoryview(data).cast("B").cast("i").tolist()
            self._requests.history(body.request, body.first, ids)
        else:
            self._pass_on(body, data)

    def _pass_on(self, body: ControlBody, payload: Buffer | None = None) -> None:
        if self._outlet is not None:
            self._outlet.control(body, payload)
        elif isinstance(body, Release | Tombstone):
            self._came_round(body, time.monotonic())

    # --- from the compute thread -----------------------------------------------------------------

    def _hand_over(self, done: StepDone) -> None:
        """Called on the compute thread."""
        self._loop.call_soon_threadsafe(self._step_done, done)

    def _step_done(self, done: StepDone) -> None:
        if self._closed:
            return
        now = time.monotonic()
        self._computing = False
        self._count(done)
        for result in done.results:
            self._send(result, now)
        ticks = [result.volume.tick for result in done.results]
        self._forward(self.scoreboard.complete(ticks, now))
        self.pump()

    def _send(self, result: SegmentResult, now: float) -> None:
        if result.sampled is None:
            if self._outlet is not None and result.rows is not None:
                count = sum(rows.count for rows in result.volume.rows)
                shape = Payload(self._stage.travel_dtype, (count, self._stage.config.hidden_size))
                header = msgspec.structs.replace(result.volume, payload=shape)
                self._outlet.volume(header, result.rows)
            return
        bodies: list[TopLogprobs | Sampled] = [*result.tops, result.sampled]
        for body in bodies:
            if self._outlet is not None:
                self._outlet.control(body)
            else:
                self._came_round(body, now)

    # --- reports ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request lives here."""
        return len(self._requests) > 0

    def stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges of this epoch, by name."""
        counters = {
            "stage_steps_total": self.steps,
            "stage_rows_total": self.rows,
            "stage_compute_seconds_total": self.step_seconds,
            "stage_failed_steps_total": self.failed_steps,
            "stage_strays_total": self.strays,
            "stage_dropped_groups_total": self.scoreboard.counts["dropped_groups"],
        }
        gauges = {
            "stage_requests": len(self._requests),
            "stage_queued_volumes": self.scoreboard.queued,
            "stage_completed_tick": self.scoreboard.last_completed,
        }
        return (
            {name: float(value) for name, value in counters.items()},
            {name: float(value) for name, value in gauges.items()},
        )

    def _count(self, done: StepDone) -> None:
        self.steps += 1
        self.step_seconds += done.seconds
        self.failed_steps += done.error is not None
        self.predicted = (
            done.seconds if self.steps == 1 else (0.8 * self.predicted + 0.2 * done.seconds)
        )
        self.rows += sum(rows.count for result in done.results for rows in result.volume.rows)
