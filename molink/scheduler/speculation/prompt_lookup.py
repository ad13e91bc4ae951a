"""Prompt lookup: drafts from earlier occurrences of the last tokens.

Answers that quote, edit or summarize their prompt repeat parts of it (the n-gram drafts of Saxena's
"Prompt Lookup Decoding", and of vLLM). It needs no model.
"""

from collections.abc import Sequence
from itertools import takewhile

from molink.facts.images import FIRST_IMAGE_ID
from molink.scheduler.speculation.base import DraftProposal
from molink.scheduler.speculation.occurrences import MAX_NGRAM, Occurrences, match_length

#: Maximum tokens indexed per call, so that a long prompt is indexed over several steps.
_INDEX_STEP = 2048


class PromptLookup:
    """Searches the prompt and answer of one request with an incremental index."""

    __slots__ = ("_last", "_max_ngram", "_pairs")

    def __init__(self, longest: int = MAX_NGRAM) -> None:
        self._max_ngram = longest
        #: The position after the latest occurrence of each token.
        self._last: dict[int, int] = {}
        self._pairs = Occurrences()

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        """Propose the tokens after the longest match, the latest of several."""
        self._index_tokens(tokens)
        best, most = self._last.get(tokens[-1], 0), 1
        for position in self._pairs.iterate_positions(tuple(tokens[-2:])):
            if most >= self._max_ngram:
                break
            length = match_length(tokens, position, tokens, 2, self._max_ngram)
            if length > most:
                best, most = position, length
        if not best:
            return DraftProposal()
        found = takewhile(lambda token: token < FIRST_IMAGE_ID, tokens[best : best + count])
        return DraftProposal([*found], most)

    def _index_tokens(self, tokens: Sequence[int]) -> None:
        first = len(self._pairs)
        for position in range(first, min(len(tokens), first + _INDEX_STEP)):
            if position:
                self._last[tokens[position - 1]] = position
            pair = (tokens[position - 2], tokens[position - 1]) if position > 1 else None
            self._pairs.add_position(pair)
