"""A stage's steps: how long one should take, what became of them, and whether they may go on."""

from collections.abc import Iterable

import msgspec

from molink.facts.profile import Profile
from molink.ring.step import StepResult
from molink.wire.messages.data_plane import Volume

#: How long the share is averaged over, in seconds.
WINDOW_S = 5.0


class BubbleMeter:
    """Seconds in which requests lived at this stage and nothing was computed.

    What pipelines are measured by: the share of time in which a stage waits for the others, for the
    links, or for someone to ask for something more.
    """

    def __init__(self, now: float) -> None:
        #: In all.
        self.seconds = 0.0
        self._since = now
        self._live = self._computing = False
        self._window_start = now
        #: Of this window: bubbles, time in which requests lived, and time in which a step ran.
        self._bubble = self._lived = self._busy = 0.0
        self._share = self._busy_share = 0.0

    def update_state(self, now: float, *, live: bool, computing: bool) -> None:
        """From ``now`` on requests live here, or none do, and a step runs, or none does."""
        passed = now - self._since if now > self._since else 0.0
        if self._computing:
            self._busy += passed
        if self._live:
            self._lived += passed
            if not self._computing:
                self._bubble += passed
                self.seconds += passed
        self._since, self._live, self._computing = now, live, computing
        if now - self._window_start >= WINDOW_S:
            self._share = self._bubble / self._lived if self._lived > 0 else 0.0
            self._busy_share = self._busy / (now - self._window_start)
            self._window_start, self._bubble, self._lived, self._busy = now, 0.0, 0.0, 0.0

    @property
    def bubble_share(self) -> float:
        """Bubbles' share of the time in which requests lived, in the last window; 0 if none did."""
        return self._share

    @property
    def busy_share(self) -> float:
        """The share of the last window in which a step ran."""
        return self._busy_share


#: A step may take this many times what the profile and the past say before it counts as late.
SLACK = 2.0
#: Weight of the last step in the running mean of how much longer than the profile steps take.
SMOOTHING = 0.1
#: Steps that may fail one after another: a device in a bad state fails them all.
MAX_FAILED_STEPS = 5
#: Steps that ran out of memory, each larger than any that worked, count this much less.
LARGE_STEP_WEIGHT = 4


class StepTime(msgspec.Struct, frozen=True):
    """Seconds of a step: ``expected_s``, and ``max_s``, which it should not exceed."""

    expected_s: float
    max_s: float


class StepTimePredictor:
    """Predicts steps by a stage's profile, corrected by how long those before have taken.

    An under-estimate is dangerous: a stage that is busy for longer than five times ``maximum``
    counts as dead, the ring is formed anew, and the same step comes again. So decode and prefill
    rows count as two passes one after another, and steps that were quicker than the profile never
    lower ``maximum``.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._slowdown = 1.0
        self._expected_s = 0.0

    def begin_step(self, volumes: Iterable[Volume]) -> StepTime:
        """A step with these volumes begins."""
        self._expected_s = sum(self._volume_s(volume) for volume in volumes)
        likely = self._slowdown * self._expected_s
        return StepTime(likely, SLACK * max(1.0, self._slowdown) * self._expected_s)

    def end_step(self, seconds: float) -> None:
        """It has ended."""
        if self._expected_s > 0:
            seen = seconds / self._expected_s
            self._slowdown += SMOOTHING * (seen - self._slowdown)

    def _volume_s(self, volume: Volume) -> float:
        """Seconds of a volume's rows in a pass of their own, after as many tokens as they have.

        Without a measured chunk, each row costs what a pass of a single one does: less, really.
        """
        profile = self._profile
        rows, before = volume.count, volume.context
        if not volume.prefill:
            return profile.decode_s(rows, before)
        return profile.prefill_s(rows, before) or rows * profile.decode_s(1, before)


class StepSize(msgspec.Struct, frozen=True):
    """How much memory a step asks for: its rows, and the positions that these attend to."""

    rows: int = 0
    positions: int = 0

    @classmethod
    def of_volumes(cls, volumes: Iterable[Volume]) -> "StepSize":
        """That of the volumes of one step."""
        rows = positions = 0
        for volume in volumes:
            rows += volume.count
            positions += sum(group.start + group.count for group in volume.slices)
        return cls(rows, positions)

    def exceeds(self, other: "StepSize") -> bool:
        """Whether it asks for more of anything."""
        return self.rows > other.rows or self.positions > other.positions

    def merge_with(self, other: "StepSize") -> "StepSize":
        """The larger of each."""
        if not other.exceeds(self):
            return self
        return StepSize(max(self.rows, other.rows), max(self.positions, other.positions))


class FailureTracker:
    """Failures since the last step that worked.

    Running out of memory may be the fault of one large batch, whose requests have failed with it:
    such a step says little of the device. One that is no larger than what worked before does.
    """

    def __init__(self) -> None:
        #: Steps that failed one after another.
        self.failures = 0
        self._strain = 0
        self._largest_succeeded = StepSize()

    @property
    def is_exhausted(self) -> bool:
        """Whether the device has to be taken for broken."""
        return self._strain >= MAX_FAILED_STEPS * LARGE_STEP_WEIGHT

    def on_step_succeeded(self, size: StepSize) -> None:
        """A step has worked."""
        self.failures = self._strain = 0
        self._largest_succeeded = self._largest_succeeded.merge_with(size)

    def on_step_failed(self, size: StepSize, *, out_of_memory: bool) -> None:
        """A step has failed."""
        self.failures += 1
        large = out_of_memory and size.exceeds(self._largest_succeeded)
        self._strain += 1 if large else LARGE_STEP_WEIGHT


class StepLog:
    """Counts steps, and those that failed."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.seconds = 0.0
        self.num_rows = 0
        self.num_failed = 0
        self.failures = FailureTracker()

    def add_step(self, done: StepResult) -> None:
        """One has ended."""
        self.num_steps += 1
        self.seconds += done.seconds
        self.num_failed += done.error is not None
        size = StepSize.of_volumes([result.volume for result in done.outputs])
        self.num_rows += size.rows
        if done.error is None:
            self.failures.on_step_succeeded(size)
        else:
            self.failures.on_step_failed(size, out_of_memory=done.out_of_memory)
