"""Leaves only those tokens that a grammar allows: the logits of all others become -inf."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from molink.stage.sampling.penalties import SampleRow
from molink.stage.to_device import take_rows, upload, upload_integers


def restrict(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Logits ``[n, V]`` with only the ``allowed`` tokens of ``rows``; the same if all may come."""
    limited = [index for index, row in enumerate(rows) if row.allowed is not None]
    if not limited:
        return logits
    allowed = upload(_unpacked(rows, limited, logits.shape[1]), logits.device)
    chosen = take_rows(logits, limited).masked_fill(~allowed, -math.inf)
    if len(limited) == len(rows):
        return chosen
    return logits.index_copy(0, upload_integers(limited, logits.device), chosen)


def _unpacked(rows: Sequence[SampleRow], limited: Sequence[int], vocabulary: int) -> Tensor:
    """Whether each token may come (bool ``[m, V]``), one that a row says nothing of may not."""
    parts = [np.frombuffer(rows[index].allowed or b"", np.uint8) for index in limited]
    bits = [np.unpackbits(part, bitorder="little", count=vocabulary) for part in parts]
    return torch.from_numpy(np.stack(bits)).view(torch.bool)
