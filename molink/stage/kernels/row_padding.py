"""How the rows of a product lie in memory."""

from torch import Tensor

#: Beginnings so far apart fall on the same lines of a cache close by, which has room for few.
_CACHE_SET_STRIDE = 4096
#: Rows that such a cache has room for beside weights; of float32 no more are read side by side.
_MAX_CACHED_ROWS = 8
_CACHE_LINE_BYTES = 64


def pad_row_stride(rows: Tensor) -> Tensor:
    """``rows``, each of which lies in one piece: copied apart if they'd push each other out.

    A product reads some of them side by side: of 4096 bf16 each, 12 at once take a tenth longer.
    """
    width, size = rows.shape[1], rows.element_size()
    if len(rows) <= _MAX_CACHED_ROWS or size > 2 or width * size % _CACHE_SET_STRIDE:
        return rows.contiguous()
    apart = rows.new_empty(len(rows), width + _CACHE_LINE_BYTES // size)[:, :width]
    return apart.copy_(rows)
