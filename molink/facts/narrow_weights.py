"""In which type the weights of projections are kept where rows have more bits than they.

The one rule for what reads weights and for the plans that count them.
"""

from collections.abc import Callable, Collection
from typing import Literal

from molink.facts.dtypes import WeightDType

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
