"""Speculative decoding: bounds of drafts, and the interface to a draft model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from molink.facts.profile import Profile

#: Maximum drafts per slice; they travel in the headers of volumes.
MAX_DRAFTS = 15
#: Maximum volumes of lookahead drafts in flight.
MAX_LOOKAHEAD = 16
#: Setting: as many drafts as pay off.
AUTO_DRAFTS = -1


@dataclass(frozen=True, slots=True)
class DraftModelFacts:
    """A draft model that runs on the scheduler's PC.

    ``max_model_len`` is in tokens; ``profile`` holds the times of a stage with all its layers.
    """

    profile: Profile
    max_model_len: int


class DraftRequest(NamedTuple):
    """Asks a draft model for drafts of a request.

    The model already has the tokens before ``position``; ``tokens`` follow there and replace its
    own drafts. It drafts up to ``max_drafts`` more tokens (0: it only reads ``tokens``) while the
    probability that all are right is at least ``min_probability``.
    """

    request: int
    position: int
    tokens: Sequence[int]
    max_drafts: int = 0
    min_probability: float = 0.0


class DraftBatch(NamedTuple):
    """Requests to a draft model, and finished requests to drop before."""

    requests: Sequence[DraftRequest] = ()
    finished: Sequence[int] = ()


class DraftTokens(NamedTuple):
    """Drafts of a request, each with its probability if the previous ones are right."""

    request: int
    tokens: Sequence[int] = ()
    probabilities: Sequence[float] = ()


class DraftResults(NamedTuple):
    """Results of a batch, one per request, and the seconds it took.

    ``failed`` means that the model can't continue.
    """

    drafts: Sequence[DraftTokens] = ()
    seconds: float = 0.0
    failed: bool = False
