"""The tokens of one request so far, in the form that penalties are computed from."""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_FIRST_CAPACITY = 64


class TokenHistory:
    """Each token that a request has, once, and how often its answer has it.

    It is kept from step to step, so that a step costs as much as the request has different tokens,
    and nothing is counted twice. Ids below 0 are in no vocabulary and are passed over.
    """

    def __init__(self, prompt: Iterable[int] = (), generated: Iterable[int] = ()) -> None:
        self._indices: dict[int, int] = {}  #: where each token is in the tensors
        self._ids = torch.empty(0, dtype=torch.int64)
        self._times = torch.empty(0)
        self._max_id = -1
        self.add_prompt(prompt)
        self.add_generated(generated)

    def add_prompt(self, tokens: Iterable[int]) -> None:
        """Learn tokens that were given."""
        self._add_tokens(dict.fromkeys(tokens, 0))

    def add_generated(self, tokens: Iterable[int]) -> None:
        """Learn tokens of the answer."""
        counts = {token: n for token, n in Counter(tokens).items() if token >= 0}
        if not counts:
            return
        self._add_tokens(counts)
        places = torch.tensor([self._indices[token] for token in counts])
        self._times[places] += torch.tensor(list(counts.values()), dtype=torch.float32)

    def with_token(self, token: int) -> "TokenHistory":
        """Another one, whose answer has ``token`` once more."""
        other = TokenHistory()
        other._indices, other._max_id = dict(self._indices), self._max_id
        other._ids, other._times = self._ids.clone(), self._times.clone()
        other.add_generated((token,))
        return other

    @property
    def token_counts(self) -> dict[int, int]:
        """How often the answer has each token of the request: 0 if only its prompt has it."""
        return {token: int(self._times[place]) for token, place in self._indices.items()}

    def token_entries(self, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Tokens below ``vocabulary`` (int64 ``[m]``, each once) and their counts (float32)."""
        count = len(self._indices)
        ids, times = self._ids[:count], self._times[:count]
        if self._max_id < vocabulary:
            return ids, times
        known = ids < vocabulary
        return ids[known], times[known]

    def _add_tokens(self, tokens: Mapping[int, int]) -> None:
        """Give every new token its place, with a count of 0."""
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
