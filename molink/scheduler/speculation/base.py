"""What guesses how a request goes on."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class DraftProposal(NamedTuple):
    """Tokens that may come next, and on what ``evidence``: so many of the last ones agree."""

    tokens: Sequence[int] = ()
    evidence: int = 1


class DraftSource(Protocol):
    """Guesses for one request; it may keep what it has learnt of its tokens."""

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        """Up to ``count`` tokens that may follow ``tokens``; none if it has no idea.

        ``tokens`` are the request's prompt and answer so far: what it was asked about before, and
        perhaps more.
        """
        ...
