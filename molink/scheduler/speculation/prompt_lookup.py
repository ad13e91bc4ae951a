"""Prompt lookup: what followed the last tokens where they came before.

Answers that quote, edit or summarize have much of their prompt in them, and go on there as it does
(the n-gram drafts of Saxena's "Prompt Lookup Decoding", and of vLLM). It costs no model.
"""

from array import array
from collections.abc import Sequence

from molink.scheduler.speculation.base import DraftProposal

#: How many of the last tokens are looked for: the most of them that came before.
MAX_NGRAM = 4
#: Places that are compared, the latest first.
_MAX_MATCHES = 64
#: Tokens that are taken into the index at a time: a long prompt is read in the course of steps.
_INDEX_STEP = 2048


class PromptLookup:
    """Looks in the prompt and answer of one request, by an index that grows with them."""

    __slots__ = ("_last", "_latest", "_max_ngram", "_previous")

    def __init__(self, longest: int = MAX_NGRAM) -> None:
        self._max_ngram = longest
        #: After which position a token, and two tokens, last came; something follows them there.
        self._last: dict[int, int] = {}
        self._latest: dict[tuple[int, int], int] = {}
        #: For each position that was read: where the same two tokens came before; 0 if nowhere.
        self._previous = array("q", [0])

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        """Up to ``count`` tokens that followed the latest place of the most of the last tokens."""
        self._index_tokens(tokens)
        best, most, left = self._last.get(tokens[-1], 0), 1, _MAX_MATCHES
        place = self._latest.get((tokens[-2], tokens[-1]), 0) if len(tokens) > 1 else 0
        while place and left and most < self._max_ngram:
            alike = self._match_length(tokens, place)
            if alike > most:
                best, most = place, alike
            place, left = self._previous[place], left - 1
        return DraftProposal(tokens[best : best + count], most) if best else DraftProposal()

    def _match_length(self, tokens: Sequence[int], place: int) -> int:
        """How many tokens before ``place`` are the last ones."""
        alike, end = 2, len(tokens)
        while alike < min(self._max_ngram, place) and (
            tokens[place - alike - 1] == tokens[end - alike - 1]
        ):
            alike += 1
        return alike

    def _index_tokens(self, tokens: Sequence[int]) -> None:
        first = len(self._previous)
        for place in range(first, min(len(tokens), first + _INDEX_STEP)):
            self._last[tokens[place - 1]] = place
            if place > 1:
                key = tokens[place - 2], tokens[place - 1]
                self._previous.append(self._latest.get(key, 0))
                self._latest[key] = place
            else:
                self._previous.append(0)
