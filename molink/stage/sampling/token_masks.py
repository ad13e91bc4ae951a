"""Leaves only those tokens that a grammar allows: the logits of all others become -inf."""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from molink.stage.device_copy import gather_rows, upload_integers, upload_tensor
from molink.stage.sampling.penalties import SampleRow

_BITS = 8


def apply_masks(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Logits ``[n, V]`` with only the ``allowed`` tokens of ``rows``; the same if all may come."""
    limited = [index for index, row in enumerate(rows) if row.allowed is not None]
    if not limited:
        return logits
    vocabulary = logits.shape[1]
    masks = upload_tensor(
        _mask_bytes([rows[index].allowed or b"" for index in limited], vocabulary), logits.device
    )
    # Eight tokens at a time: many times faster on a CPU than masked_fill, and fewer bytes to a GPU.
    biases = _bias_table(logits.device).index_select(0, masks.flatten().int())
    biases = biases.view(len(limited), -1)[:, :vocabulary].contiguous()
    chosen = biases.add_(gather_rows(logits, limited))
    if len(limited) == len(rows):
        return chosen
    return logits.index_copy(0, upload_integers(limited, logits.device), chosen)


def _mask_bytes(masks: Sequence[bytes], vocabulary: int) -> Tensor:
    """The masks as bytes ``[m, V / 8]``; a token that one says nothing of may not come."""
    size = -(-vocabulary // _BITS)
    found = np.zeros((len(masks), size), np.uint8)
    for row, mask in zip(found, masks, strict=True):
        part = np.frombuffer(mask, np.uint8)[:size]
        row[: len(part)] = part
    return torch.from_numpy(found)


@cache
def _bias_table(device: torch.device) -> Tensor:
    """What a byte of a mask adds to eight logits, ``[256, 8]``: 0, or -inf."""
    bits = torch.arange(1 << _BITS)[:, None] >> torch.arange(_BITS) & 1
    return torch.zeros(bits.shape).masked_fill(bits == 0, -math.inf).to(device)
