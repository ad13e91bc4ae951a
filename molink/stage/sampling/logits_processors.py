"""Penalties, biases and grammar masks, applied before the temperature.

The order is: repetition penalty (Hugging Face's: logits of prompt and output tokens are divided, or
multiplied if negative), presence and frequency penalties (OpenAI's: subtracted for output tokens,
once and per occurrence), logit bias (added), grammar mask.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from molink.stage.device_copy import gather_rows, upload_integers, upload_tensor
from molink.stage.sampling.token_history import TokenHistory
from molink.wire.messages.data_plane import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Sampling inputs of one row of logits.

    ``position`` is the sampled token's. ``history`` is needed only with penalties. ``allowed`` is a
    bit mask of tokens, lowest bit first; ``None`` = all.
    """

    sampling_params: SamplingParams
    position: int
    history: TokenHistory | None = None
    allowed: bytes | None = None


def is_plain(row: SampleRow) -> bool:
    """Whether the row's token is the one with the largest logit."""
    params = row.sampling_params
    is_changed = params.needs_history or bool(params.logit_bias) or row.allowed is not None
    return params.temperature <= 0 and not is_changed


def apply_penalties(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Apply penalties and biases to logits ``[n, V]``; the same tensor if there are none.

    Token ids outside the vocabulary are ignored.
    """
    vocabulary = logits.shape[1]
    penalties, biases = collect_penalties(rows, vocabulary), collect_biases(rows, vocabulary)
    if penalties is None and biases is None:
        return logits
    changed = logits.clone(memory_format=torch.contiguous_format)
    # A flat index is several times faster on a CPU than a pair of indices.
    flat = changed.view(-1)
    if penalties is not None:
        where, factors, amounts = (upload_tensor(part, logits.device) for part in penalties)
        values = flat[where]
        flat[where] = torch.where(values < 0, values * factors, values / factors) - amounts
    if biases is not None:
        where, amounts = (upload_tensor(part, logits.device) for part in biases)
        flat[where] += amounts
    return changed


def collect_penalties(
    rows: Sequence[SampleRow], vocabulary: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Collect flat indices of penalized logits, their divisors and subtrahends."""
    found = [
        (index, row.sampling_params, row.history.token_entries(vocabulary))
        for index, row in enumerate(rows)
        if row.sampling_params.needs_history and row.history is not None
    ]
    if not found:
        return None
    ids = torch.cat([ids for _, _, (ids, _) in found])
    times = torch.cat([times for _, _, (_, times) in found])
    lengths = torch.tensor([len(ids) for _, _, (ids, _) in found])
    offsets = torch.tensor([index * vocabulary for index, _, _ in found])
    settings = torch.tensor(
        [[s.repetition_penalty, s.presence_penalty, s.frequency_penalty] for _, s, _ in found]
    )
    factors, presence, frequency = settings.repeat_interleave(lengths, dim=0).unbind(dim=1)
    amounts = presence * (times > 0) + frequency * times
    return ids + offsets.repeat_interleave(lengths), factors, amounts


def collect_biases(rows: Sequence[SampleRow], vocabulary: int) -> tuple[Tensor, Tensor] | None:
    """Collect flat indices of biased logits, and their biases."""
    found = {
        index * vocabulary + token: bias
        for index, row in enumerate(rows)
        for token, bias in row.sampling_params.logit_bias
        if 0 <= token < vocabulary
    }
    if not found:
        return None
    return torch.tensor(list(found)), torch.tensor(list(found.values()), dtype=torch.float32)


_BITS = 8


def apply_masks(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Mask logits ``[n, V]`` by the rows' ``allowed`` tokens; the same tensor if there are none."""
    limited = [index for index, row in enumerate(rows) if row.allowed is not None]
    if not limited:
        return logits
    vocabulary = logits.shape[1]
    masks = upload_masks([rows[index].allowed or b"" for index in limited], logits)
    # Eight tokens at a time: much faster than masked_fill on a CPU, and fewer bytes to a GPU.
    biases = _bias_table(logits.device).index_select(0, masks.flatten().int())
    biases = biases.view(len(limited), -1)[:, :vocabulary].contiguous()
    chosen = biases.add_(gather_rows(logits, limited))
    if len(limited) == len(rows):
        return chosen
    return logits.index_copy(0, upload_integers(limited, logits.device), chosen)


def upload_masks(masks: Sequence[bytes], logits: Tensor) -> Tensor:
    """Copy masks to the device of ``logits`` ``[n, V]``: ``[m, V / 8]``, padded with zeros."""
    size = -(-logits.shape[1] // _BITS)
    found = np.zeros((len(masks), size), np.uint8)
    for row, mask in zip(found, masks, strict=True):
        part = np.frombuffer(mask, np.uint8)[:size]
        row[: len(part)] = part
    return upload_tensor(torch.from_numpy(found), logits.device)


@cache
def _bias_table(device: torch.device) -> Tensor:
    """Return what each mask byte adds to eight logits (0 or -inf): ``[256, 8]``."""
    bits = torch.arange(1 << _BITS)[:, None] >> torch.arange(_BITS) & 1
    return torch.zeros(bits.shape).masked_fill(bits == 0, -math.inf).to(device)
