"""Triton kernels of attention over a paged KV pool, read in place.

Each program of :func:`attend_pages` processes a tile: some rows of one request times the query
heads of one KV head, against all visible positions or one of several parts of them (FlashDecoding).
:func:`reduce_splits` combines the parts. Decode rows, short drafts and prefill chunks differ only
in the tile's height.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

#: Minimum size of a block's dimensions in a product.
_MIN_BLOCK = 16
#: Bytes of keys (and as many of values) that a low tile and a tall tile load at once.
_LOW_BYTES, _TALL_BYTES = 8 << 10, 16 << 10
#: Parts that :func:`reduce_splits` loads at once.
PARTS_AT_ONCE = 16
#: Exponents are base 2.
_LOG2_E = tl.constexpr(1.4426950408889634)
#: Below all scores, yet finite, so that a row without visible positions in a block does not become
#: NaN.
_LOWEST = tl.constexpr(-1e30)


@dataclass(frozen=True, slots=True)
class TileSize:
    """Lines (rows times query heads of a KV head), positions and dimensions of a program."""

    lines: int
    positions: int
    dims: int

    @classmethod
    def choose(cls, groups: int, rows: int, head_dim: int, itemsize: int) -> "TileSize":
        """Choose a tile for sequences of up to ``rows`` rows that fits any GPU's shared memory."""
        dims = max(_MIN_BLOCK, triton.next_power_of_2(head_dim))
        lines = _MIN_BLOCK
        if rows * groups > lines:
            lines = 64 if dims * itemsize <= 256 else 32
        lines = max(lines, triton.next_power_of_2(groups))
        nbytes = _LOW_BYTES if lines == _MIN_BLOCK else _TALL_BYTES
        positions = max(_MIN_BLOCK, min(64, nbytes // (dims * itemsize)))
        return cls(lines, positions, dims)

    @property
    def is_low(self) -> bool:
        """Whether the tile is low, so that loading KV dominates."""
        return self.lines == _MIN_BLOCK

    @property
    def stages(self) -> int:
        """Stages of software pipelining; pages are loaded one stage after their numbers.

        With 5 a low tile loads its next pages while it computes; with 3 a tall tile loads only
        their numbers, which saves shared memory.
        """
        return 5 if self.is_low else 3


@triton.jit
def _first_visible(position, window, IS_CHUNKED: tl.constexpr):
    """Return the first position that a row at ``position`` sees; may be negative."""
    if IS_CHUNKED:
        first = position // window * window
    else:
        first = position - window + 1
    return first


@triton.jit
def _locate_positions(
    start, count, window, split, splits, IS_CHUNKED: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return a tile's first visible position, and the positions of one of ``splits`` parts.

    Parts are whole blocks from the first block that the first row sees; some may be empty.
    """
    first = tl.maximum(_first_visible(start, window, IS_CHUNKED), 0)
    begin = first // BLOCK_N * BLOCK_N
    stop = start + count
    each = tl.cdiv(tl.cdiv(stop - begin, BLOCK_N), splits) * BLOCK_N
    begin += split * each
    return first, begin, tl.minimum(stop, begin + each)


@triton.jit
def _score_keys(queries, key, is_visible, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Compute base-2 scores of ``queries [M, D]`` and ``key [D, N]``."""
    scores = tl.dot(queries, key, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = softcap * (2 * tl.sigmoid(2 / softcap * scores) - 1)
    return tl.where(is_visible, scores * _LOG2_E, float("-inf"))


@triton.jit
def _add_values(attended, greatest, weight, scores, value):
    """One step of the running softmax: add ``value [N, D]`` by ``scores [M, N]``."""
    above = tl.maximum(greatest, tl.max(scores, 1))
    weights = tl.exp2(scores - above[:, None])
    shrink = tl.exp2(greatest - above)
    attended = tl.dot(
        weights.to(value.dtype), value, attended * shrink[:, None], input_precision="ieee"
    )
    return attended, above, weight * shrink + tl.sum(weights, 1)


@triton.jit
def _widen_keys(key, scales, places, is_seen, scale, queries):
    """Return keys ``[D, N]`` in the type of ``queries``, and the factor of their scores."""
    if scales is not None:
        factors = tl.load(scales + places, mask=is_seen, other=0.0).to(tl.float32)
        key, scale = key.to(tl.float32).to(queries.dtype), scale * factors[None, :]
    return key, scale


@triton.jit
def _widen_values(value, scales, places, is_seen, queries):
    """Convert values ``[N, D]`` to the type of ``queries``."""
    if scales is not None:
        factors = tl.load(scales + places, mask=is_seen, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * factors[:, None]).to(queries.dtype)
    return value


@triton.jit
def _store_sums(sums, part, num_lines, lines, greatest, weight, is_row):
    """Store a part's maximum scores and sums of weights."""
    tl.store(sums + part * 2 * num_lines + lines, greatest, mask=is_row)
    tl.store(sums + (part * 2 + 1) * num_lines + lines, weight, mask=is_row)


@triton.jit(do_not_specialize=["window", "num_lines"])
def attend_pages(
    heads,
    keys,
    values,
    sinks,
    tiles,
    output,
    sums,
    partial,
    key_scales,
    value_scales,
    scale,
    softcap,
    window,
    num_lines,
    row_stride,
    page_stride,
    position_stride,
    head_stride,
    scale_page_stride,
    scale_position_stride,
    scale_head_stride,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend with one tile; the grid is ``(kv_heads, tiles, splits)``.

    ``tiles`` (int32) holds ``(row, count, position, table)`` per tile: its first row in the batch,
    its number of rows, the position of the first, and the offset of its block table in ``tiles``.
    ``heads`` are ``[T, ≥ kv_heads * GROUPS, HEAD_DIM]``, ``keys`` and ``values`` ``[blocks, PAGE,
    kv_heads, HEAD_DIM]``, ``sinks`` ``[kv_heads * GROUPS]``, ``output`` ``[T, kv_heads * GROUPS *
    HEAD_DIM]``. A tile has at most ``num_lines`` pairs of row and query head. With ``IS_SPLIT`` the
    results are ``sums [tiles, kv_heads, splits, 2, num_lines]`` (maximum score, sum of weights) and
    ``partial [tiles, kv_heads, splits, num_lines, HEAD_DIM]``. If ``keys`` and ``values`` are int8,
    their scales are ``[blocks, PAGE, kv_heads]``.
    """
    kv_head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads, splits = tl.num_programs(0), tl.num_programs(2)
    row = tl.load(tiles + tile * 4)
    count = tl.load(tiles + tile * 4 + 1)
    start = tl.load(tiles + tile * 4 + 2)
    table = tiles + tl.load(tiles + tile * 4 + 3)
    first, begin, stop = _locate_positions(start, count, window, split, splits, IS_CHUNKED, BLOCK_N)
    lines, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = lines // GROUPS
    query_head = kv_head * GROUPS + lines % GROUPS
    is_row = token < count
    is_dim = dims < HEAD_DIM
    part = (tile * kv_heads + kv_head) * splits + split
    if begin >= stop:
        if IS_SPLIT:
            _store_sums(sums, part, num_lines, lines, _LOWEST, 0.0, is_row)
        return

    places = (row + token)[:, None] * row_stride + query_head[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(heads + places, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    position = start + token
    greatest = tl.full([BLOCK_M], _LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        # A sink must count once, so the first part adds it.
        is_first = is_row & (split == 0)
        greatest = tl.load(sinks + query_head, mask=is_first, other=_LOWEST)
        greatest = tl.maximum(greatest, _LOWEST) * _LOG2_E
        weight = tl.where(is_first, 1.0, weight)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(begin, stop, BLOCK_N):
        seen = block + tl.arange(0, BLOCK_N)
        is_seen = (seen >= first) & (seen < stop)
        pages = tl.load(table + seen // PAGE, mask=is_seen, other=0).to(tl.int64)
        slots = pages * page_stride + seen % PAGE * position_stride + kv_head * head_stride
        is_visible = (seen[None, :] <= position[:, None]) & is_seen[None, :]
        is_visible &= seen[None, :] >= _first_visible(position, window, IS_CHUNKED)[:, None]
        mask = is_seen[None, :] & is_dim[:, None]
        key = tl.load(keys + slots[None, :] + dims[:, None], mask=mask, other=0.0)
        at = pages * scale_page_stride + seen % PAGE * scale_position_stride
        at += kv_head * scale_head_stride
        key, key_scale = _widen_keys(key, key_scales, at, is_seen, scale, queries)
        scores = _score_keys(queries, key, is_visible, key_scale, softcap, HAS_SOFTCAP)
        # A masked position may hold NaN, which would survive a weight of zero.
        mask = is_seen[:, None] & is_dim[None, :]
        value = tl.load(values + slots[:, None] + dims[None, :], mask=mask, other=0.0)
        value = _widen_values(value, value_scales, at, is_seen, queries)
        attended, greatest, weight = _add_values(attended, greatest, weight, scores, value)

    if IS_SPLIT:
        _store_sums(sums, part, num_lines, lines, greatest, weight, is_row)
        places = (part * num_lines + lines)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(partial + places, attended, mask=is_row[:, None] & is_dim[None, :])
    else:
        # With a window, a line beyond the tile's rows may see nothing.
        weight = tl.where(is_row, weight, 1.0)
        head = (row + token) * kv_heads * GROUPS + query_head
        places = head[:, None] * HEAD_DIM + dims[None, :]
        result = (attended / weight[:, None]).to(output.dtype.element_ty)
        tl.store(output + places, result, mask=is_row[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["splits"])
def reduce_splits(
    sums,
    partial,
    tiles,
    output,
    splits,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Combine the parts of one row and head; the grid is ``(kv_heads, tiles, num_lines)``.

    Arguments are those of :func:`attend_pages`.
    """
    kv_head, tile, line = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads, num_lines = tl.num_programs(0), tl.num_programs(2)
    row = tl.load(tiles + tile * 4)
    count = tl.load(tiles + tile * 4 + 1)
    token = line // GROUPS
    if token >= count:
        return
    first_part = (tile * kv_heads + kv_head) * splits
    every = tl.arange(0, MAX_SPLITS)
    scores = tl.load(
        sums + (first_part + every) * 2 * num_lines + line, mask=every < splits, other=_LOWEST
    )
    above = tl.max(scores, 0)
    dims = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    attended = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, splits, BLOCK_S):
        numbers = first + tl.arange(0, BLOCK_S)
        part, is_part = first_part + numbers, numbers < splits
        greatest = tl.load(sums + part * 2 * num_lines + line, mask=is_part, other=_LOWEST)
        weight = tl.load(sums + (part * 2 + 1) * num_lines + line, mask=is_part, other=0.0)
        factor = tl.exp2(greatest - above)
        total += tl.sum(weight * factor, 0)
        # An empty part was not written.
        mask = (is_part & (weight > 0))[:, None] & (dims < HEAD_DIM)[None, :]
        lines = (part * num_lines + line)[:, None] * HEAD_DIM
        values = tl.load(partial + lines + dims[None, :], mask=mask, other=0.0)
        attended += tl.sum(values * factor[:, None], 0)
    result = attended / total
    query_head = kv_head * GROUPS + line % GROUPS
    places = ((row + token) * kv_heads * GROUPS + query_head) * HEAD_DIM + dims
    tl.store(output + places, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
