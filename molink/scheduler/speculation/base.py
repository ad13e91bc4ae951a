"""The interface of draft sources."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class DraftProposal(NamedTuple):
    """Proposed tokens, and the ``evidence`` for them: how many of the last tokens match.

    ``first_probability`` is the first token's probability in earlier answers; 0 if it must be
    estimated by the evidence.
    """

    tokens: Sequence[int] = ()
    evidence: int = 1
    first_probability: float = 0.0


class DraftSource(Protocol):
    """Proposes drafts for one request; may keep state about the request's tokens."""

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        """Propose up to ``count`` tokens after ``tokens``, the prompt and answer so far.

        ``tokens`` extends the tokens of earlier calls. The result is empty if nothing can be
        proposed.
        """
        ...
