"""How the rows of a product lie in memory."""

from torch import Tensor

#: Beginnings so far apart fall on the same lines of a cache close by, which has room for few.
_ALIKE = 4096
#: Rows that such a cache has room for beside weights; of float32 no more are read side by side.
_FEW = 8
_LINE = 64


def lay_apart(rows: Tensor) -> Tensor:
    """``rows``, each of which lies in one piece: copied apart if they'd push each other out.

    A product reads some of them side by side: of 4096 bf16 each, 12 at once take a tenth longer.
    """
    width, size = rows.shape[1], rows.element_size()
    if len(rows) <= _FEW or size > 2 or width * size % _ALIKE:
        return rows.contiguous()
    apart = rows.new_empty(len(rows), width + _LINE // size)[:, :width]
    return apart.copy_(rows)
