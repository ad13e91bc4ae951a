"""One stage's place in the ring during one epoch: receive, order, fuse, run, send."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from molink.facts.profile import Profile
from molink.facts.ringtimes import LinkFacts
from molink.link.heartbeat import StageProgress, patience_for
from molink.link.policies.base import DecodeFinished, DecodeStarted
from molink.ring.bubbles import Bubbles
from molink.ring.controls import ControlApplier
from molink.ring.ends import Collector, Front
from molink.ring.hosted import NO_ROOM, HostRoom
from molink.ring.knowledge import RingKnowledge
from molink.ring.known import BoardLimits
from molink.ring.pace import PaceMeter
from molink.ring.pieces import Cutting, WholeVolumes
from molink.ring.scoreboard import Scoreboard
from molink.ring.stage import Executing, NextStage, StageRequests, StageShape
from molink.ring.steps import StepLog, StepTimes
from molink.ring.turn import TurnClock
from molink.ring.unbroken import Unbroken
from molink.ring.work import (
    ControlBody,
    Segment,
    SegmentResult,
    StepDone,
    Work,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import Buffer
from molink.wire.messages.data import (
    Release,
    RingBody,
    Sampled,
    Tombstone,
    TopLogprobs,
    Volume,
    VolumePart,
)
from molink.wire.messages.rounds import HostReport, LinkReport, PaceReport

#: What the scoreboard of a later stage puts in order, parts of volumes aside.
_FOR_THE_BOARD = ControlBody | Volume


@dataclass(frozen=True, slots=True)
class RingConfig:
    """What a stage is and how it works.

    ``profile`` is how long its steps have been measured to take, ``profiles`` are those of all
    stages. ``cutting`` decides in which pieces prefill rows are computed and sent on, perhaps while
    more are coming. ``host`` is its host memory for KV.
    """

    shape: StageShape
    profile: Profile
    profiles: tuple[Profile, ...] = ()
    limits: BoardLimits = field(default_factory=BoardLimits)
    cutting: Cutting = field(default_factory=WholeVolumes)
    host: HostRoom = NO_ROOM


class Ring:
    """One stage's deciders put together: scoreboard, head (at stage 0), executor, outgoing link.

    It has no clock, threads or sockets of its own: ``clock`` is in seconds, every method is called
    on one thread, and ``executor`` keeps at most one step and reports on that thread, so a
    simulation can run it in virtual time. ``pump`` is called after every event and does whatever
    can be done now.
    """

    def __init__(
        self,
        config: RingConfig,
        requests: StageRequests,
        executor: Executing,
        front: Front | None,
        clock: Callable[[], float],
        on_broken: Callable[[str], None],
    ) -> None:
        """``front`` is the head's end, at stage 0.

        ``on_broken`` is told, once, why this stage can't go on: an error of our own after which
        ticks would be missing, or steps that fail one after another.
        """
        self._shape = shape = config.shape
        self._clock = clock
        self._executor = executor
        self._front = front
        self._next: NextStage | None = None
        self._requests = requests
        self._computing = False
        self._closed = False
        self.scoreboard = Scoreboard(config.limits, config.cutting)
        #: What the step that runs is made of, by tick.
        self._running: dict[int, Segment] = {}
        self._collector = Collector()
        #: How busy it is.
        self.bubbles = Bubbles(clock())
        self.steps = StepLog()
        self._strays = 0
        self._known = RingKnowledge(shape, config.profiles)
        self._on_broken = on_broken
        self._unbroken = Unbroken(self._break)
        self._times = StepTimes(config.profile)
        self._meter = PaceMeter(config.profile)
        self._turns = TurnClock(self._known.times)
        self._host = config.host
        self._controls = ControlApplier(shape, requests, executor, self._turns.over, self._pass_on)
        #: How long the step that runs should take at most, in seconds; 0 between steps.
        self.predicted = 0.0
        #: When that step began.
        self._began = 0.0

    def open(self, following: NextStage | None) -> None:
        """Begin; with nothing ``following`` (an ``OutLink``) this stage is the whole ring."""
        self._next = following
        if self._host.blocks:
            self._pass_on(self._known.host_measured(self._host))
            self._times_known()
        self.pump()

    def close(self) -> None:
        """The epoch is over: what is still computing is ignored."""
        self._closed = True
        if self._front is not None:
            self._front.desk.close()

    # --- events ----------------------------------------------------------------------------------

    def arrive(
        self, body: RingBody, data: bytearray | memoryview | None, rows: int | None = None
    ) -> None:
        """A message came from the previous stage, as :class:`molink.link.receiver.Arrival` says.

        Of a volume the first ``rows`` rows are in ``data``, which has room for all, or all of them
        (``None``). Further rows are announced by a :class:`VolumePart` without data: ``rows`` are
        there then, in all.
        """
        with self._unbroken:
            self._arrive(body, data, rows)
            self._pump()

    def pump(self) -> None:
        """Do what can be done: ask the head, forward controls, start a step."""
        with self._unbroken:
            self._pump()

    def _break(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._on_broken(reason)

    def _arrive(
        self, body: RingBody, data: bytearray | memoryview | None, rows: int | None
    ) -> None:
        now = self._clock()
        match body:
            case VolumePart() if self._front is None and rows is not None:
                self.scoreboard.extend(body.tick, rows, now)
            case _ if self._front is None and isinstance(body, _FOR_THE_BOARD):
                self.scoreboard.arrive(body, data, now, rows)
            case Sampled() | TopLogprobs() | Release() | Tombstone():
                self._came_round(body, now)
            case LinkReport() | PaceReport() | HostReport() if self._known.arrived(body):
                if self._known.goes_on(body, now):
                    self._pass_on(body)
                self._times_known()
            case _:
                self._strays += 1

    def _pump(self) -> None:
        if self._closed:
            return
        now = self._clock()
        if self._front is not None and not self._computing:
            while self._front.feed(self.scoreboard, now):
                self._controls.apply(self.scoreboard.complete((), now))
            self._front.ask(self.pump)
        if controls := self.scoreboard.complete((), now):
            self._controls.apply(controls)
        waits = self._computing or (self._next is not None and self._next.full)
        work = None if waits else self._take(now)
        if work is not None:
            self._start_step(work, now)
        else:
            self._note(now)

    def _take(self, now: float) -> Work | None:
        """What may run now. What never can goes on as a tombstone; others may wait for that."""
        while True:
            work = self.scoreboard.take(now)
            dropped = self.scoreboard.complete((), now)
            if not dropped:
                return work
            self._controls.apply(dropped)
            if work is not None:
                return work

    def _start_step(self, work: Work, now: float) -> None:
        segments = work.segments
        self._running = {segment.volume.tick: segment for segment in segments}
        self._computing = True
        self._note(now)
        volumes = [segment.volume for segment in segments]
        expected = self._times.begin(volumes)
        self._meter.begin(volumes)
        self.predicted, self._began = expected.maximum, now
        if work.decode is not None and self._next is not None:
            self._next.handle(DecodeStarted(work.decode.volume.count, expected.likely))
        # On the compute thread, by molinkd.worker.step.
        self._executor.submit(segments, self._step_done)

    def _came_round(self, body: Sampled | TopLogprobs | Release | Tombstone, now: float) -> None:
        if self._front is not None:
            self._front.came_round(body, now)

    # --- links and paces -------------------------------------------------------------------------

    def link_measured(self, facts: LinkFacts, now: float) -> None:
        """What this stage's link to the next one is like; the others are told."""
        if self._known.is_settled(facts):
            return  # as with most beats
        with self._unbroken:
            report = self._known.link_measured(facts, now)
            if report is not None and not self._closed:
                self._pass_on(report)
                self._times_known()

    @property
    def links(self) -> tuple[LinkFacts, ...]:
        """All links of the ring as far as they are known, each stage's to the next one."""
        return tuple(self._known.times.links)

    def _times_known(self) -> None:
        times = self._turns.times = self._known.times
        if self._front is not None:
            self._front.head.set_times(times)
            room = self._known.host_room
            self._front.head.set_host_room(room.blocks, room.block_s)

    # --- to the next stage -----------------------------------------------------------------------

    def _pass_on(
        self,
        body: ControlBody | LinkReport | PaceReport | HostReport,
        payload: Buffer | None = None,
    ) -> None:
        if self._next is not None:
            self._next.control(body, payload)
        elif isinstance(body, Release | Tombstone):
            self._came_round(body, self._clock())

    # --- from the executor -----------------------------------------------------------------------

    def _step_done(self, done: StepDone) -> None:
        with self._unbroken:
            self._take_results(done)
            self._pump()

    def _take_results(self, done: StepDone) -> None:
        if self._closed:
            return
        now = self._clock()
        self._computing = False
        self.predicted = 0.0
        self._note(now)
        self.steps.add(done)
        self._times.end(done.seconds)
        if done.error is None and self._meter.end(done.seconds, now):
            self._pass_on(self._known.pace_measured(self._meter.pace))
            self._times_known()
        patience = self.steps.patience
        if patience.exhausted or (done.error and not done.results):
            self._break(f"{patience.failures} steps failed one after another: {done.error}")
            return
        # One by one: what waits for the decode rows need not wait for the prefill beside them.
        for result in done.results:
            self._send(result, now)
            self._controls.apply(self.scoreboard.complete([result.volume.tick], now))
        self._tell_of_decode(done.results, now)

    def _tell_of_decode(self, results: Sequence[SegmentResult], now: float) -> None:
        """A decode step is over; its rows are on their way, so nothing can slip in before them."""
        for result in results:
            if not result.volume.prefill and self._next is not None:
                after = self._turns.finished(result.volume, now)
                self._next.handle(DecodeFinished(result.volume.count, after))

    def _send(self, result: SegmentResult, now: float) -> None:
        segment = self._running[result.volume.tick]
        if result.sampled is not None:
            for body in self._collector.add(result.sampled, result, last=segment.last):
                if self._next is not None:
                    self._next.control(body)
                else:
                    self._came_round(body, now)
        elif self._next is not None and result.rows is not None:
            self._send_rows(self._next, segment, result.rows)

    def _send_rows(self, following: NextStage, segment: Segment, rows: Buffer) -> None:
        """The first segment of a volume brings the header of all of its rows."""
        header = segment.header
        if segment.first:
            following.more(header.tick, rows)
            return
        payload = Payload(self._shape.dtype, (header.count, self._shape.hidden))
        following.volume(msgspec.structs.replace(header, payload=payload), rows)

    # --- reports ---------------------------------------------------------------------------------

    @property
    def strays(self) -> int:
        """Messages that make no sense at this place of the ring, and tokens that don't exist."""
        return self._strays + (self._front.strays if self._front is not None else 0)

    @property
    def live(self) -> int:
        """How many requests this stage knows."""
        return len(self._requests)

    @property
    def stuck(self) -> bool:
        """Whether the step that runs takes as long as a dead stage's would."""
        return self._computing and self._clock() - self._began >= patience_for(self.predicted)

    @property
    def progress(self) -> StageProgress:
        """What the neighbours are told; work that a full link holds back is not waited for."""
        queued = self.scoreboard.queued
        if queued and not self._computing and self._next is not None and self._next.full:
            queued = 0
        return StageProgress(
            completed=self.scoreboard.last_completed,
            queued=queued,
            busy=len(self._requests) > 0,
            predicted=self.predicted,
        )

    def stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges of this epoch, by name."""
        self._note(self._clock())
        counters = {
            "stage_steps_total": self.steps.steps,
            "stage_rows_total": self.steps.rows,
            "stage_compute_seconds_total": self.steps.seconds,
            "stage_bubble_seconds_total": self.bubbles.seconds,
            "stage_failed_steps_total": self.steps.failed,
            "stage_strays_total": self.strays,
            "stage_dropped_groups_total": self.scoreboard.counts["dropped_groups"],
            "stage_refused_total": self.scoreboard.refused,
        }
        gauges = {
            "stage_requests": self.live,
            "stage_bubble_share": round(self.bubbles.share, 4),
            "stage_busy_share": round(self.bubbles.busy, 4),
            "stage_queued_volumes": self.scoreboard.queued,
            "stage_completed_tick": self.scoreboard.last_completed,
            "stage_decode_pace": round(self._meter.decode, 3),
        }
        return (
            {name: float(value) for name, value in counters.items()},
            {name: float(value) for name, value in gauges.items()},
        )

    def _note(self, now: float) -> None:
        self.bubbles.note(now, live=len(self._requests) > 0, computing=self._computing)
