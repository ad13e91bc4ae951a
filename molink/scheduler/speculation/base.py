"""The interface of draft sources."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class DraftProposal(NamedTuple):
    """Proposed tokens, and the ``evidence``: how many of the last tokens match."""

    tokens: Sequence[int] = ()
    evidence: int = 1


class DraftSource(Protocol):
    """Proposes drafts for one request; it may keep what it has learned of its tokens."""

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        """Propose up to ``count`` tokens after ``tokens``, the prompt and answer so far; none if
        unknown.

        ``tokens`` extends those of earlier calls.
        """
        ...
