"""Reading weights that a checkpoint holds in bitsandbytes' formats."""

from collections.abc import Callable

import torch
from torch import Tensor

from molink.checkpoint.prequantized import (
    NESTED_BLOCK,
    QUANT_STATE_SUFFIX,
    companion_names,
    parse_quant_state,
)
from molink.errors import BrokenModel, UnsupportedModel
from molink.stage.linear.nf4 import NF4_VALUES
from molink.stage.linear.quantized import QuantizedWeight

#: Reads a tensor of the checkpoint as it is stored.
ReadStored = Callable[[str], Tensor]


def fill_quantized(
    weight: QuantizedWeight, first: int, name: str, shape: tuple[int, int], read: ReadStored
) -> None:
    """Put the stored weight ``name`` of ``shape`` (``[out, in]``) at row ``first`` of ``weight``.

    Raises:
        BrokenModel: scales that are no numbers, or a damaged description; named.
        UnsupportedModel: a variant that isn't implemented; named.
    """
    data, scales = weight.row_slices(first, first + shape[0])
    data.copy_(read(name).view(data.shape))
    stored = (
        read(companion_names(name)[0]) if weight.mode == "int8" else _read_scales(name, shape, read)
    )
    scales.copy_(stored)
    if not bool(torch.isfinite(scales).all()):
        raise BrokenModel(f"tensor {name}: a scale of it is NaN or infinite; fetch it again")


def check_layout(name: str, layout: Tensor) -> None:
    """Check an int8 weight's ``weight_format``: 0 is row by row, others belong to old GPUs.

    Raises:
        UnsupportedModel: it is another one.
    """
    if int(layout) != 0:
        raise UnsupportedModel(f"tensor {name}: weight_format {int(layout)} is not supported")


def _read_scales(name: str, shape: tuple[int, int], read: ReadStored) -> Tensor:
    """Float32 scales of the blocks of an nf4 weight."""
    offset = parse_quant_state(
        read(f"{name}.{QUANT_STATE_SUFFIX}").numpy().tobytes(), shape, f"tensor {name}"
    )
    if not torch.allclose(read(f"{name}.quant_map"), torch.tensor(NF4_VALUES), rtol=0, atol=1e-4):
        raise UnsupportedModel(f"tensor {name}: its quant_map isn't that of nf4")
    scales = read(f"{name}.absmax")
    if scales.dtype is torch.float32:
        return scales
    values = read(f"{name}.nested_quant_map")[scales.int()]
    coarse = read(f"{name}.nested_absmax").repeat_interleave(NESTED_BLOCK)[: len(scales)]
    return values * coarse + offset
