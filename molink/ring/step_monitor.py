"""Monitors a stage's steps: expected duration, failures, bubbles."""

from collections.abc import Iterable

import msgspec

from molink.facts.profile import Profile
from molink.ring.step import StepResult
from molink.util.ewma import Ewma
from molink.wire.messages.data_plane import Volume

#: Averaging window of the shares, in seconds.
WINDOW_S = 5.0


class BubbleMeter:
    """Measures pipeline bubbles: seconds with live requests and no running step."""

    def __init__(self, now: float) -> None:
        #: Total bubble time in seconds.
        self.seconds = 0.0
        self._since = now
        self._live = self._computing = False
        self._window_start = now
        #: Within the current window: bubble time, time with live requests, compute time.
        self._bubble = self._lived = self._busy = 0.0
        self._share = self._busy_share = 0.0

    def update_state(self, now: float, *, live: bool, computing: bool) -> None:
        """Record whether, from ``now`` on, requests are live and a step runs."""
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
        """Share of bubbles in the last window's time with live requests; 0 without requests."""
        return self._share

    @property
    def busy_share(self) -> float:
        """Share of compute time in the last window."""
        return self._busy_share


#: Multiple of its expected seconds after which a step is late.
SLACK = 2.0
#: Weight of a step in the running mean of the slowdown.
SMOOTHING = 0.1
#: Consecutive failed steps after which the device counts as broken.
MAX_FAILED_STEPS = 5
#: Weight of a failed step, relative to one that ran out of memory and is larger than any that
#: succeeded.
LARGE_STEP_WEIGHT = 4


class StepTime(msgspec.Struct, frozen=True):
    """Expected and maximum seconds of a step, and the profile's seconds."""

    expected_s: float
    max_s: float
    profile_s: float


class StepTimePredictor:
    """Predicts step times by a stage's profile and recent steps.

    An underestimate is dangerous: a stage that is busy for five times ``max_s`` counts as dead, the
    ring is formed again, and the same step recurs. Therefore decode and prefill rows count as two
    consecutive passes, and fast steps never reduce ``max_s``.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._slowdown = Ewma(SMOOTHING, 1.0)

    def predict_step(self, volumes: Iterable[Volume]) -> StepTime:
        """Predict a step with these volumes."""
        seconds = sum(self._volume_s(volume) for volume in volumes)
        slowdown = self._slowdown.get_or(1.0)
        return StepTime(slowdown * seconds, SLACK * max(1.0, slowdown) * seconds, seconds)

    def add_step(self, predicted: StepTime, seconds: float) -> None:
        """Record a finished step."""
        if predicted.profile_s > 0:
            self._slowdown.add_sample(seconds / predicted.profile_s)

    def _volume_s(self, volume: Volume) -> float:
        """Return the seconds of a separate pass of a volume's rows.

        Without a measured chunk each prefill row counts as a pass of its own, which is an upper
        bound.
        """
        profile = self._profile
        rows, before = volume.count, volume.context
        if not volume.prefill:
            return profile.decode_s(rows, before)
        return profile.prefill_s(rows, before) or rows * profile.decode_s(1, before)


class StepSize(msgspec.Struct, frozen=True):
    """Memory demand of a step: its rows, and the positions to which they attend."""

    rows: int = 0
    positions: int = 0

    @classmethod
    def of_volumes(cls, volumes: Iterable[Volume]) -> "StepSize":
        """Compute the size of a step with these volumes."""
        rows = positions = 0
        for volume in volumes:
            rows += volume.count
            positions += sum(
                request_slice.start + request_slice.count for request_slice in volume.slices
            )
        return cls(rows, positions)

    def exceeds(self, other: "StepSize") -> bool:
        """Whether this size is larger than ``other`` in any dimension."""
        return self.rows > other.rows or self.positions > other.positions

    def merge_with(self, other: "StepSize") -> "StepSize":
        """Return the maximum of each dimension."""
        if not other.exceeds(self):
            return self
        return StepSize(max(self.rows, other.rows), max(self.positions, other.positions))


class FailureTracker:
    """Counts failures since the last successful step.

    A large step that runs out of memory says little about the device, since its requests fail with
    it. A step that fails although it is no larger than earlier successful ones does.
    """

    def __init__(self) -> None:
        #: Consecutive failed steps.
        self.failures = 0
        self._strain = 0
        self._largest_succeeded = StepSize()

    @property
    def is_exhausted(self) -> bool:
        """Whether the device counts as broken."""
        return self._strain >= MAX_FAILED_STEPS * LARGE_STEP_WEIGHT

    def on_step_succeeded(self, size: StepSize) -> None:
        """Record a successful step."""
        self.failures = self._strain = 0
        self._largest_succeeded = self._largest_succeeded.merge_with(size)

    def on_step_failed(self, size: StepSize, *, out_of_memory: bool) -> None:
        """Record a failed step."""
        self.failures += 1
        large = out_of_memory and size.exceeds(self._largest_succeeded)
        self._strain += 1 if large else LARGE_STEP_WEIGHT


class StepLog:
    """Counts steps and failures."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.seconds = 0.0
        self.num_rows = 0
        self.num_failed = 0
        self.failures = FailureTracker()

    def add_step(self, done: StepResult) -> None:
        """Record a finished step."""
        self.num_steps += 1
        self.seconds += done.seconds
        self.num_failed += done.error is not None
        size = StepSize.of_volumes([result.volume for result in done.outputs])
        self.num_rows += size.rows
        if done.error is None:
            self.failures.on_step_succeeded(size)
        else:
            self.failures.on_step_failed(size, out_of_memory=done.out_of_memory)
