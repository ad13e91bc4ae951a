"""Reads weights in low-bit formats: GPTQ, AWQ, FP8, compressed-tensors, bitsandbytes, MXFP4.

They are dequantized, or repacked for kernels; see :mod:`molink.checkpoint.low_bit` and
:mod:`molink.checkpoint.stacked_experts`.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, unflatten

from molink.checkpoint.low_bit import LowBitScheme
from molink.checkpoint.prequantized import (
    NESTED_BLOCK,
    QUANT_STATE_SUFFIX,
    companion_names,
    parse_quant_state,
)
from molink.checkpoint.stacked_experts import StackedExpert
from molink.errors import BrokenModel, UnsupportedModel
from molink.gguf.block_formats import E2M1_VALUES, MXFP4_BLOCK, BlockFormat
from molink.stage.cpu_kernels.repack import BlockCodes
from molink.stage.cpu_kernels.repack import rows_per_repack as packed_rows
from molink.stage.linear.nf4 import NF4_VALUES
from molink.stage.linear.quantized import QuantizedWeight
from molink.stage.linear.unpacked import rows_per_unpack

_WORD_BITS = 32
#: Order of the numbers in an AWQ word.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_low_bit(
    scheme: LowBitScheme,
    name: str,
    scales: str,
    shape: tuple[int, int],
    read: Callable[[str], Tensor],
) -> Iterator[tuple[int, Tensor]]:
    """Dequantize the weight ``name`` in slices; yield each one's first row and float32 ``[…, in]``.

    ``scales`` names its scales, ``shape`` is ``[out, in]``; ``read`` returns stored tensors.
    """
    if scheme.layout in ("mxfp4", "nvfp4"):
        yield from _unpack_float4(scheme, name, scales, shape, read)
        return
    rows, width = shape
    by_row = scheme.layout in ("packed", "plain")
    numbers, scale = read(scheme.numbers_name(name)), read(scales)
    zeros = read(scheme.zero_points_name(name)) if scheme.has_zero_points else None
    of_column = _read_groups(scheme, name, width, read)
    step = rows_per_unpack(width)  # whole words at any bit width
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
    """Read the weight in blocks of ``form``, without loss.

    ``order`` permutes its columns.
    """
    if scheme.layout in ("mxfp4", "nvfp4"):
        yield from _read_float4_blocks(scheme, name, scales, shape, read)
        return
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
            codes = codes - _default_zero_point(scheme)  # 8-bit codes of blocks are signed
        codes = codes.view(torch.int8) if form.is_float else codes.to(torch.int8)
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


def _unpack_float4(
    scheme: LowBitScheme,
    name: str,
    scales: str,
    shape: tuple[int, int],
    read: Callable[[str], Tensor],
) -> Iterator[tuple[int, Tensor]]:
    """Unpack 4-bit floats as :func:`unpack_low_bit`."""
    numbers, scale = read(scheme.numbers_name(name)), read(scales)
    divisor = read(scheme.global_scale_name(name)) if scheme.layout == "nvfp4" else 1
    step = rows_per_unpack(shape[1])
    for first in range(0, shape[0], step):
        found, factors = numbers[first : first + step], scale[first : first + step]
        if scheme.layout == "mxfp4":
            yield first, unpack_mxfp4(unflatten(found, 1, (-1, MXFP4_BLOCK // 2)), factors)
            continue
        values = _unpack_pairs(unflatten(found, 1, (factors.shape[1], -1)))
        yield first, (values * (factors.float() / divisor).unsqueeze(2)).flatten(1)


def _read_float4_blocks(
    scheme: LowBitScheme,
    name: str,
    scales: str,
    shape: tuple[int, int],
    read: Callable[[str], Tensor],
) -> Iterator[BlockCodes]:
    """Read blocks as :func:`read_low_bit_blocks`: one per row, with the tensor's scale."""
    numbers, steps = read(scheme.numbers_name(name)), read(scales).view(torch.uint8)
    whole = torch.ones(1)
    if scheme.layout == "nvfp4":
        whole /= read(scheme.global_scale_name(name))
    yield from _cut_float4_blocks(numbers, steps, whole)


def _cut_float4_blocks(numbers: Tensor, steps: Tensor, whole: Tensor) -> Iterator[BlockCodes]:
    """Make blocks of ``numbers [out, in / 2]``, ``steps [out, groups]`` and a common scale."""
    step = packed_rows(2 * numbers.shape[1])
    for first in range(0, len(numbers), step):
        found = numbers[first : first + step]
        codes = torch.stack((found & 15, found >> 4), 2).flatten(1).unsqueeze(1)
        halves = (whole.expand(len(found), 1),)
        yield BlockCodes(codes, halves, (steps[first : first + step].unsqueeze(1),))


def read_column_order(
    scheme: LowBitScheme, name: str, width: int, read: Callable[[str], Tensor]
) -> tuple[int, ...]:
    """Return the columns ordered by group; empty if they already are."""
    if not scheme.has_column_order or scheme.count_groups(width) == 1:
        return ()
    return tuple(read(scheme.order_name(name)).argsort(stable=True).tolist())


def _default_zero_point(scheme: LowBitScheme) -> int:
    """Return the implied zero point of weights that store none."""
    return 1 << scheme.bits - 1


def _read_groups(
    scheme: LowBitScheme, name: str, width: int, read: Callable[[str], Tensor]
) -> Tensor | None:
    """Return each column's group; ``None`` if groups are equally large and consecutive."""
    columns = scheme.scale_block[1] or width
    if scheme.has_column_order and scheme.count_groups(width) > 1:
        return read(scheme.order_name(name)).long()
    return torch.arange(width) // columns if width % columns else None


def _expand_groups(values: Tensor, groups: Tensor | None) -> Tensor:
    """Expand values ``[n, groups]`` to columns."""
    return values[:, :, None] if groups is None else values[:, groups]


def _unpack_numbers(scheme: LowBitScheme, stored: Tensor, first: int, last: int) -> Tensor:
    """Unpack numbers of rows ``first … last - 1``, ``[n, in]`` or wider."""
    if scheme.layout == "plain":
        return stored[first:last]
    if scheme.layout == "packed":
        return _shift_words(stored[first:last], _word_shifts(scheme), 1)
    if scheme.layout == "awq":
        return _unpack_words(scheme, stored.T, first, last)
    return _shift_words(stored[:, first:last].T.contiguous(), _word_shifts(scheme), 1)


def _unpack_zero_points(scheme: LowBitScheme, stored: Tensor, first: int, last: int) -> Tensor:
    """Unpack zero points ``[n, groups]``."""
    words = stored if scheme.layout == "packed" else stored.T
    zeros = _unpack_words(scheme, words, first, last)
    # GPTQ stores zero points minus one, modulo the range of numbers.
    return zeros.add(1).bitwise_and_(_number_mask(scheme)) if scheme.layout == "gptq" else zeros


def _unpack_words(scheme: LowBitScheme, words: Tensor, first: int, last: int) -> Tensor:
    """Unpack words ``[out / numbers, …]`` to numbers ``[n, …]``; ``first`` begins a word."""
    each = _WORD_BITS // scheme.bits
    taken = words[first // each : -(-last // each)].contiguous()
    return _shift_words(taken, _word_shifts(scheme), 0)[: last - first]


def _shift_words(words: Tensor, shifts: Tensor, dim: int) -> Tensor:
    """Extract the numbers of all words along dimension ``dim``."""
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
    """Expand scales to ``[n, groups]``; rows may share them."""
    if scheme.scale_block == (0, 0):
        return stored.view(1, 1).expand(last - first, 1)
    of_row = torch.arange(first, last) // (scheme.scale_block[0] or last)
    return stored[of_row]


#: Reads a stored tensor of the checkpoint.
ReadStored = Callable[[str], Tensor]


def fill_quantized(
    weight: QuantizedWeight, first: int, name: str, shape: tuple[int, int], read: ReadStored
) -> None:
    """Copy the bitsandbytes weight ``name`` to row ``first`` of ``weight``.

    ``shape`` is ``[out, in]``.

    Raises:
        BrokenModel: invalid scales or state.
        UnsupportedModel: a variant is not implemented.
    """
    data, scales = weight.row_slices(first, first + shape[0])
    data.copy_(read(name).view(data.shape))
    stored = (
        read(companion_names(name)[0]) if weight.mode == "int8" else _read_scales(name, shape, read)
    )
    scales.copy_(stored)
    if not bool(torch.isfinite(scales).all()):
        raise BrokenModel(f"tensor {name}: a scale is NaN or infinite; fetch it again")


def check_layout(name: str, layout: Tensor) -> None:
    """Check an int8 weight's ``weight_format``: 0 is row-major, others are for old GPUs."""
    if int(layout) != 0:
        raise UnsupportedModel(f"tensor {name}: weight_format {int(layout)} is not supported")


def _read_scales(name: str, shape: tuple[int, int], read: ReadStored) -> Tensor:
    """Read float32 scales of an nf4 weight's blocks."""
    offset = parse_quant_state(
        read(f"{name}.{QUANT_STATE_SUFFIX}").numpy().tobytes(), shape, f"tensor {name}"
    )
    if not torch.allclose(read(f"{name}.quant_map"), torch.tensor(NF4_VALUES), rtol=0, atol=1e-4):
        raise UnsupportedModel(f"tensor {name}: its quant_map isn't that of nf4")
    scales = read(f"{name}.absmax")
    if scales.dtype is torch.float32:
        return scales
    values = read(f"{name}.nested_quant_map")[scales.int()]
    coarse = read(f"{name}.nested_absmax").repeat_interleave(NESTED_BLOCK)[: len(scales)]
    return values * coarse + offset


_SCALE_BIAS = 127


def read_expert_rows(
    stack: StackedExpert, mapped: Callable[[str], Tensor], step: int
) -> Iterator[tuple[int, Tensor]]:
    """Read an expert's tensor in slices of about ``step`` rows; yield each with its first row."""
    parts = [mapped(name)[stack.index] for name in stack.names]
    if stack.is_mxfp4:
        width = parts[1].shape[1] * MXFP4_BLOCK
        step = min(step, rows_per_unpack(width))
        for begin in range(0, len(parts[0]), step):
            yield begin, unpack_mxfp4(*(part[begin : begin + step] for part in parts))
        return
    rows = parts[0].t() if parts[0].dim() == 2 and stack.is_transposed else parts[0]
    rows = rows.chunk(stack.parts)[stack.part]
    for begin in range(0, len(rows), step):
        yield begin, rows[begin : begin + step]


def read_expert_blocks(
    stack: StackedExpert, mapped: Callable[[str], Tensor]
) -> Iterator[BlockCodes]:
    """Read an expert's MXFP4 weight in blocks, without loss; a block is a row."""
    blocks, steps = (mapped(name)[stack.index] for name in stack.names)
    yield from _cut_float4_blocks(blocks.flatten(1), steps, torch.ones(1))


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize an MXFP4 weight to float32 ``[out, in]``.

    ``blocks`` is uint8 ``[out, in / 32, 16]``, ``scales`` uint8 ``[out, in / 32]``.

    A scale of 255 means NaN.
    """
    powers = torch.ldexp(torch.ones(scales.shape), scales.int() - _SCALE_BIAS)
    powers = powers.masked_fill(scales == 255, torch.nan)
    return _unpack_pairs(blocks).mul_(powers.unsqueeze(-1)).flatten(1)


def _unpack_pairs(blocks: Tensor) -> Tensor:
    """Unpack uint8 ``[out, groups, group / 2]`` to float32 ``[out, groups, group]``."""
    # One lookup per byte, for both values, takes a sixth of the time.
    both = _byte_pairs().index_select(0, blocks.reshape(-1).int()).view(blocks.shape)
    return both.view(torch.float32)


@cache
def _byte_pairs() -> Tensor:
    """Return both float32 values of each byte as one int64: ``[256]``."""
    values = torch.tensor(E2M1_VALUES)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
    return pairs.view(torch.int64).view(-1)
