"""What became of a stage's steps."""

from molink.ring.patience import Patience, StepSize
from molink.ring.segment import StepDone
from molink.wire.messages.data import Volume


class StepLog:
    """Counts steps, and those that failed."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.rows = 0
        self.failed = 0
        self.patience = Patience()

    def add(self, done: StepDone) -> None:
        """One has ended."""
        self.steps += 1
        self.seconds += done.seconds
        self.failed += done.error is not None
        self.rows += sum(count_rows(result.volume) for result in done.results)
        size = StepSize.of(result.volume for result in done.results)
        if done.error is None:
            self.patience.worked(size)
        else:
            self.patience.failed(size, out_of_memory=done.out_of_memory)


def count_rows(volume: Volume) -> int:
    """Rows that a volume's groups have."""
    return sum(rows.count for rows in volume.rows)
