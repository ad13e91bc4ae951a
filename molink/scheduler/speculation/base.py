"""The interface of draft sources."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class DraftProposal(NamedTuple):
    """Proposed tokens, and the ``evidence``: how many of the last tokens match.

    Those of earlier answers come with the ``first_probability``, which is that of the first token;
    0 if only the evidence tells.
    """

    tokens: Sequence[int] = ()
    evidence: int = 1
    first_probability: float = 0.0


class DraftSource(Protocol):
    """Proposes drafts for one request; it may keep what it has learned of its tokens."""

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        """Propose up to ``count`` tokens after ``tokens``, the prompt and answer so far; none if
        unknown.

        ``tokens`` extends those of earlier calls.
        """
        ...
