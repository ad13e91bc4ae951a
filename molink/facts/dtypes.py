"""Element types of tensors by their names in messages, and of packed rows."""

from collections.abc import Callable, Collection
from typing import Literal, get_args

#: Types of weights, and of rows in computation and on links.
WeightDType = Literal["f32", "bf16", "f16"]
WEIGHT_DTYPES: tuple[WeightDType, ...] = get_args(WeightDType)
#: What a user asks for; ``auto`` suits the model and the device.
DTypeChoice = Literal["auto", "f32", "bf16", "f16"]
#: Types of a payload.
DType = Literal["u8", "i32", "f32", "f16", "bf16"]

#: Bytes of an element.
DTYPE_SIZES: dict[str, int] = {"u8": 1, "i32": 4, "f32": 4, "f16": 2, "bf16": 2}

#: Bytes of the scale of a position's head of keys or of values in 8 bits.
KV_SCALE_BYTES = DTYPE_SIZES["bf16"]

#: How rows are packed for a link, where that pays.
Compression = Literal["none", "lossless", "int8"]


#: 16-bit types that weights may keep while rows are f32.
NarrowDType = Literal["bf16", "f16"]
#: Every CPU keeps weights with a multiple of this many outputs; a plan doesn't rely on others.
OUTPUT_MULTIPLE = 32
#: Stored bytes that are dequantized on loading; less exact than bf16.
_FEW_BITS = "U8"


def narrow_dtype(stored: Collection[str]) -> NarrowDType | None:
    """The 16-bit type that a merged weight may keep, by the types in which its parts are stored.

    Types are safetensors' names, or ``U8`` for any quantized format. ``None``: the type of rows.
    """
    kinds = set(stored)
    if kinds == {"F16"}:
        return "f16"
    return "bf16" if kinds and kinds <= {"BF16", _FEW_BITS} else None


def weight_dtype(
    narrow: NarrowDType | None, computed: WeightDType, holds: Callable[[NarrowDType], bool]
) -> WeightDType:
    """The type in memory; ``holds`` tells for which types the device has a matrix product."""
    return narrow if narrow is not None and holds(narrow) else computed
