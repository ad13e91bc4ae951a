"""Repacks quantized blocks into the kernels' order, and back.

GGUF blocks are defined by llama.cpp (``ggml-common.h``), the packed order in
:mod:`molink.stage.cpu_kernels.block_matmul`. Values stay exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

import torch
from torch import Tensor, unflatten

from molink.facts.dtypes import DTYPE_SIZES
from molink.gguf.block_formats import (
    BLOCK_FORMATS,
    NO_POWER,
    ROW_MULTIPLE,
    BitRange,
    BlockFormat,
    locate_pair,
)
from molink.gguf.ggml_types import PACKED_TYPES
from molink.stage.torch_dtypes import TORCH_DTYPES

_LOW_BITS, _LOW, _SIX = 4, 15, 63
#: Mantissa bits of float32.
MANTISSA_BITS = 23
_F16_BYTES = 2
#: Number of codes or bytes repacked at once.
_MAX_CODES = 2**20


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """Codes (uint8 ``[R, B, block]``) and numbers of rows ``[R, in]`` in ``B`` blocks each.

    ``halves`` has scales, then shifts or minima, if any, in the format's number type, ``[R, B]``
    each. With nested scales, ``whole`` has the bytes ``[R, B, groups]`` that multiply them.
    """

    codes: Tensor
    halves: tuple[Tensor, ...]
    whole: tuple[Tensor, ...] = ()


def read_blocks(name: str, rows: Tensor) -> Iterator[BlockCodes]:
    """Parse blocks of type ``name`` in slices of ``rows``; see :func:`parse_blocks`."""
    step = rows_per_repack(rows.shape[1])
    return (parse_blocks(name, rows[begin : begin + step]) for begin in range(0, len(rows), step))


def rows_per_repack(width: int) -> int:
    """Return the number of rows to repack at once: a multiple of all column counts."""
    return max(1, _MAX_CODES // width // ROW_MULTIPLE) * ROW_MULTIPLE


def parse_blocks(name: str, rows: Tensor) -> BlockCodes:
    """Parse blocks of type ``name`` from bytes ``[R, bytes of a row]``."""
    blocks = unflatten(rows, 1, (-1, PACKED_TYPES[name].nbytes))
    if name == "mxfp4":
        return _parse_mxfp4(blocks)
    form = BLOCK_FORMATS[name]
    if not form.has_nested_scales:
        return _parse_simple(form, blocks)
    if form.codebook:
        return _parse_iq4_xs(form, blocks)
    return _parse_k_quants(form, blocks) if form.has_minimum else _parse_q6_k(blocks)


def pack_blocks(form: BlockFormat, blocks: BlockCodes, columns: int) -> Tensor:
    """Pack blocks to bytes ``[R / columns, bytes]``; ``R`` is a multiple of ``columns``."""
    halves = [each[..., None, None] for each in blocks.halves]  # [R, B, 1, 1]
    whole = [each.unsqueeze(3) for each in blocks.whole]  # [R, B, groups, 1]
    words = _pack_words(form, blocks.codes)  # [R, B, groups, words]
    own = [
        _interleave_columns(each, columns)
        for each in (*(whole if form.has_nested_scales else halves), words)
    ]
    groups = torch.cat(own, 3).flatten(1)
    if not form.has_nested_scales:
        return groups
    above = torch.cat([_interleave_columns(each, columns) for each in halves], 2).flatten(1)
    return torch.cat((above, groups), 1)


def _interleave_columns(numbers: Tensor, columns: int) -> Tensor:
    """Interleave ``[R, B, groups, n]`` as bytes ``[R / columns, B, groups, n · columns ·
    itemsize]``.
    """
    lying = unflatten(numbers, 0, (-1, columns)).movedim(1, -1)
    return lying.flatten(-2).contiguous().view(torch.uint8)


def packed_scales(form: BlockFormat, packed: Tensor, columns: int) -> Tensor:
    """Return a view of packed blocks' scales and other numbers ``[R / columns, B, n, columns]``."""
    end = DTYPE_SIZES[form.number_dtype] * form.numbers_per_group * columns
    if form.has_nested_scales:
        above, _ = _split_packed(form, packed, columns)
    else:
        above = unflatten(packed, 1, (-1, columns * form.group_bytes))[..., :end]
    return unflatten(above.view(TORCH_DTYPES[form.number_dtype]), 2, (-1, columns))


def _packed_steps(form: BlockFormat, packed: Tensor, columns: int) -> Tensor:
    """Return a view of the bytes ``[R / columns, B, groups, n, columns]`` that multiply numbers."""
    _, groups = _split_packed(form, packed, columns)
    return unflatten(groups[..., : columns * form.number_bytes], 3, (-1, columns))


def has_finite_numbers(form: BlockFormat, packed: Tensor, columns: int) -> bool:
    """Whether all numbers of ``packed`` blocks ``[R / columns, bytes]`` are finite."""
    if form.step_kind == "e8m0" and bool(_packed_steps(form, packed, columns).eq(NO_POWER).any()):
        return False
    return bool(packed_scales(form, packed, columns).isfinite().all())


def bound_steps(form: BlockFormat, packed: Tensor, columns: int) -> None:
    """Bound the power-of-two scales of random ``packed`` blocks ``[R / columns, bytes]``.

    Sums then stay finite.
    """
    if form.step_kind == "e8m0":
        _packed_steps(form, packed, columns).remainder_(16).add_(112)


def _split_packed(form: BlockFormat, packed: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Split packed bytes into block numbers ``[P, B, bytes]``, groups ``[P, B, groups, bytes]``."""
    blocks = packed.shape[1] // (columns * form.nbytes)
    above = unflatten(packed[:, : blocks * columns * form.block_number_bytes], 1, (blocks, -1))
    below = packed[:, blocks * columns * form.block_number_bytes :]
    return above, unflatten(below, 1, (blocks, form.groups_per_block, -1))


def unpack_rows(form: BlockFormat, packed: Tensor, columns: int, rows: Tensor) -> Tensor:
    """Dequantize ``rows`` (int64 ``[T]``) of packed blocks to float32 ``[T, in]``."""
    part, lane = rows // columns, rows % columns
    halves = packed_scales(form, packed, columns)[part, :, :, lane].float()
    numbers = [each.unsqueeze(2) for each in halves.unbind(2)]  # [T, B, 1]
    _, groups = _split_packed(form, packed, columns)
    begin = columns * form.number_bytes
    if form.has_nested_scales:
        found = _packed_steps(form, packed, columns)[part, ..., lane]
        steps = [_decode_steps(form, each) for each in found.unbind(3)]
        numbers = [one * each for one, each in zip(numbers, steps, strict=True)]
    words = unflatten(groups[..., begin:], 3, (-1, columns, form.word_bytes))
    codes = _unpack_codes(form, words[part, :, :, :, lane])
    if form.codebook:
        codes = torch.tensor(form.codebook)[codes.long()]
    else:
        codes -= form.offset
    if form.has_shifts:
        codes += numbers[1].unsqueeze(3)
    weights = numbers[0].unsqueeze(3) * codes
    return (weights + numbers[1].unsqueeze(3) if form.has_minimum else weights).flatten(1)


def _decode_steps(form: BlockFormat, steps: Tensor) -> Tensor:
    """Decode the bytes that multiply a block's numbers."""
    if form.step_kind == "e8m0":
        # The byte becomes a float32's exponent, whose smallest value means 0.
        return (steps.int() << MANTISSA_BITS).view(torch.float32)
    return steps if form.has_minimum else steps.view(torch.int8)


# --- codes ------------------------------------------------------------------------------------


def _pack_words(form: BlockFormat, codes: Tensor) -> Tensor:
    """Pack codes into words ``[R, B, groups, words]``."""
    if form.bits == 8:
        return unflatten(codes.contiguous().view(torch.int16), 2, (form.groups_per_block, -1))
    if form.bits == _LOW_BITS:
        return _pack_four_bit_words(form, codes)
    pairs = unflatten(codes, 2, (form.groups_per_block, form.group // 2, 2))
    words: list[Tensor | None] = [None] * form.words_per_group
    for index in range(form.group // 2):
        for piece in locate_pair(form.bits, index):
            part = (pairs[..., index, :] >> piece.target_bit) & ((1 << piece.bits) - 1)
            part = part.to(torch.int16) << piece.source_bit
            before = words[piece.word]
            words[piece.word] = part if before is None else before.bitwise_or_(part)
    halves = torch.stack([word for word in words if word is not None], 3)
    return halves.view(torch.int32).squeeze(4)


def _pack_four_bit_words(form: BlockFormat, codes: Tensor) -> Tensor:
    """Pack 4-bit codes, eight at once."""
    eight = codes.contiguous().view(torch.int64)
    # Bytes 0, 1, 4 and 5 have codes 0 and 2, 1 and 3, 4 and 6, 5 and 7.
    both = (eight | eight >> 3 * _LOW_BITS).view(torch.uint8)
    lower, upper = unflatten(both, 2, (-1, 2, 4))[..., :2].unbind(3)
    words = torch.stack((lower, upper), 4).flatten(3).view(torch.int32).squeeze(3)
    return unflatten(words, 2, (form.groups_per_block, -1))


def _unpack_codes(form: BlockFormat, words: Tensor) -> Tensor:
    """Unpack words ``[T, B, groups, words, bytes]`` to float32 codes ``[T, B, groups, group]``."""
    if form.bits == 8:
        return words.contiguous().view(torch.int8).flatten(3).float()
    halves = words.contiguous().view(torch.int16)
    found = torch.zeros(*halves.shape[:3], form.group // 2, 2, dtype=torch.int16)
    for word, source, mask, target in _locate_codes(form):
        found |= ((halves[..., word, :] >> source) & mask) << target
    return found.flatten(3).float()


@cache
def _locate_codes(form: BlockFormat) -> tuple[tuple[Tensor, ...], ...]:
    """Locate the parts of all pairs of codes: words ``[pairs]`` and bits ``[pairs, 1]``.

    Bits are shifts from the source, masks, and shifts to the target.
    """
    located = [locate_pair(form.bits, index) for index in range(form.group // 2)]
    parts = []
    for pieces in zip_longest(*located, fillvalue=BitRange(0, 0, 0, 0)):
        words = torch.tensor([piece.word for piece in pieces])
        shifts = [(each.source_bit, (1 << each.bits) - 1, each.target_bit) for each in pieces]
        bits = torch.tensor(shifts, dtype=torch.int16).unsqueeze(2)
        parts.append((words, *bits.unbind(1)))
    return tuple(parts)


# --- formats ----------------------------------------------------------------------------------


def _read_halves(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks.contiguous().view(torch.float16).unbind(2)


def _parse_simple(form: BlockFormat, blocks: Tensor) -> BlockCodes:
    """Parse scale, minimum, fifth bits, and 32 codes; lower halves of bytes come first."""
    begin = _F16_BYTES * (1 + form.has_minimum)
    halves = _read_halves(blocks[..., :begin])
    if form.bits == 8:
        return BlockCodes(blocks[..., begin:], halves)
    bytes_ = blocks[..., -form.block // 2 :]
    codes = torch.cat((bytes_ & _LOW, bytes_ >> _LOW_BITS), 2)
    if form.bits > _LOW_BITS:
        fifth = blocks[..., begin : begin + form.block // 8].unsqueeze(3)
        bits = (fifth >> torch.arange(8, dtype=torch.uint8)) & 1
        codes |= bits.flatten(2) << _LOW_BITS
    return BlockCodes(codes, halves)


def _parse_k_quants(form: BlockFormat, blocks: Tensor) -> BlockCodes:
    """Parse ``q4_k`` and ``q5_k``; the subtracted minimum becomes an added one."""
    scale, less = _read_halves(blocks[..., : 2 * _F16_BYTES])
    six, last = blocks[..., 4:12], blocks[..., 12:16]
    upper = (six >> 6) << _LOW_BITS
    scales = torch.cat((six[..., :4] & _SIX, (last & _LOW) | upper[..., :4]), 2)
    added = torch.cat((six[..., 4:] & _SIX, (last >> _LOW_BITS) | upper[..., 4:]), 2)
    bytes_ = unflatten(blocks[..., -form.block // 2 :], 2, (-1, form.group))
    codes = torch.stack((bytes_ & _LOW, bytes_ >> _LOW_BITS), 3).flatten(2)
    if form.bits > _LOW_BITS:
        fifth = blocks[..., 16 : 16 + form.group].unsqueeze(2)
        bits = (fifth >> torch.arange(8, dtype=torch.uint8).unsqueeze(1)) & 1
        codes |= bits.flatten(2) << _LOW_BITS
    return BlockCodes(codes, (scale, -less), (scales, added))


def _parse_q6_k(blocks: Tensor) -> BlockCodes:
    """Parse ``q6_k``: two halves of 128 codes; a byte has bits of weights 64 and 32 apart."""
    low = unflatten(blocks[..., :128], 2, (2, 64))
    high = unflatten(blocks[..., 128:192], 2, (2, 1, 32))
    codes = torch.cat((low & _LOW, low >> _LOW_BITS), 3).flatten(2)
    pairs = (high >> torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(1)) & 3
    codes |= pairs.flatten(2) << _LOW_BITS
    return BlockCodes(codes, _read_halves(blocks[..., 208:]), (blocks[..., 192:208],))


def _parse_mxfp4(blocks: Tensor) -> BlockCodes:
    """Parse ``mxfp4``: a biased exponent and 32 codes; a row is a block."""
    bytes_ = blocks[..., 1:]
    codes = torch.cat((bytes_ & _LOW, bytes_ >> _LOW_BITS), 2).flatten(1).unsqueeze(1)
    return BlockCodes(codes, (torch.ones(len(codes), 1),), (blocks[..., 0].unsqueeze(1),))


def _parse_iq4_xs(form: BlockFormat, blocks: Tensor) -> BlockCodes:
    """Parse ``iq4_xs``: scale, two upper and four lower bits of 8 integers, and 256 codes."""
    (scale,) = _read_halves(blocks[..., :_F16_BYTES])
    places = torch.arange(0, 8, 2, dtype=torch.uint8)
    upper = (blocks[..., 2:4].unsqueeze(3) >> places).flatten(2) & 3
    lower = torch.stack((blocks[..., 4:8] & _LOW, blocks[..., 4:8] >> _LOW_BITS), 3).flatten(2)
    steps = (lower | upper << _LOW_BITS).view(torch.int8) - 32
    bytes_ = unflatten(blocks[..., 8:], 2, (-1, form.group // 2))
    codes = torch.cat((bytes_ & _LOW, bytes_ >> _LOW_BITS), 3).flatten(2)
    return BlockCodes(codes, (scale,), (steps.view(torch.uint8),))
