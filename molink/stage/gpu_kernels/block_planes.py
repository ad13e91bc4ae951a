"""Low-bit weights as bit planes in a GPU's memory, without loss and at about the file's size.

A weight ``[out, in]`` is cut into *chunks* of ``16 / bits`` *slices* of :attr:`PlaneLayout.width`
consecutive columns (4-bit words hold 5- and 6-bit codes' low bits). Word ``w`` of a chunk holds the
codes at places ``2w`` and ``2w + 1`` of all its slices in its lower and upper half, the first
slice's in their lowest bits. So a shift and a mask extract two neighbours in the layout of tensor
cores, and four words yield eight neighbours of each slice. Planes of words and of upper bits are
``[chunks, out, width / 2]``, so that each load of a kernel is contiguous. The numbers of groups and
blocks are ``[groups, out]``, since a slice needs one per output.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import torch
from torch import Tensor, unflatten

from molink.gguf.block_formats import (
    E2M1_VALUES,
    HALF_BITS,
    NO_POWER,
    BlockFormat,
    StepKind,
    plane_width,
)
from molink.stage.cpu_kernels.repack import BlockCodes
from molink.stage.torch_dtypes import TORCH_DTYPES

#: Added to signed bytes to make them unsigned.
_SIGN = 128
#: Types of upper bits, by their number per code: the slices of a chunk share an element.
_HIGH_DTYPES = {1: torch.uint8, 2: torch.int16}
#: Types of a chunk's steps, by its number of groups with nested scales (0: none).
_STEP_DTYPES = {0: torch.int32, 2: torch.int16, 4: torch.int32}

#: Meaning of codes: E4M3 or E2M1 floats, indices into a codebook, or integers.
CodeKind = Literal["integer", "codebook", "e2m1", "e4m3"]
#: A kernel's constants: bits of a word's codes, offset, group, block, upper bits, whether there are
#: minima, nested scales and shifts, width, kind of codes, rows that share a scale, kind of steps,
#: slices of a chunk that share a group.
KernelForm = tuple[int, int, int, int, int, bool, bool, bool, int, CodeKind, int, StepKind, int]


@dataclass(frozen=True)
class PlaneLayout:
    """Layout of the planes of a weight of ``shape`` ``[out, in]``."""

    form: BlockFormat
    shape: tuple[int, int]

    @property
    def word_bits(self) -> int:
        """Bits of a code within a word."""
        return 8 if self.form.bits == 8 else 4

    @property
    def high_bits(self) -> int:
        """Remaining upper bits of a code."""
        return self.form.bits - self.word_bits

    @cached_property
    def width(self) -> int:
        """Columns per slice."""
        return plane_width(self.form, self.shape[1])

    @property
    def slices(self) -> int:
        """Slices per chunk."""
        return HALF_BITS // self.word_bits

    @property
    def chunks(self) -> int:
        """Chunks per row."""
        return self.shape[1] // self.chunk_columns

    @property
    def chunk_columns(self) -> int:
        """Columns per chunk."""
        return self.slices * self.width

    @property
    def kernel_form(self) -> KernelForm:
        """Constants for which kernels are compiled."""
        form = self.form
        numbers = form.has_minimum, form.has_nested_scales, form.has_shifts
        # One kernel serves all widths if each number applies to a whole row.
        group, block = (0 if each == self.shape[1] else each for each in (form.group, form.block))
        codes = self.word_bits, self._offset, group, block, self.high_bits
        kinds = self._code_kind, form.shared_rows, form.step_kind
        return (*codes, *numbers, self.width, *kinds, self._slices_together)

    @property
    def has_minima(self) -> bool:
        """Whether kernels add a number to each group: its minimum, or the shift of its codes."""
        return self.form.has_minimum or self.form.has_shifts

    @property
    def _offset(self) -> int:
        return _SIGN if self.has_signed_codes else self.form.offset

    @property
    def has_signed_codes(self) -> bool:
        """Whether codes are signed bytes, which words hold plus 128."""
        return self.form.bits == 8 and not self.form.is_float

    @property
    def _code_kind(self) -> CodeKind:
        if self.form.is_float:
            return "e4m3"
        if self.form.codebook == E2M1_VALUES:
            return "e2m1"
        return "codebook" if self.form.codebook else "integer"

    @property
    def _slices_together(self) -> int:
        group = self.form.group
        if group % self.chunk_columns == 0:
            return self.slices
        return group // self.width if self.chunk_columns % group == 0 else 1


@dataclass(frozen=True)
class BlockPlanes:
    """A weight's planes; planes that its format lacks are empty.

    ``words`` (int32) and ``high`` (uint8 or int16) are ``[chunks, out, width / 2]``. ``scales`` and
    ``minima`` are ``[groups, out]``, one per group (with nested scales one per block), or
    ``[groups, out / shared_rows]`` if rows share them. With nested scales, ``scale_steps`` and
    ``minimum_steps`` (bytes ``[chunks, out, groups of a chunk]``) multiply them. ``shifts`` is int8
    ``[groups, out]``. ``codebook`` (float16 ``[2, 16]``: values, and their rounding errors) is
    shared by all weights.
    """

    layout: PlaneLayout
    words: Tensor
    high: Tensor
    scales: Tensor
    minima: Tensor
    scale_steps: Tensor
    minimum_steps: Tensor
    shifts: Tensor
    codebook: Tensor

    @classmethod
    def create_empty(cls, layout: PlaneLayout, device: torch.device) -> "BlockPlanes":
        """Create empty planes to fill by :meth:`put_rows`."""
        form, (rows, width) = layout.form, layout.shape
        words = layout.chunks, rows, layout.width // 2
        groups = width // form.group, rows
        steps = layout.chunks, rows, layout.chunk_columns // form.group
        halves = (
            (width // form.block if form.has_nested_scales else groups[0]),
            (rows // form.shared_rows),
        )
        number, nested = TORCH_DTYPES[form.number_dtype], form.has_nested_scales

        def make(shape: tuple[int, ...], dtype: torch.dtype, exists: bool) -> Tensor:
            return torch.empty(shape if exists else (0, 0), dtype=dtype, device=device)

        signed = form.step_kind == "integer" and not form.has_minimum
        step = torch.int8 if signed else torch.uint8
        high = _HIGH_DTYPES.get(layout.high_bits, torch.uint8)
        return cls(
            layout,
            make(words, torch.int32, True),
            make(words, high, layout.high_bits > 0),
            make(halves, number, True),
            make(halves, number, form.has_minimum),
            make(steps, step, nested),
            make(steps, step, nested and form.has_minimum),
            make(groups, torch.int8, form.has_shifts),
            _make_codebook(form.codebook, device),
        )

    @classmethod
    def pack_blocks(
        cls, layout: PlaneLayout, parts: Iterable[BlockCodes], device: torch.device
    ) -> "BlockPlanes":
        """Pack ``parts``, stacked by rows, on ``device``."""
        made, first = cls.create_empty(layout, device), 0
        for part in parts:
            made.put_rows(first, part)
            first += len(part.codes)
        return made

    def put_rows(self, first: int, part: BlockCodes) -> None:
        """Store rows from ``first`` on."""
        layout, device, last = self.layout, self.words.device, first + len(part.codes)
        codes = part.codes.to(device).flatten(1)
        if layout.has_signed_codes:
            codes = codes ^ _SIGN
        slices = unflatten(codes, 1, (layout.chunks, layout.slices, layout.width // 2, 2))
        low = slices & ((1 << layout.word_bits) - 1)
        self.words[:, first:last] = _pack_slices(low, layout.word_bits, HALF_BITS)
        if bits := layout.high_bits:
            high = slices >> layout.word_bits
            self.high[:, first:last] = _pack_slices(high, bits, layout.slices * bits)
        second = self.shifts if layout.form.has_shifts else self.minima
        every = layout.form.shared_rows
        shared = slice(-(-first // every), -(-last // every))
        for plane, numbers in zip((self.scales, second), part.halves, strict=False):
            plane[:, shared] = numbers[-first % every :: every].to(device).T
        for plane, numbers in zip((self.scale_steps, self.minimum_steps), part.whole, strict=False):
            steps = numbers.to(device).flatten(1).view(plane.dtype)
            plane[:, first:last] = unflatten(steps, 1, (layout.chunks, -1)).transpose(0, 1)

    def copy_rows(self, first: int, other: "BlockPlanes") -> None:
        """Overwrite rows from ``first`` on with all of ``other``, which has the same format."""
        every, rows = self.layout.form.shared_rows, other.layout.shape[0]
        for plane, given in zip(self._own_planes, other._own_planes, strict=True):
            if plane.numel():
                step = every if plane is self.scales or plane is self.minima else 1
                plane[:, first // step : (first + rows) // step] = given

    @property
    def _own_planes(self) -> tuple[Tensor, ...]:
        steps = self.scale_steps, self.minimum_steps
        return self.words, self.high, self.scales, self.minima, *steps, self.shifts

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All planes in the order of kernel arguments; a chunk's steps are one number."""
        planes = self.words, self.high, self.scales, self.minima
        steps = self.scale_steps, self.minimum_steps
        number = _STEP_DTYPES[self.scale_steps.shape[-1]]
        words = (each.flatten().view(number) for each in steps)
        return (*planes, *words, self.shifts, self.codebook)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, without the shared codebook."""
        return sum(plane.nbytes for plane in self.tensors) - self.codebook.nbytes

    def is_finite(self, first: int, last: int) -> bool:
        """Check that all numbers of rows ``first … last - 1`` are finite."""
        form = self.layout.form
        if form.is_float and _has_nan(self.words[:, first:last]):
            return False
        steps = self.scale_steps[:, first:last]
        if form.step_kind == "e8m0" and bool(steps.eq(NO_POWER).any()):
            return False
        if form.step_kind == "e4m3" and _has_nan(steps):
            return False
        rows = slice(first // form.shared_rows, -(-last // form.shared_rows))
        numbers = (self.scales, self.minima) if self.minima.numel() else (self.scales,)
        return all(bool(each[:, rows].isfinite().all()) for each in numbers)


@cache
def _make_codebook(values: tuple[float, ...], device: torch.device) -> Tensor:
    exact = torch.tensor(values, dtype=torch.float64)
    rounded = exact.half()
    return torch.stack((rounded, (exact - rounded).half())).to(device)


def _has_nan(floats: Tensor) -> bool:
    """Whether any byte is NaN as an E4M3 float, which has no infinity."""
    return bool((floats.view(torch.uint8) & 127).eq_(127).any())


def _pack_slices(slices: Tensor, bits: int, half: int) -> Tensor:
    """Pack codes ``[rows, chunks, slices, pairs, 2]`` into int32 words ``[chunks, rows, pairs]``.

    The second code of a pair begins at bit ``half``.
    """
    words = torch.zeros_like(slices[:, :, 0, :, 0], dtype=torch.int32)
    for index in range(slices.shape[2]):
        for place in (0, 1):
            words |= slices[:, :, index, :, place].int() << (bits * index + half * place)
    return words.transpose(0, 1)
