"""How many tokens of a request are guessed ahead and verified in one pass, and by a draft model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from molink.facts.profile import Profile

#: Most of them: they travel in the headers of volumes.
MAX_DRAFTS = 15
#: Passes of nothing but drafts that may be in flight, ahead of the tokens that they assume.
MAX_AHEAD = 16
#: As many as pay.
AUTO_DRAFTS = -1


@dataclass(frozen=True, slots=True)
class DraftModelFacts:
    """A draft model beside a head: how long its passes take, and the longest request it can take.

    ``context`` is in tokens; the profile is that of a stage of all its layers.
    """

    profile: Profile
    context: int


class DraftAsk(NamedTuple):
    """What a draft model is asked of a request.

    It was told the tokens before position ``known``; ``tokens`` come from there on, whatever it has
    guessed. It is to guess up to ``wanted`` more (0: only to take these in), as long as the chance
    that all of them are right is at least ``least``.
    """

    request: int
    known: int
    tokens: Sequence[int]
    wanted: int = 0
    least: float = 0.0


class DraftOrder(NamedTuple):
    """What a draft model is to do at once, and requests that it is to forget before."""

    asks: Sequence[DraftAsk] = ()
    over: Sequence[int] = ()


class Guess(NamedTuple):
    """Tokens that follow those of an ask, and the chance of each if those before it are right."""

    request: int
    tokens: Sequence[int] = ()
    chances: Sequence[float] = ()


class Guesses(NamedTuple):
    """Answers to the asks of an order, each to one, and how long they took.

    ``failed``: the model can't go on.
    """

    guesses: Sequence[Guess] = ()
    seconds: float = 0.0
    failed: bool = False
