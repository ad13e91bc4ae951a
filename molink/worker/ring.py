"""One stage's place in the ring during one epoch: receive, order, fuse, run, send."""

import contextlib
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from molink.head.batch import Batch
from molink.head.head import Head
from molink.head.request import Emission
from molink.link.outlink import Progress
from molink.link.policy import DecodeFinished, DecodeStarted, Event
from molink.wire.base import Payload
from molink.wire.codec import Buffer
from molink.wire.data import (
    Admit,
    History,
    Release,
    RingBody,
    Sampled,
    Table,
    Tombstone,
    TopLogprobs,
    Volume,
)
from molink.wire.profile import Profile
from molink.worker.patience import Patience, StepSize
from molink.worker.scoreboard import BoardLimits, Scoreboard
from molink.worker.segment import (
    Executing,
    Requests,
    Segment,
    SegmentResult,
    StageShape,
    StepDone,
)
from molink.worker.steptimes import StepTimes
from molink.worker.work import Control, ControlBody, Work, block_ids

#: Tops that wait for their ``Sampled``: a bound against a tail that sends nothing but tops.
MAX_TOPS = 4096

log = logging.getLogger(__name__)


class Outlet(Protocol):
    """Toward the next stage; the tail's leads back to the head."""

    def control(self, body: RingBody, payload: Buffer | None = None) -> None:
        """Send a control message on the decode lane."""
        ...

    def volume(self, header: Volume, rows: Buffer) -> None:
        """Send rows ``[n, hidden]``, as ``header.payload`` says, on the lane of their kind."""
        ...

    def handle(self, event: Event) -> None:
        """Tell the transmission policy what the executor does."""
        ...

    @property
    def full(self) -> bool:
        """Whether so much is unsent that this stage had better wait."""
        ...


class FrontDesk(Protocol):
    """Where the head's words to daemons go; :class:`molink.worker.desk.Desk` is one."""

    def deliver(self, emissions: Iterable[Emission], now: float) -> None:
        """Tell them."""

    def close(self) -> None:
        """The epoch is over."""


class Ring:
    """One stage's deciders put together: scoreboard, head (at stage 0), executor, outgoing link.

    It has no clock, threads or sockets of its own: ``clock`` is in seconds, every method is called
    on one thread, and ``executor`` keeps at most one step and reports on that thread, so a
    simulation can run it in virtual time. ``pump`` is called after every event and does whatever
    can be done now.

    ``profile`` is how long its steps have been measured to take. ``on_broken`` is told, once, why
    this stage can't go on: an error of our own after which ticks would be missing, or steps that
    fail one after another.
    """

    def __init__(
        self,
        stage: StageShape,
        requests: Requests,
        executor: Executing,
        head: Head | None,
        desk: FrontDesk | None,
        profile: Profile,
        on_broken: Callable[[str], None],
        clock: Callable[[], float],
        limits: BoardLimits | None = None,
    ) -> None:
        self._stage = stage
        self._clock = clock
        self._executor = executor
        self._head = head
        self._desk = desk
        self._outlet: Outlet | None = None
        self._requests = requests
        self._tops: dict[tuple[int, int], TopLogprobs] = {}
        self._computing = False
        self._closed = False
        self.scoreboard = Scoreboard(limits)
        self.steps = 0
        self.step_seconds = 0.0
        self.rows = 0
        self.failed_steps = 0
        #: Messages that make no sense at this place of the ring.
        self.strays = 0
        self._patience = Patience()
        self._on_broken = on_broken
        self._times = StepTimes(profile)
        #: How long the step that runs should take at most, in seconds; 0 between steps.
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
        with self._unbroken():
            self._arrive(body, data)
            self._pump()

    def pump(self) -> None:
        """Do what can be done: ask the head, forward controls, start a step."""
        with self._unbroken():
            self._pump()

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        """An error in here would leave a tick undone for ever: the stage ends with it."""
        try:
            yield
        except Exception as error:
            log.exception("this stage can't go on")
            self._break(f"{type(error).__name__}: {error}")

    def _break(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._on_broken(reason)

    def _arrive(self, body: RingBody, data: bytearray | memoryview | None) -> None:
        now = self._clock()
        match body:
            case Admit() | History() | Table() | Release() | Tombstone() | Volume() if (
                self._head is None
            ):
                self.scoreboard.arrive(body, data, now)
            case Sampled() | TopLogprobs() | Release() | Tombstone():
                self._came_round(body, now)
            case _:
                self.strays += 1

    def _pump(self) -> None:
        if self._closed:
            return
        now = self._clock()
        if self._head is not None and not self._computing:
            while self.scoreboard.queued == 0 and (batch := self._head.next(now)) is not None:
                self._take_batch(batch, now)
                self._forward(self.scoreboard.complete((), now))
        self._forward(self.scoreboard.complete((), now))
        if self._computing or (self._outlet is not None and self._outlet.full):
            return
        work = self.scoreboard.take(now)
        if work is not None:
            self._start_step(work)

    def _start_step(self, work: Work) -> None:
        segments = [Segment(part.volume, part.data, part.kept) for part in work.parts]
        self._computing = True
        expected = self._times.begin(part.volume for part in work.parts)
        self.predicted = expected.most
        if work.decode is not None and self._outlet is not None:
            self._outlet.handle(DecodeStarted(_rows(work.decode.volume), expected.likely))
        self._executor.submit(segments, self._step_done)

    # --- from the head ---------------------------------------------------------------------------

    def _take_batch(self, batch: Batch, now: float) -> None:
        """Feed a micro-batch of the head into this stage's own scoreboard."""
        for control in batch.control:
            data = None if control.ids is None else array("i", control.ids).tobytes()
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
                emissions = self._head.sampled(self._sensible(body), self._tops, now)
                for choice in body.choices:
                    self._tops.pop((choice.request, choice.position), None)
                self._desk.deliver(emissions, now)
            case Tombstone():
                self._desk.deliver(self._head.tombstone(body.tick, now), now)
            case Release():
                self._head.released(body.tick, now)
                for key in [key for key in self._tops if key[0] == body.request]:
                    del self._tops[key]

    def _sensible(self, sampled: Sampled) -> Sampled:
        """Without tokens that don't exist: a step with one would fail all requests in it."""
        vocabulary = self._stage.vocabulary
        choices = tuple(choice for choice in sampled.choices if choice.token < vocabulary)
        if len(choices) == len(sampled.choices):
            return sampled
        self.strays += len(sampled.choices) - len(choices)
        return msgspec.structs.replace(sampled, choices=choices)

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
                case Table():
                    self._table(body, control.data)
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
            self._requests.history(body.request, body.first, memoryview(data).cast("B").cast("i"))
        else:
            self._pass_on(body, data)

    def _table(self, body: Table, data: object) -> None:
        """Blocks of the prefix cache (``i32``), which every stage has to know."""
        self._requests.table(body.request, block_ids(body, data))
        if not self._stage.is_last and isinstance(data, bytes | bytearray | memoryview):
            self._pass_on(body, data)

    def _pass_on(self, body: ControlBody, payload: Buffer | None = None) -> None:
        if self._outlet is not None:
            self._outlet.control(body, payload)
        elif isinstance(body, Release | Tombstone):
            self._came_round(body, self._clock())

    # --- from the executor -----------------------------------------------------------------------

    def _step_done(self, done: StepDone) -> None:
        with self._unbroken():
            self._take_results(done)
            self._pump()

    def _take_results(self, done: StepDone) -> None:
        if self._closed:
            return
        now = self._clock()
        self._computing = False
        self.predicted = 0.0
        self._count(done)
        if self._patience.exhausted or (done.error and not done.results):
            self._break(f"{self._patience.failures} steps failed one after another: {done.error}")
            return
        decoded = sum(_rows(each.volume) for each in done.results if not each.volume.prefill)
        if decoded and self._outlet is not None:
            self._outlet.handle(DecodeFinished(decoded))
        # One by one: what waits for the decode rows need not wait for the prefill beside them.
        for result in done.results:
            self._send(result, now)
            self._forward(self.scoreboard.complete([result.volume.tick], now))

    def _send(self, result: SegmentResult, now: float) -> None:
        if result.sampled is None:
            if self._outlet is not None and result.rows is not None:
                shape = (_rows(result.volume), self._stage.hidden)
                payload = Payload(self._stage.dtype, shape)
                header = msgspec.structs.replace(result.volume, payload=payload)
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
    def progress(self) -> Progress:
        """What the neighbours are told; work that a full link holds back is not waited for."""
        board = self.scoreboard
        held = self._outlet is not None and self._outlet.full and not self._computing
        return Progress(
            completed=board.last_completed,
            queued=0 if held else board.queued,
            busy=len(self._requests) > 0,
            predicted=self.predicted,
        )

    def stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges of this epoch, by name."""
        counters = {
            "stage_steps_total": self.steps,
            "stage_rows_total": self.rows,
            "stage_compute_seconds_total": self.step_seconds,
            "stage_failed_steps_total": self.failed_steps,
            "stage_strays_total": self.strays,
            "stage_dropped_groups_total": self.scoreboard.counts["dropped_groups"],
            "stage_refused_total": self.scoreboard.refused,
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
        size = StepSize.of(result.volume for result in done.results)
        if done.error is None:
            self._patience.worked(size)
        else:
            self._patience.failed(size, out_of_memory=done.out_of_memory)
        self.rows += sum(_rows(result.volume) for result in done.results)
        self._times.end(done.seconds)


def _rows(volume: Volume) -> int:
    return sum(rows.count for rows in volume.rows)
