"""A request's tokens in the form that penalties need."""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_FIRST_CAPACITY = 64


class TokenHistory:
    """Distinct tokens of a request, and how often each occurs in its output.

    It is updated incrementally. Negative ids are ignored.
    """

    def __init__(self, prompt: Iterable[int] = (), generated: Iterable[int] = ()) -> None:
        self._indices: dict[int, int] = {}  #: index of each token in the tensors
        self._ids = torch.empty(0, dtype=torch.int64)
        self._times = torch.empty(0)
        self._max_id = -1
        self.add_prompt(prompt)
        self.add_generated(generated)

    def add_prompt(self, tokens: Iterable[int]) -> None:
        """Add prompt tokens."""
        self._add_tokens(dict.fromkeys(tokens, 0))

    def add_generated(self, tokens: Iterable[int]) -> None:
        """Add output tokens."""
        counts = {token: n for token, n in Counter(tokens).items() if token >= 0}
        if not counts:
            return
        self._add_tokens(counts)
        places = torch.tensor([self._indices[token] for token in counts])
        self._times[places] += torch.tensor(list(counts.values()), dtype=torch.float32)

    def with_token(self, token: int) -> "TokenHistory":
        """Return a copy with one more output ``token``."""
        other = TokenHistory()
        other._indices, other._max_id = dict(self._indices), self._max_id
        other._ids, other._times = self._ids.clone(), self._times.clone()
        other.add_generated((token,))
        return other

    @property
    def token_counts(self) -> dict[int, int]:
        """Output count of each token; 0 for tokens only in the prompt."""
        return {token: int(self._times[place]) for token, place in self._indices.items()}

    def token_entries(self, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Return distinct tokens below ``vocabulary`` (int64 ``[m]``) and float32 counts."""
        count = len(self._indices)
        ids, times = self._ids[:count], self._times[:count]
        if self._max_id < vocabulary:
            return ids, times
        known = ids < vocabulary
        return ids[known], times[known]

    def _add_tokens(self, tokens: Mapping[int, int]) -> None:
        """Add new tokens with a count of 0."""
        new = [token for token in tokens if token >= 0 and token not in self._indices]
        if not new:
            return
        begin = len(self._indices)
        self._indices.update(zip(new, range(begin, begin + len(new)), strict=True))
        self._reserve_capacity(len(self._indices))
        self._ids[begin : len(self._indices)] = torch.tensor(new)
        self._max_id = max(self._max_id, *new)

    def _reserve_capacity(self, count: int) -> None:
        if count <= len(self._ids):
            return
        more = max(count, 2 * len(self._ids), _FIRST_CAPACITY) - len(self._ids)
        self._ids = torch.cat([self._ids, self._ids.new_zeros(more)])
        self._times = torch.cat([self._times, self._times.new_zeros(more)])
