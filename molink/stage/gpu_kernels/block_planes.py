"""Low-bit weights as planes in a GPU's memory, without loss and in about the file's size.

A weight ``[out, in]`` is cut into *chunks* of ``32 / bits`` *slices* of :attr:`PlaneLayout.width`
consecutive columns (4-bit words hold 5- and 6-bit codes' low bits). Word ``w`` of a chunk holds the
codes at place ``w`` of all its slices, the first slice's in its lowest bits, so one load and a
shift give a slice. Planes of words and of upper bits are ``[out, chunks · width]``. The numbers of
groups and blocks are transposed, ``[groups, out]``, since a slice needs one for each output.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor, unflatten

from molink.gguf.block_formats import PLANE_WIDTHS, BlockFormat, StepKind, fits_planes
from molink.stage.cpu_kernels.repack import BlockCodes
from molink.stage.torch_dtypes import TORCH_DTYPES

_WORD_BITS = 32
#: NaN as an E8M0 number.
_NO_POWER = 255
#: By the number of upper bits: slices of a chunk share an element.
_HIGH_DTYPES = {1: torch.uint8, 2: torch.int16}

#: Constants of a kernel: bits of a word's codes, offset, group, block, upper bits, whether there
#: are minima, nested scales and shifts, width, whether there is a codebook and codes are floats,
#: rows that share a scale, kind of steps.
KernelForm = tuple[int, int, int, int, int, bool, bool, bool, int, bool, bool, int, StepKind]


@dataclass(frozen=True)
class PlaneLayout:
    """Planes of a weight of ``shape`` ``[out, in]``."""

    form: BlockFormat
    shape: tuple[int, int]

    @property
    def word_bits(self) -> int:
        """Bits of a code in a word."""
        return 8 if self.form.bits == 8 else 4

    @property
    def high_bits(self) -> int:
        """Bits of a code above those."""
        return self.form.bits - self.word_bits

    @cached_property
    def width(self) -> int:
        """Columns of a slice."""
        slices = _WORD_BITS // self.word_bits
        return next(
            each
            for each in PLANE_WIDTHS
            if self.form.group % each == 0 and self.shape[1] % (slices * each) == 0
        )

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.shape[1] // self.chunk_columns

    @property
    def chunk_columns(self) -> int:
        """Columns of a chunk."""
        return _WORD_BITS // self.word_bits * self.width

    @property
    def kernel_form(self) -> KernelForm:
        """What kernels are compiled for."""
        form = self.form
        numbers = form.has_minimum, form.has_nested_scales, form.has_shifts
        # One kernel serves all widths if numbers are of whole rows.
        group, block = (0 if each == self.shape[1] else each for each in (form.group, form.block))
        codes = self.word_bits, form.offset, group, block, self.high_bits
        kinds = bool(form.codebook), form.is_float
        return (*codes, *numbers, self.width, *kinds, form.shared_rows, form.step_kind)

    def is_supported(self) -> bool:
        """Whether chunks fill the rows, so that nothing is padded."""
        return fits_planes(self.form, self.shape)


@dataclass(frozen=True)
class BlockPlanes:
    """A weight's planes; those that its format lacks are empty.

    ``words`` is int32, ``high`` uint8 or int16 ``[out, chunks · width]``. ``scales`` and ``minima``
    are of groups, or of blocks with nested scales, ``[groups, out]``, or of some rows together,
    ``[groups, out / shared_rows]``; with nested scales ``scale_steps`` and ``minimum_steps``
    (bytes ``[groups, out]``) multiply them. ``shifts`` is int8 ``[groups, out]``. ``codebook``
    (float16 ``[2, 16]``: values, and what is missing) is shared by all weights.
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
        """Create planes to be filled by :meth:`put_rows`."""
        form, (rows, width) = layout.form, layout.shape
        words = rows, layout.chunks * layout.width
        groups = width // form.group, rows
        halves = (
            (width // form.block if form.has_nested_scales else groups[0]),
            (rows // form.shared_rows),
        )
        number, nested = TORCH_DTYPES[form.number_dtype], form.has_nested_scales

        def make(shape: tuple[int, int], dtype: torch.dtype, exists: bool) -> Tensor:
            return torch.empty(shape if exists else (0, 0), dtype=dtype, device=device)

        signed = form.step_kind == "integer" and not form.has_minimum
        steps = torch.int8 if signed else torch.uint8
        high = _HIGH_DTYPES.get(layout.high_bits, torch.uint8)
        return cls(
            layout,
            make(words, torch.int32, True),
            make(words, high, layout.high_bits > 0),
            make(halves, number, True),
            make(halves, number, form.has_minimum),
            make(groups, steps, nested),
            make(groups, steps, nested and form.has_minimum),
            make(groups, torch.int8, form.has_shifts),
            _make_codebook(form.codebook, device),
        )

    @classmethod
    def pack_blocks(
        cls, layout: PlaneLayout, parts: Iterable[BlockCodes], device: torch.device
    ) -> "BlockPlanes":
        """Pack ``parts``, which are stacked by rows, on ``device``."""
        made, first = cls.create_empty(layout, device), 0
        for part in parts:
            made.put_rows(first, part)
            first += len(part.codes)
        return made

    def put_rows(self, first: int, part: BlockCodes) -> None:
        """Store rows from ``first`` on."""
        layout, device, last = self.layout, self.words.device, first + len(part.codes)
        codes = part.codes.to(device).flatten(1)
        slices = unflatten(codes, 1, (layout.chunks, -1, layout.width))
        low = slices & ((1 << layout.word_bits) - 1)
        self.words[first:last] = _pack_slices(low, layout.word_bits)
        if layout.high_bits:
            high = _pack_slices(slices >> layout.word_bits, layout.high_bits)
            self.high[first:last] = high.to(self.high.dtype)
        second = self.shifts if layout.form.has_shifts else self.minima
        every = layout.form.shared_rows
        shared = slice(-(-first // every), -(-last // every))
        for plane, numbers in zip((self.scales, second), part.halves, strict=False):
            plane[:, shared] = numbers[-first % every :: every].to(device).T
        for plane, numbers in zip((self.scale_steps, self.minimum_steps), part.whole, strict=False):
            plane[:, first:last] = numbers.to(device).flatten(1).view(plane.dtype).T

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All planes, in the kernels' order."""
        planes = self.words, self.high, self.scales, self.minima
        return (*planes, self.scale_steps, self.minimum_steps, self.shifts, self.codebook)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, without the shared codebook."""
        return sum(plane.nbytes for plane in self.tensors) - self.codebook.nbytes

    def is_finite(self, first: int, last: int) -> bool:
        """Whether all numbers of rows ``first … last - 1`` are finite."""
        form = self.layout.form
        if form.is_float and _has_nan(self.words[first:last]):
            return False
        steps = self.scale_steps[:, first:last]
        if form.step_kind == "e8m0" and bool(steps.eq(_NO_POWER).any()):
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
    """Whether any byte is NaN as an E4M3 float; it has no infinity."""
    return bool((floats.view(torch.uint8) & 127).eq_(127).any())


def _pack_slices(slices: Tensor, bits: int) -> Tensor:
    """Words int32 ``[rows, chunks · width]`` of codes ``[rows, chunks, slices, width]``."""
    words = slices[:, :, 0].int()
    for index in range(1, slices.shape[2]):
        words |= slices[:, :, index].int() << (bits * index)
    return words.flatten(1)
