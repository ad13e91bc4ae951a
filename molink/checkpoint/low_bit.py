"""Checkpoints of GPTQ, AWQ, FP8 and compressed-tensors: which tensors stand for a projection.

A weight ``[out, in]`` is stored as numbers of few bits, with a scale for each *block* of it (some
rows, mostly one, by some columns, a *group*) and perhaps a zero point: ``(number - zero) * scale``.
On disk and between PCs it stays so, and in some forms on CPUs (:mod:`molink.checkpoint.resident`);
else a stage unpacks it as it loads (:mod:`molink.stage.loading`). Projections that the checkpoint's
author left out are stored as in any other model: what there is of a projection decides.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal

from molink.checkpoint.header import TensorKind
from molink.checkpoint.quantization import is_quantizable
from molink.checkpoint.stored import FLOATS, Stored

#: Where the numbers and zero points of a weight lie.
#:
#: ``gptq``: ``qweight`` int32 ``[in / n, out]``, ``n`` numbers to a word, the first in its lowest
#: bits; ``scales`` ``[groups, out]``; ``qzeros`` ``[groups, out / n]``, each one less than the zero
#: point (``gptq_v2``: the zero point itself).
#: ``awq``: ``qweight`` int32 ``[in, out / n]``, whose words hold their eight numbers in the order
#: 0 2 4 6 1 3 5 7; ``qzeros`` alike, ``scales`` as there.
#: ``packed`` (compressed-tensors): ``weight_packed`` int32 ``[out, in / n]``, ``weight_scale``
#: ``[out, groups]``, ``weight_zero_point`` ``[out / n, groups]``.
#: ``plain``: ``weight`` of 8 bits ``[out, in]``, ``weight_scale`` or ``weight_scale_inv`` (which is
#: no inverse) with an element for each block.
Layout = Literal["gptq", "gptq_v2", "awq", "packed", "plain"]

#: Types of 8-bit numbers that are stored as they are.
EIGHT_BITS = {"float": "F8_E4M3", "int": "I8"}
_WORD_BITS = 32
_WEIGHT = ".weight"
_PLAIN_SCALES = ("weight_scale", "weight_scale_inv")
#: Beside weights, and of no use here: rows aren't rounded to 8 bits, and the config has the shape.
_UNUSED = ("input_scale", "activation_scale", "weight_shape", "g_idx", "weight_g_idx")


@dataclass(frozen=True, slots=True)
class LowBit:
    """How a checkpoint's projections are stored.

    ``block`` are the rows and columns of ``[out, in]`` that share a scale, 0 = all. ``zeros``:
    there are zero points; without, it is the middle of what the bits can be. ``ordered``: a tensor
    ``g_idx`` (int32 ``[in]``) names the group of each column ("act-order"), else they follow each
    other. ``kind`` is the type of ``plain`` numbers.
    """

    layout: Layout
    bits: int
    block: tuple[int, int]
    zeros: bool = True
    ordered: bool = False
    kind: Literal["int", "float"] = "int"

    def holds(self, name: str, found: Mapping[str, TensorKind]) -> bool:
        """Whether the weight ``name`` is stored so; else it is in full, or not there at all."""
        span = found.get(self.numbers(name))
        return span is not None and (self.layout != "plain" or span.dtype not in FLOATS)

    def numbers(self, name: str) -> str:
        """What the tensor with the numbers of the weight ``name`` is called."""
        return self._beside(name, {"plain": "weight", "packed": "weight_packed"}, "qweight")

    def zero_points(self, name: str) -> str:
        """What the tensor with its zero points is called."""
        return self._beside(name, {"packed": "weight_zero_point"}, "qzeros")

    def scales(self, name: str, found: Container[str]) -> str:
        """What the tensor with its scales is called."""
        if self.layout != "plain":
            return self._beside(name, {"packed": "weight_scale"}, "scales")
        names = [_beside(name, end) for end in _PLAIN_SCALES]
        return next((one for one in names if one in found), names[0])

    def order(self, name: str) -> str:
        """What the tensor is called that names the group of each column."""
        return self._beside(name, {"packed": "weight_g_idx"}, "g_idx")

    def groups(self, width: int) -> int:
        """How many scales a row of ``width`` columns has."""
        return -(-width // (self.block[1] or width))

    def stored(
        self, name: str, shape: tuple[int, int], found: Mapping[str, TensorKind]
    ) -> dict[str, Stored]:
        """What has to be stored for a weight ``name`` of ``shape``, if it is stored so."""
        rows, width = shape
        groups = self.groups(width)
        scales = self.scales(name, found)
        if self.layout == "plain":
            kinds = (EIGHT_BITS[self.kind],)
            wanted = self._plain_scales(shape, found.get(scales))
            return {name: Stored(kinds, shape), scales: Stored(FLOATS, wanted)}
        words = {
            "awq": (width, self._words(rows)),
            "packed": (rows, self._words(width)),
        }.get(self.layout, (self._words(width), rows))
        by_row = self.layout == "packed"
        tensors = {
            self.numbers(name): Stored(("I32",), words),
            scales: Stored(FLOATS, (rows, groups) if by_row else (groups, rows)),
        }
        if self.zeros:
            packed = self._words(rows)
            shape = (packed, groups) if by_row else (groups, packed)
            tensors[self.zero_points(name)] = Stored(("I32",), shape)
        if self.ordered and groups > 1:
            tensors[self.order(name)] = Stored(("I32",), (width,))
        return tensors

    def unused(self, name: str) -> tuple[str, ...]:
        """Names of tensors that may be beside the weight ``name``, and are not read."""
        # Older versions of AutoGPTQ gave every projection a bias.
        biases = ("bias",) if self.layout in ("gptq", "gptq_v2") else ()
        return tuple(_beside(name, end) for end in (*_UNUSED, *biases))

    def _plain_scales(self, shape: tuple[int, int], span: TensorKind | None) -> tuple[int, ...]:
        if self.block == (0, 0):
            return () if span is not None and span.shape == () else (1,)
        rows = -(-shape[0] // (self.block[0] or shape[0]))
        return rows, self.groups(shape[1])

    def _words(self, numbers: int) -> int:
        return -(-numbers * self.bits // _WORD_BITS)

    def _beside(self, name: str, ends: Mapping[str, str], other: str) -> str:
        return _beside(name, ends.get(self.layout, other))


def can_be_low_bit(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor may be stored so."""
    return is_quantizable(name, shape)


def _beside(name: str, end: str) -> str:
    return f"{name.removesuffix(_WEIGHT)}.{end}"
