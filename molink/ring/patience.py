"""Decides whether a stage whose steps fail can go on."""

from collections.abc import Iterable
from dataclasses import dataclass

from molink.wire.messages.data import Volume

#: Steps that may fail one after another: a device in a bad state fails them all.
MAX_FAILED_STEPS = 5
#: Steps that ran out of memory, each larger than any that worked, count this much less.
LARGE_STEPS = 4


@dataclass(frozen=True, slots=True)
class StepSize:
    """How much memory a step asks for: its rows, and the positions that these attend to."""

    rows: int = 0
    positions: int = 0

    @classmethod
    def of(cls, volumes: Iterable[Volume]) -> "StepSize":
        """That of the volumes of one step."""
        groups = [rows for volume in volumes for rows in volume.rows]
        return cls(
            sum(rows.count for rows in groups), sum(rows.start + rows.count for rows in groups)
        )

    def exceeds(self, other: "StepSize") -> bool:
        """Whether it asks for more of anything."""
        return self.rows > other.rows or self.positions > other.positions

    def merged(self, other: "StepSize") -> "StepSize":
        """The larger of each."""
        return StepSize(max(self.rows, other.rows), max(self.positions, other.positions))


class Patience:
    """Failures since the last step that worked.

    Running out of memory may be the fault of one large batch, whose requests have failed with it:
    such a step says little of the device. One that is no larger than what worked before does.
    """

    def __init__(self) -> None:
        #: Steps that failed one after another.
        self.failures = 0
        self._strain = 0
        self._worked = StepSize()

    @property
    def exhausted(self) -> bool:
        """Whether the device has to be taken for broken."""
        return self._strain >= MAX_FAILED_STEPS * LARGE_STEPS

    def worked(self, size: StepSize) -> None:
        """A step has worked."""
        self.failures = self._strain = 0
        self._worked = self._worked.merged(size)

    def failed(self, size: StepSize, *, out_of_memory: bool) -> None:
        """A step has failed."""
        self.failures += 1
        large = out_of_memory and size.exceeds(self._worked)
        self._strain += 1 if large else LARGE_STEPS
