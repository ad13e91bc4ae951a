"""How the rows of a product lie in memory."""

from torch import Tensor

#: Beginnings so far apart fall on the same lines of a cache close by, which has room for few.
_ALIKE = 4096
#: Rows that such a cache has room for beside weights.
_FEW = 6
_LINE = 64


def lay_apart(rows: Tensor) -> Tensor:
    """``rows``, each of which lies in one piece: copied apart if they'd push each other out.

    A product reads some of them side by side: of 4096 bf16 each, 12 at once take it half as long
    again.
    """
    width, size = rows.shape[1], rows.element_size()
    if len(rows) <= _FEW or width * size % _ALIKE:
        return rows.contiguous()
    apart = rows.new_empty(len(rows), width + _LINE // size)[:, :width]
    return apart.copy_(rows)
