"""Weights of GPTQ, AWQ, FP8 and compressed-tensors: :mod:`molink.checkpoint.low_bit`.

They are unpacked, or put into the blocks by which a CPU multiplies.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, unflatten

from molink.checkpoint.low_bit import LowBit
from molink.gguf.formats import BlockFormat
from molink.stage.kernels.repack import Blocks
from molink.stage.kernels.repack import part_rows as packed_rows
from molink.stage.linear.unpacked import part_rows

_WORD_BITS = 32
#: At which of its eight places a word of AWQ holds each of its numbers.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_low_bit(
    scheme: LowBit, name: str, scales: str, shape: tuple[int, int], read: Callable[[str], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Rows of the weight ``name`` in float32 ``[…, in]``, some at a time; each with its first row.

    ``scales`` is the tensor that has its scales, ``shape`` the weight's ``[out, in]``; ``read``
    gives a tensor as it is stored.
    """
    rows, width = shape
    by_row = scheme.layout in ("packed", "plain")
    numbers, scale = read(scheme.numbers(name)), read(scales)
    zeros = read(scheme.zero_points(name)) if scheme.zeros else None
    of_column = _groups(scheme, name, width, read)
    step = part_rows(width)  # whole words, whatever their bits
    for first in range(0, rows, step):
        last = min(first + step, rows)
        part = _numbers(scheme, numbers, first, last)[:, :width].float()
        if of_column is None:  # [n, groups, columns of a group]
            part = part.view(last - first, scheme.groups(width), -1)
        if zeros is not None:
            part -= _of_columns(_zeros(scheme, zeros, first, last), of_column)
        elif scheme.layout != "plain":
            part -= _middle(scheme)
        found = _scales(scheme, scale, first, last) if by_row else scale[:, first:last].T
        part *= _of_columns(found.float(), of_column)
        yield first, part.view(last - first, width)


def low_bit_blocks(
    scheme: LowBit,
    form: BlockFormat,
    name: str,
    scales: str,
    shape: tuple[int, int],
    read: Callable[[str], Tensor],
    order: Tensor | None = None,
) -> Iterator[Blocks]:
    """The same weight in blocks of ``form``, which it has to fit; each value stays what it is.

    Its columns are in that ``order``, if there is one.
    """
    rows, width = shape
    by_row = scheme.layout in ("packed", "plain")
    numbers, scale = read(scheme.numbers(name)), read(scales)
    zeros = read(scheme.zero_points(name)) if scheme.zeros else None
    repeated = width // scheme.groups(width) // form.group
    step = packed_rows(width)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        codes = _numbers(scheme, numbers, first, last)[:, :width]
        if scheme.bits == 8 and scheme.layout != "plain":
            codes = codes - _middle(scheme)  # those of blocks are signed
        codes = codes.to(torch.int8)
        if order is not None:
            codes = codes[:, order]
        found = _scales(scheme, scale, first, last) if by_row else scale[:, first:last].T
        halves = [found]
        if zeros is not None:
            halves.append((_middle(scheme) - _zeros(scheme, zeros, first, last)).to(found.dtype))
        yield Blocks(
            unflatten(codes.view(torch.uint8), 1, (-1, form.group)),
            tuple(each.repeat_interleave(repeated, 1) for each in halves),
        )


def column_order(
    scheme: LowBit, name: str, width: int, read: Callable[[str], Tensor]
) -> tuple[int, ...]:
    """The columns of the weight ``name`` as their groups follow each other; empty: they do."""
    if not scheme.ordered or scheme.groups(width) == 1:
        return ()
    return tuple(read(scheme.order(name)).argsort(stable=True).tolist())


def _middle(scheme: LowBit) -> int:
    """The zero point of weights that have none of their own."""
    return 1 << scheme.bits - 1


def _groups(scheme: LowBit, name: str, width: int, read: Callable[[str], Tensor]) -> Tensor | None:
    """The group of each column; ``None`` where they are alike and follow each other."""
    columns = scheme.block[1] or width
    if scheme.ordered and scheme.groups(width) > 1:
        return read(scheme.order(name)).long()
    return torch.arange(width) // columns if width % columns else None


def _of_columns(values: Tensor, groups: Tensor | None) -> Tensor:
    """Values ``[n, groups]`` as those of the columns."""
    return values[:, :, None] if groups is None else values[:, groups]


def _numbers(scheme: LowBit, stored: Tensor, first: int, last: int) -> Tensor:
    """Rows ``first … last - 1`` of the numbers, ``[n, in]`` (or some more columns)."""
    if scheme.layout == "plain":
        return stored[first:last]
    if scheme.layout == "packed":
        return _spread(stored[first:last], _shifts(scheme), 1)
    if scheme.layout == "awq":
        return _rows_of_words(scheme, stored.T, first, last)
    return _spread(stored[:, first:last].T.contiguous(), _shifts(scheme), 1)


def _zeros(scheme: LowBit, stored: Tensor, first: int, last: int) -> Tensor:
    """Their zero points ``[n, groups]``."""
    words = stored if scheme.layout == "packed" else stored.T
    zeros = _rows_of_words(scheme, words, first, last)
    # One less than meant, in so many bits: 0 is stored as the largest.
    return zeros.add(1).bitwise_and_(_mask(scheme)) if scheme.layout == "gptq" else zeros


def _rows_of_words(scheme: LowBit, words: Tensor, first: int, last: int) -> Tensor:
    """Numbers ``[n, …]`` of words ``[out / numbers, …]``; ``first`` begins a word."""
    each = _WORD_BITS // scheme.bits
    taken = words[first // each : -(-last // each)].contiguous()
    return _spread(taken, _shifts(scheme), 0)[: last - first]


def _spread(words: Tensor, shifts: Tensor, dim: int) -> Tensor:
    """The numbers of all words, beside each other in dimension ``dim``."""
    places = shifts if dim else shifts[:, None]
    mask = (1 << _WORD_BITS // len(shifts)) - 1
    return (words.unsqueeze(dim + 1) >> places).bitwise_and_(mask).flatten(dim, dim + 1)


def _shifts(scheme: LowBit) -> Tensor:
    count = _WORD_BITS // scheme.bits
    places = _AWQ_PLACES if scheme.layout == "awq" else range(count)
    return torch.tensor(tuple(places), dtype=torch.int32) * scheme.bits


def _mask(scheme: LowBit) -> int:
    return (1 << scheme.bits) - 1


def _scales(scheme: LowBit, stored: Tensor, first: int, last: int) -> Tensor:
    """Scales ``[n, groups]`` of rows, of which some may share them."""
    if scheme.block == (0, 0):
        return stored.view(1, 1).expand(last - first, 1)
    of_row = torch.arange(first, last) // (scheme.block[0] or last)
    return stored[of_row]
