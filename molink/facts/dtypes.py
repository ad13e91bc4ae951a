"""Element types of tensors, as they are named in messages, and how rows are packed."""

from collections.abc import Callable, Collection
from typing import Literal, get_args

#: What weights are kept in, and what rows are computed in and travel in.
WeightDType = Literal["f32", "bf16", "f16"]
#: All of them.
WEIGHT_DTYPES: tuple[WeightDType, ...] = get_args(WeightDType)
#: What a user asks for; ``auto`` is what suits the model and the device.
DTypeChoice = Literal["auto", "f32", "bf16", "f16"]
#: What a payload may hold.
DType = Literal["u8", "i32", "f32", "f16", "bf16"]

#: Bytes of an element.
DTYPE_SIZES: dict[str, int] = {"u8": 1, "i32": 4, "f32": 4, "f16": 2, "bf16": 2}

#: How rows are packed for a link, where that pays.
Compression = Literal["none", "lossless", "int8"]


#: What weights of 16 bits may stay.
NarrowDType = Literal["bf16", "f16"]
#: Multiples of so many outputs are kept so by every CPU; of others a plan doesn't rely on it.
OUTPUT_MULTIPLE = 32
#: Stored bytes that become numbers as they are read: less exact than bf16.
_FEW_BITS = "U8"


def narrow_dtype(stored: Collection[str]) -> NarrowDType | None:
    """What weights that become one may stay, by the types in which they are stored.

    These are safetensors' own names, or ``U8`` for what has few bits in any way. ``None``: they
    take the type of rows.
    """
    kinds = set(stored)
    if kinds == {"F16"}:
        return "f16"
    return "bf16" if kinds and kinds <= {"BF16", _FEW_BITS} else None


def weight_dtype(
    narrow: NarrowDType | None, computed: WeightDType, holds: Callable[[NarrowDType], bool]
) -> WeightDType:
    """The type in memory; ``holds`` says of which the device has a product for its rows."""
    return narrow if narrow is not None and holds(narrow) else computed
