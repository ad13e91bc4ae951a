"""Factors of queries that grow with the position, which keeps attention sharp in long contexts.

Llama 4 introduced them; Ministral 3 has them, too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from molink.checkpoint.rope import QueryScaling
from molink.stage.batch import SequenceRows
from molink.stage.decoder.rotary import AngleTable

#: Initial table size in positions; doubled as sequences grow.
_INITIAL_POSITIONS = 1024


class QueryScales:
    """Factors of rows' queries, ``[T, 1, 1]`` in the compute type, from a table of positions.

    It has the methods of a :class:`.Rope` and comes last in a stage's list of ropes.
    """

    #: All positions have a table entry; see :attr:`.Rope.table_positions`.
    table_positions: None = None

    def __init__(self, config: QueryScaling, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._table = torch.empty(0)

    def compute_angles(self, positions: Tensor, sequences: Sequence[SequenceRows]) -> Tensor:
        """Return factors of rows at ``positions`` (int64 ``[T]``, on the device)."""
        table = self.grow_table(max(sequence.end for sequence in sequences))
        return table.angles.index_select(0, positions)

    def grow_table(self, longest: int) -> AngleTable:
        """Return a table of all positions below ``longest``."""
        if longest > len(self._table):
            size = max(_INITIAL_POSITIONS, 1 << (longest - 1).bit_length())
            positions = torch.arange(size) + self._config.offset
            steps = (positions // self._config.interval).float()
            scales = 1 + self._config.slope * torch.log1p(steps)
            self._table = scales.view(-1, 1, 1).to(self._device, self._dtype)
        return AngleTable(self._table, len(self._table), len(self._table))
