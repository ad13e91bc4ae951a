"""Element types of tensors, as they are named in messages, and how rows are packed."""

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
