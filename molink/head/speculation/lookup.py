"""Prompt lookup: what followed the last tokens where they came before.

Answers that quote, edit or summarize have much of their prompt in them, and go on there as it does
(the n-gram drafts of Saxena's "Prompt Lookup Decoding", and of vLLM). It costs no model.
"""

from array import array
from collections.abc import Sequence

#: How many of the last tokens are looked for: the most of them that came before, but so many.
LONGEST, SHORTEST = 4, 2
#: Places that are compared, the latest first.
_PLACES = 64
#: Tokens that are taken into the index at a time: a long prompt is read in the course of steps.
_READ = 2048


class PromptLookup:
    """Looks in the prompt and answer of one request, by an index that grows with them."""

    __slots__ = ("_before", "_latest", "_longest", "_shortest")

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self._longest, self._shortest = longest, shortest
        #: After which position the ``shortest`` tokens last came; something follows them there.
        self._latest: dict[tuple[int, ...], int] = {}
        #: For each position that was read: where the same tokens came before; 0 if nowhere.
        self._before = array("q", [0] * shortest)

    def draft(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Up to ``count`` tokens that followed the latest place of the most of the last tokens."""
        self._read(tokens)
        end = len(tokens)
        place = self._latest.get(tuple(tokens[end - self._shortest :]), 0)
        best, most, left = 0, 0, _PLACES
        while place and left and most < self._longest:
            alike = self._alike(tokens, place)
            if alike > most:
                best, most = place, alike
            place, left = self._before[place], left - 1
        return tokens[best : best + count] if best else ()

    def _alike(self, tokens: Sequence[int], place: int) -> int:
        """How many tokens before ``place`` are the last ones."""
        alike, end = self._shortest, len(tokens)
        while alike < min(self._longest, place) and (
            tokens[place - alike - 1] == tokens[end - alike - 1]
        ):
            alike += 1
        return alike

    def _read(self, tokens: Sequence[int]) -> None:
        first = len(self._before)
        for place in range(first, min(len(tokens), first + _READ)):
            key = tuple(tokens[place - self._shortest : place])
            self._before.append(self._latest.get(key, 0))
            self._latest[key] = place
