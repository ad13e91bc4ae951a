"""Penalties and biases: what is done to logits before the temperature.

In this order: the repetition penalty (Hugging Face's: logits of all tokens of prompt and answer are
divided, or multiplied where negative), then presence and frequency penalties (OpenAI's: subtracted
for tokens of the answer, once and per occurrence), then the logit bias (added).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.wire.data import Sampling


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How to sample one row of logits.

    ``position`` is that of the token to be sampled. ``prompt`` and ``generated`` are the tokens
    before it, wanted only if ``sampling.needs_history``.
    """

    sampling: Sampling
    position: int
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()


class _Edits:
    """Entries (row, token) to change, each with a number; ids beyond the vocabulary don't count."""

    __slots__ = ("_numbers", "_rows", "_tokens", "_vocabulary")

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._rows: list[int] = []
        self._tokens: list[int] = []
        self._numbers: list[float] = []

    def add(self, row: int, numbers: Mapping[int, float]) -> None:
        known = {token: number for token, number in numbers.items() if token < self._vocabulary}
        self._rows.extend([row] * len(known))
        self._tokens.extend(known)
        self._numbers.extend(known.values())

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
        if not self._rows:
            return None
        numbers = torch.tensor(self._numbers, dtype=torch.float32)
        return (
            torch.tensor(self._rows).to(device),
            torch.tensor(self._tokens).to(device),
            numbers.to(device),
        )


def penalize(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Logits ``[n, V]`` with penalties and biases; the same tensor if there are none.

    Token ids beyond the vocabulary are passed over.
    """
    factors, amounts = _Edits(logits.shape[1]), _Edits(logits.shape[1])
    for index, row in enumerate(rows):
        _collect(index, row, factors, amounts)
    scale, shift = factors.tensors(logits.device), amounts.tensors(logits.device)
    if scale is None and shift is None:
        return logits
    changed = logits.clone()
    if scale is not None:
        where, tokens, factor = scale
        values = changed[where, tokens]
        changed[where, tokens] = torch.where(values < 0, values * factor, values / factor)
    if shift is not None:
        where, tokens, amount = shift
        changed.index_put_((where, tokens), amount, accumulate=True)
    return changed


def _collect(index: int, row: SampleRow, factors: _Edits, amounts: _Edits) -> None:
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:
        seen = {*row.prompt, *row.generated}
        factors.add(index, dict.fromkeys(seen, sampling.repetition_penalty))
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if presence != 0.0 or frequency != 0.0:
        counts = Counter(row.generated)
        amounts.add(index, {token: -presence - frequency * n for token, n in counts.items()})
    if sampling.logit_bias:
        amounts.add(index, dict(sampling.logit_bias))
