"""The blocks of a GGUF file, put into the order in which a CPU multiplies by them, and back.

What the bytes of a block are is llama.cpp's format (``ggml-common.h``); what they become is told in
:mod:`molink.stage.kernels.block_matmul`. Each value stays what it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.gguf.blocks import PACKED
from molink.gguf.formats import FORMATS, BlockFormat, pieces

_LOW_BITS, _LOW, _SIX = 4, 15, 63
_F16 = 2


@dataclass(frozen=True, slots=True)
class Blocks:
    """Of rows ``[R, in]``, in ``B`` blocks each: their codes (uint8 ``[R, B, block]``) and numbers.

    ``halves`` are f16 ``[R, B]``: scales, and what is added if anything is. ``whole`` are bytes
    ``[R, B, groups]`` by which these are multiplied, of formats that have them.
    """

    codes: Tensor
    halves: tuple[Tensor, ...]
    whole: tuple[Tensor, ...] = ()


def parse(name: str, rows: Tensor) -> Blocks:
    """The blocks of kind ``name`` in ``rows``: bytes ``[R, bytes of a row]``."""
    form = FORMATS[name]
    blocks = rows.unflatten(1, (-1, PACKED[name].nbytes))
    if not form.nested:
        return _parse_simple(form, blocks)
    return _parse_added(form, blocks) if form.adds else _parse_sixteens(blocks)


def arrange(form: BlockFormat, blocks: Blocks, columns: int) -> Tensor:
    """Bytes ``[R / columns, B, columns · bytes of a block]``; ``R`` is a multiple of ``columns``."""
    halves = [each.unsqueeze(2).contiguous().view(torch.uint8) for each in blocks.halves]
    parts = [each.unsqueeze(2) for each in halves]
    parts += [each.unsqueeze(3) for each in blocks.whole]
    parts.append(_words(form, blocks.codes))
    # Each [R, B, n, bytes] becomes [R / columns, B, n, columns, bytes].
    turned = [
        part.unflatten(0, (-1, columns)).permute(0, 2, 3, 1, 4).flatten(2) for part in parts
    ]
    return torch.cat(turned, 2)


def take(form: BlockFormat, packed: Tensor, columns: int, rows: Tensor) -> Tensor:
    """The weights (float32 ``[T, in]``) of ``rows`` (int64 ``[T]``) that :func:`arrange` put away."""
    part, lane = rows // columns, rows % columns
    found, begin = [], 0
    for count, nbytes in _sections(form):
        end = begin + count * nbytes * columns
        section = packed[:, :, begin:end].unflatten(2, (count, columns, nbytes))
        found.append(section[part, :, :, lane])  # [T, B, count, nbytes]
        begin = end
    numbers = 1 + form.adds
    halves = [each.view(torch.float16).float().squeeze(3) for each in found[:numbers]]
    if form.nested:
        kind = torch.uint8 if form.adds else torch.int8
        whole = [each.squeeze(3).view(kind) for each in found[numbers : 2 * numbers]]
        halves = [half * each for half, each in zip(halves, whole, strict=True)]
    codes = _codes(form, found[-1])
    weights = halves[0].unsqueeze(3) * (codes - form.offset)
    return (weights + halves[1].unsqueeze(3) if form.adds else weights).flatten(1)


def _sections(form: BlockFormat) -> Iterator[tuple[int, int]]:
    """What lies one after the other: how many things a block has of it, of how many bytes each."""
    for _ in range(1 + form.adds):
        yield 1, _F16
    if form.nested:
        for _ in range(1 + form.adds):
            yield form.groups, 1
    yield form.groups * form.words, form.word


# --- codes ------------------------------------------------------------------------------------


def _words(form: BlockFormat, codes: Tensor) -> Tensor:
    """Bytes ``[R, B, words, bytes of a word]``."""
    if form.bits == 8:
        return codes.unflatten(2, (-1, 2))
    pairs = codes.unflatten(2, (form.groups, form.group // 2, 2))
    words: list[Tensor | None] = [None] * form.words
    for index in range(form.group // 2):
        for piece in pieces(form.bits, index):
            part = (pairs[..., index, :] >> piece.to) & ((1 << piece.bits) - 1)
            part = part.to(torch.int16) << piece.at
            before = words[piece.word]
            words[piece.word] = part if before is None else before.bitwise_or_(part)
    whole = torch.stack([word for word in words if word is not None], 3)  # [R, B, groups, words, 2]
    return whole.flatten(2, 3).view(torch.uint8)


def _codes(form: BlockFormat, words: Tensor) -> Tensor:
    """Whole numbers (float32 ``[T, B, groups, group]``) of bytes ``[T, B, words, bytes]``."""
    if form.bits == 8:
        return words.contiguous().view(torch.int8).flatten(2).unflatten(2, (form.groups, -1))
    halves = words.contiguous().view(torch.int16).unflatten(2, (form.groups, form.words))
    found = torch.zeros(*halves.shape[:3], form.group // 2, 2, dtype=torch.int16)
    for index in range(form.group // 2):
        for piece in pieces(form.bits, index):
            part = (halves[..., piece.word, :] >> piece.at) & ((1 << piece.bits) - 1)
            found[..., index, :] |= part << piece.to
    return found.flatten(3).float()


# --- formats ----------------------------------------------------------------------------------


def _halves(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks.contiguous().view(torch.float16).unbind(2)


def _parse_simple(form: BlockFormat, blocks: Tensor) -> Blocks:
    """Scale, what is added, fifth bits, and 32 codes; the lower halves of bytes come first."""
    begin = _F16 * (1 + form.adds)
    halves = _halves(blocks[..., :begin])
    if form.bits == 8:
        return Blocks(blocks[..., begin:], halves)
    bytes_ = blocks[..., -form.block // 2 :]
    codes = torch.cat((bytes_ & _LOW, bytes_ >> _LOW_BITS), 2)
    if form.bits > _LOW_BITS:
        fifth = blocks[..., begin : begin + form.block // 8].unsqueeze(3)
        bits = (fifth >> torch.arange(8, dtype=torch.uint8)) & 1
        codes |= bits.flatten(2) << _LOW_BITS
    return Blocks(codes, halves)


def _parse_added(form: BlockFormat, blocks: Tensor) -> Blocks:
    """``q4_k``, ``q5_k``: what is taken off is stored here as what is added."""
    scale, less = _halves(blocks[..., : 2 * _F16])
    six, last = blocks[..., 4:12], blocks[..., 12:16]
    upper = (six >> 6) << _LOW_BITS
    scales = torch.cat((six[..., :4] & _SIX, (last & _LOW) | upper[..., :4]), 2)
    added = torch.cat((six[..., 4:] & _SIX, (last >> _LOW_BITS) | upper[..., 4:]), 2)
    bytes_ = blocks[..., -form.block // 2 :].unflatten(2, (-1, form.group))
    codes = torch.stack((bytes_ & _LOW, bytes_ >> _LOW_BITS), 3).flatten(2)
    if form.bits > _LOW_BITS:
        fifth = blocks[..., 16 : 16 + form.group].unsqueeze(2)
        bits = (fifth >> torch.arange(8, dtype=torch.uint8).unsqueeze(1)) & 1
        codes |= bits.flatten(2) << _LOW_BITS
    return Blocks(codes, (scale, -less), (scales, added))


def _parse_sixteens(blocks: Tensor) -> Blocks:
    """``q6_k``: two halves of 128 codes; a byte's parts belong to weights 64 and 32 apart."""
    low = blocks[..., :128].unflatten(2, (2, 64))
    high = blocks[..., 128:192].unflatten(2, (2, 1, 32))
    codes = torch.cat((low & _LOW, low >> _LOW_BITS), 3).flatten(2)
    pairs = (high >> torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(1)) & 3
    codes |= pairs.flatten(2) << _LOW_BITS
    return Blocks(codes, _halves(blocks[..., 208:]), (blocks[..., 192:208],))
