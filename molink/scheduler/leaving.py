"""What is left of an admission that is over."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.scheduler.host import HostCopy
from molink.scheduler.job import Job
from molink.scheduler.ledger import TurnCount


@dataclass(frozen=True, slots=True)
class Leaving:
    """An admission that is over and whose release has still to be issued.

    The first ``computed`` of ``tokens`` are in ``blocks`` at every stage, and the first ``depth``
    of the blocks on the prefix tree's path to ``node``; unless it is ``sound``, nothing of that can
    be relied on. ``source`` is a block that rows in flight copy from, -1 if none. ``copy`` is where
    in host memory the first blocks are to be kept, if they are.
    """

    id: int
    blocks: tuple[int, ...]
    last: int
    also: tuple[int, ...]
    trip: TurnCount | None
    tokens: Sequence[int]
    computed: int
    node: int
    depth: int
    source: int = -1
    sound: bool = True
    copy: HostCopy | None = None

    @property
    def holds(self) -> tuple[int, ...]:
        """All blocks that it has a reference to."""
        return self.blocks if self.source < 0 else (*self.blocks, self.source)

    @classmethod
    def of(cls, job: Job, trip: TurnCount | None) -> "Leaving":
        """The admission of ``job`` is over; ``trip`` counts turns until its blocks are back."""
        return cls(
            job.id,
            tuple(job.blocks),
            job.last,
            tuple(sorted(job.flight.keys() - {job.last})),
            trip,
            job.tokens,
            job.computed,
            job.node,
            job.depth,
            job.source,
            job.sound,
            job.copy,
        )
