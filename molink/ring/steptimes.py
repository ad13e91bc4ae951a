"""How long a step should take: for the next stage, which must not take us for dead."""

from collections.abc import Iterable
from dataclasses import dataclass

from molink.facts.profile import Profile
from molink.wire.messages.data import Volume

#: A step may take this many times what the profile and the past say before it counts as late.
SLACK = 2.0
#: Weight of the last step in the running mean of how much longer than the profile steps take.
SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: ``likely``, and ``maximum``, which it should not exceed."""

    likely: float
    maximum: float


class StepTimes:
    """Predicts steps by a stage's profile, corrected by how long those before have taken.

    An under-estimate is dangerous: a stage that is busy for longer than five times ``maximum``
    counts as dead, the ring is formed anew, and the same step comes again. So decode and prefill
    rows count as two passes one after another, and steps that were quicker than the profile never
    lower ``maximum``.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._pace = 1.0
        self._expected = 0.0

    def begin(self, volumes: Iterable[Volume]) -> StepTime:
        """A step with these volumes begins."""
        self._expected = sum(self._volume_s(volume) for volume in volumes)
        likely = self._pace * self._expected
        return StepTime(likely, SLACK * max(1.0, self._pace) * self._expected)

    def end(self, seconds: float) -> None:
        """It has ended."""
        if self._expected > 0:
            seen = seconds / self._expected
            self._pace += SMOOTHING * (seen - self._pace)

    def _volume_s(self, volume: Volume) -> float:
        """Seconds of a volume's rows in a pass of their own, after as many tokens as they have.

        Without a measured chunk, each row costs what a pass of a single one does: less, really.
        """
        profile = self._profile
        rows = sum(group.count for group in volume.rows)
        before = sum(group.start * group.count for group in volume.rows) / max(1, rows)
        if not volume.prefill:
            return profile.decode_s(rows, before)
        return profile.prefill_s(rows, before) or rows * profile.decode_s(1, before)
