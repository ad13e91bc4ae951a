"""What is left of an admission that is over."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.scheduler.blocks import HostCopy
from molink.scheduler.in_flight import RoundTripCounter
from molink.scheduler.request_state import RequestState


@dataclass(frozen=True, slots=True)
class PendingRelease:
    """An admission that is over and whose release has still to be issued.

    The first ``num_computed`` of ``tokens`` are in ``blocks`` at every stage, and the first
    ``tree_depth`` of the blocks on the prefix tree's path to ``tree_node``; unless it is
    ``has_valid_kv``, nothing of that can be relied on. ``copy_source`` is a block that rows in
    flight copy from, -1 if none. ``host_copy`` is where in host memory the first blocks are to be
    kept, if they are.
    """

    id: int
    blocks: tuple[int, ...]
    last_seq: int
    other_seqs: tuple[int, ...]
    round_trips: RoundTripCounter | None
    tokens: Sequence[int]
    num_computed: int
    tree_node: int
    tree_depth: int
    copy_source: int = -1
    has_valid_kv: bool = True
    host_copy: HostCopy | None = None

    @property
    def held_blocks(self) -> tuple[int, ...]:
        """All blocks that it has a reference to."""
        return self.blocks if self.copy_source < 0 else (*self.blocks, self.copy_source)

    @classmethod
    def from_state(cls, state: RequestState, counter: RoundTripCounter | None) -> "PendingRelease":
        """The admission of ``job`` is over; ``round_trips`` counts turns until its blocks are
        back."""
        return cls(
            state.id,
            tuple(state.blocks),
            state.last_seq,
            tuple(sorted(state.in_flight.keys() - {state.last_seq})),
            counter,
            state.tokens,
            state.num_computed,
            state.tree_node,
            state.tree_depth,
            state.copy_source,
            state.has_valid_kv,
            state.host_copy,
        )
