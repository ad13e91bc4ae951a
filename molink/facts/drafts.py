"""How many tokens of a request are guessed ahead and verified in one pass, and by a draft model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from molink.facts.profile import Profile

#: Most of them: they travel in the headers of volumes.
MAX_DRAFTS = 15
#: Passes of nothing but drafts that may be in flight, ahead of the tokens that they assume.
MAX_LOOKAHEAD = 16
#: As many as pay.
AUTO_DRAFTS = -1


@dataclass(frozen=True, slots=True)
class DraftModelFacts:
    """A draft model beside a head: how long its passes take, and the longest request it can take.

    ``max_model_len`` is in tokens; the profile is that of a stage of all its layers.
    """

    profile: Profile
    max_model_len: int


class DraftRequest(NamedTuple):
    """What a draft model is asked of a request.

    It was told the tokens before position ``position``; ``tokens`` come from there on, whatever it
    has guessed. It is to guess up to ``max_drafts`` more (0: only to take these in), as long as the
    chance that all of them are right is at least ``min_probability``.
    """

    request: int
    position: int
    tokens: Sequence[int]
    max_drafts: int = 0
    min_probability: float = 0.0


class DraftBatch(NamedTuple):
    """What a draft model is to do at once, and requests that it is to forget before."""

    requests: Sequence[DraftRequest] = ()
    finished: Sequence[int] = ()


class DraftTokens(NamedTuple):
    """Tokens that follow those of an ask, and the chance of each if those before it are right."""

    request: int
    tokens: Sequence[int] = ()
    probabilities: Sequence[float] = ()


class DraftResults(NamedTuple):
    """Answers to the asks of an order, each to one, and how long they took.

    ``failed``: the model can't go on.
    """

    drafts: Sequence[DraftTokens] = ()
    seconds: float = 0.0
    failed: bool = False
