"""Prompt lookup: drafts from earlier occurrences of the last tokens.

Answers that quote, edit or summarize repeat parts of their prompt (the n-gram drafts of Saxena's
"Prompt Lookup Decoding", and of vLLM). It needs no model.
"""

from array import array
from collections.abc import Sequence
from itertools import takewhile

from molink.facts.images import FIRST_IMAGE_ID
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
        position = self._latest.get((tokens[-2], tokens[-1]), 0) if len(tokens) > 1 else 0
        while position and left and most < self._max_ngram:
            length = self._match_length(tokens, position)
            if length > most:
                best, most = position, length
            position, left = self._previous[position], left - 1
        if not best:
            return DraftProposal()
        found = takewhile(lambda token: token < FIRST_IMAGE_ID, tokens[best : best + count])
        return DraftProposal([*found], most)

    def _match_length(self, tokens: Sequence[int], position: int) -> int:
        """How many tokens before ``position`` match the last ones."""
        length, end = 2, len(tokens)
        while length < min(self._max_ngram, position) and (
            tokens[position - length - 1] == tokens[end - length - 1]
        ):
            length += 1
        return length

    def _index_tokens(self, tokens: Sequence[int]) -> None:
        first = len(self._previous)
        for position in range(first, min(len(tokens), first + _INDEX_STEP)):
            self._last[tokens[position - 1]] = position
            if position > 1:
                key = tokens[position - 2], tokens[position - 1]
                self._previous.append(self._latest.get(key, 0))
                self._latest[key] = position
            else:
                self._previous.append(0)
