"""Prompt lookup: drafts from earlier occurrences of the last tokens.

Answers that quote, edit or summarize repeat parts of their prompt (the n-gram drafts of Saxena's
"Prompt Lookup Decoding", and of vLLM). It needs no model.
"""

from array import array
from collections.abc import Sequence

from molink.scheduler.speculation.base import DraftProposal

#: Maximum number of last tokens to match.
MAX_NGRAM = 4
#: Occurrences that are compared, the latest first.
_MAX_MATCHES = 64
#: Tokens indexed per call, so that a long prompt is indexed over several steps.
_INDEX_STEP = 2048


class PromptLookup:
    """Searches the prompt and answer of one request by an incremental index."""

    __slots__ = ("_last", "_latest", "_max_ngram", "_previous")

    def __init__(self, longest: int = MAX_NGRAM) -> None:
        self._max_ngram = longest
        #: Positions after the latest occurrence of each token, and of each pair.
        self._last: dict[int, int] = {}
        self._latest: dict[tuple[int, int], int] = {}
        #: For each indexed position, the previous occurrence of its pair; 0 if none.
        self._previous = array("q", [0])

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        """Propose the tokens after the latest of the longest matches."""
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
        """How many tokens before ``place`` match the last ones."""
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
