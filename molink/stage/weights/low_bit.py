"""Weights of GPTQ, AWQ, FP8 and compressed-tensors: :mod:`molink.checkpoint.low_bit`.

They are unpacked, or put into the blocks by which a CPU multiplies.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, unflatten

from molink.checkpoint.low_bit import LowBitScheme
from molink.gguf.block_formats import BlockFormat
from molink.stage.kernels.repack import BlockCodes
from molink.stage.kernels.repack import rows_per_repack as packed_rows
from molink.stage.linear.unpacked import rows_per_unpack

_WORD_BITS = 32
#: At which of its eight places a word of AWQ holds each of its numbers.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_low_bit(
    scheme: LowBitScheme,
    name: str,
    scales: str,
    shape: tuple[int, int],
    read: Callable[[str], Tensor],
) -> Iterator[tuple[int, Tensor]]:
    """Rows of the weight ``name`` in float32 ``[…, in]``, some at a time; each with its first row.

    ``scales`` is the tensor that has its scales, ``shape`` the weight's ``[out, in]``; ``read``
    gives a tensor as it is stored.
    """
    rows, width = shape
    by_row = scheme.layout in ("packed", "plain")
    numbers, scale = read(scheme.numbers_name(name)), read(scales)
    zeros = read(scheme.zero_points_name(name)) if scheme.has_zero_points else None
    of_column = _read_groups(scheme, name, width, read)
    step = rows_per_unpack(width)  # whole words, whatever their bits
    for first in range(0, rows, step):
        last = min(first + step, rows)
        part = _unpack_numbers(scheme, numbers, first, last)[:, :width].float()
        if of_column is None:  # [n, groups, columns of a group]
            part = part.view(last - first, scheme.count_groups(width), -1)
        if zeros is not None:
            part -= _expand_groups(_unpack_zero_points(scheme, zeros, first, last), of_column)
        elif scheme.layout != "plain":
            part -= _default_zero_point(scheme)
        found = _expand_scales(scheme, scale, first, last) if by_row else scale[:, first:last].T
        part *= _expand_groups(found.float(), of_column)
        yield first, part.view(last - first, width)


def read_low_bit_blocks(
    scheme: LowBitScheme,
    form: BlockFormat,
    name: str,
    scales: str,
    shape: tuple[int, int],
    read: Callable[[str], Tensor],
    order: Tensor | None = None,
) -> Iterator[BlockCodes]:
    """The same weight in blocks of ``form``, which it has to fit; each value stays what it is.

    Its columns are in that ``order``, if there is one.
    """
    rows, width = shape
    by_row = scheme.layout in ("packed", "plain")
    numbers, scale = read(scheme.numbers_name(name)), read(scales)
    zeros = read(scheme.zero_points_name(name)) if scheme.has_zero_points else None
    repeated = width // scheme.count_groups(width) // form.group
    step = packed_rows(width)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        codes = _unpack_numbers(scheme, numbers, first, last)[:, :width]
        if scheme.bits == 8 and scheme.layout != "plain":
            codes = codes - _default_zero_point(scheme)  # those of blocks are signed
        codes = codes.to(torch.int8)
        if order is not None:
            codes = codes[:, order]
        found = _expand_scales(scheme, scale, first, last) if by_row else scale[:, first:last].T
        halves = [found]
        if zeros is not None:
            halves.append(
                (_default_zero_point(scheme) - _unpack_zero_points(scheme, zeros, first, last)).to(
                    found.dtype
                )
            )
        yield BlockCodes(
            unflatten(codes.view(torch.uint8), 1, (-1, form.group)),
            tuple(each.repeat_interleave(repeated, 1) for each in halves),
        )


def read_column_order(
    scheme: LowBitScheme, name: str, width: int, read: Callable[[str], Tensor]
) -> tuple[int, ...]:
    """The columns of the weight ``name`` as their groups follow each other; empty: they do."""
    if not scheme.has_column_order or scheme.count_groups(width) == 1:
        return ()
    return tuple(read(scheme.order_name(name)).argsort(stable=True).tolist())


def _default_zero_point(scheme: LowBitScheme) -> int:
    """The zero point of weights that have none of their own."""
    return 1 << scheme.bits - 1


def _read_groups(
    scheme: LowBitScheme, name: str, width: int, read: Callable[[str], Tensor]
) -> Tensor | None:
    """The group of each column; ``None`` where they are alike and follow each other."""
    columns = scheme.scale_block[1] or width
    if scheme.has_column_order and scheme.count_groups(width) > 1:
        return read(scheme.order_name(name)).long()
    return torch.arange(width) // columns if width % columns else None


def _expand_groups(values: Tensor, groups: Tensor | None) -> Tensor:
    """Values ``[n, groups]`` as those of the columns."""
    return values[:, :, None] if groups is None else values[:, groups]


def _unpack_numbers(scheme: LowBitScheme, stored: Tensor, first: int, last: int) -> Tensor:
    """Rows ``first … last - 1`` of the numbers, ``[n, in]`` (or some more columns)."""
    if scheme.layout == "plain":
        return stored[first:last]
    if scheme.layout == "packed":
        return _shift_words(stored[first:last], _word_shifts(scheme), 1)
    if scheme.layout == "awq":
        return _unpack_words(scheme, stored.T, first, last)
    return _shift_words(stored[:, first:last].T.contiguous(), _word_shifts(scheme), 1)


def _unpack_zero_points(scheme: LowBitScheme, stored: Tensor, first: int, last: int) -> Tensor:
    """Their zero points ``[n, groups]``."""
    words = stored if scheme.layout == "packed" else stored.T
    zeros = _unpack_words(scheme, words, first, last)
    # One less than meant, in so many bits: 0 is stored as the largest.
    return zeros.add(1).bitwise_and_(_number_mask(scheme)) if scheme.layout == "gptq" else zeros


def _unpack_words(scheme: LowBitScheme, words: Tensor, first: int, last: int) -> Tensor:
    """Numbers ``[n, …]`` of words ``[out / numbers, …]``; ``first`` begins a word."""
    each = _WORD_BITS // scheme.bits
    taken = words[first // each : -(-last // each)].contiguous()
    return _shift_words(taken, _word_shifts(scheme), 0)[: last - first]


def _shift_words(words: Tensor, shifts: Tensor, dim: int) -> Tensor:
    """The numbers of all words, beside each other in dimension ``dim``."""
    places = shifts if dim else shifts[:, None]
    mask = (1 << _WORD_BITS // len(shifts)) - 1
    return (words.unsqueeze(dim + 1) >> places).bitwise_and_(mask).flatten(dim, dim + 1)


def _word_shifts(scheme: LowBitScheme) -> Tensor:
    count = _WORD_BITS // scheme.bits
    places = _AWQ_ORDER if scheme.layout == "awq" else range(count)
    return torch.tensor(tuple(places), dtype=torch.int32) * scheme.bits


def _number_mask(scheme: LowBitScheme) -> int:
    return (1 << scheme.bits) - 1


def _expand_scales(scheme: LowBitScheme, stored: Tensor, first: int, last: int) -> Tensor:
    """Scales ``[n, groups]`` of rows, of which some may share them."""
    if scheme.scale_block == (0, 0):
        return stored.view(1, 1).expand(last - first, 1)
    of_row = torch.arange(first, last) // (scheme.scale_block[0] or last)
    return stored[of_row]
