"""Names of element types of tensors and packed rows in messages."""

from collections.abc import Callable, Collection
from typing import Literal, get_args

#: Types of weights, and of rows in computation and on links.
WeightDType = Literal["f32", "bf16", "f16"]
WEIGHT_DTYPES: tuple[WeightDType, ...] = get_args(WeightDType)
#: A user's choice; ``auto`` depends on the model and the device.
DTypeChoice = Literal["auto", "f32", "bf16", "f16"]
#: Types of payloads.
DType = Literal["u8", "i32", "f32", "f16", "bf16"]

#: Bytes per element.
DTYPE_SIZES: dict[str, int] = {"u8": 1, "i32": 4, "f32": 4, "f16": 2, "bf16": 2}

#: Bytes of the scale of one head's 8-bit keys or values at one position.
KV_SCALE_BYTES = DTYPE_SIZES["bf16"]

#: How rows are packed for a link, if packing pays off there.
Compression = Literal["none", "lossless", "int8"]


#: 16-bit types that weights may keep while rows are f32.
NarrowDType = Literal["bf16", "f16"]
#: Every CPU can keep a 16-bit weight whose outputs are a multiple of this; plans count no others.
OUTPUT_MULTIPLE = 32
#: Type of stored low-bit formats, which are dequantized on loading and less exact than bf16.
_FEW_BITS = "U8"


def narrow_dtype(stored: Collection[str]) -> NarrowDType | None:
    """Return the 16-bit type that a merged weight may keep, given the stored types of its parts.

    Stored types are safetensors names, or ``U8`` for any quantized format. ``None`` means the type
    of rows.
    """
    kinds = set(stored)
    if kinds == {"F16"}:
        return "f16"
    return "bf16" if kinds and kinds <= {"BF16", _FEW_BITS} else None


def weight_dtype(
    narrow: NarrowDType | None, computed: WeightDType, holds: Callable[[NarrowDType], bool]
) -> WeightDType:
    """Return a weight's type in memory; ``holds`` says which types the device can multiply by."""
    return narrow if narrow is not None and holds(narrow) else computed
