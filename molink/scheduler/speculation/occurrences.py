"""Finds where n-grams have occurred in a sequence of tokens."""

from array import array
from collections.abc import Hashable, Iterator, Sequence

#: Maximum number of last tokens that are matched.
MAX_NGRAM = 4
#: Maximum number of occurrences that are compared.
_MAX_MATCHES = 64


class Occurrences:
    """The positions of each n-gram of a growing sequence, for one ``n``.

    An n-gram's position is the one after its last token. Every position is added in order, from 0
    on, with a key that identifies the n-gram before it, or ``None``.
    """

    __slots__ = ("_latest", "_previous")

    def __init__(self) -> None:
        #: The latest position of each key.
        self._latest: dict[Hashable, int] = {}
        #: For each position, the previous position of the same key; 0 if there is none.
        self._previous = array("q")

    def __len__(self) -> int:
        return len(self._previous)

    def add_position(self, key: Hashable) -> None:
        """Add the next position with the key of its n-gram."""
        self._previous.append(self._latest.get(key, 0))
        if key is not None:
            self._latest[key] = len(self._previous) - 1

    def iterate_positions(self, key: Hashable) -> Iterator[int]:
        """Yield the latest positions of a key, the latest first."""
        position, left = self._latest.get(key, 0), _MAX_MATCHES
        while position and left:
            yield position
            position, left = self._previous[position], left - 1


def match_length(
    sequence: Sequence[int], position: int, tokens: Sequence[int], least: int, most: int
) -> int:
    """Return how many tokens before ``position`` match the last of ``tokens``, at most ``most``.

    ``least`` tokens are known to match.
    """
    length, end = least, len(tokens)
    while length < min(most, position, end) and (
        sequence[position - length - 1] == tokens[end - length - 1]
    ):
        length += 1
    return length
