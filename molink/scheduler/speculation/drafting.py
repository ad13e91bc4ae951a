"""How often the drafts of one request are right."""

from bisect import bisect_right
from collections.abc import Sequence

from molink.facts.drafts import MAX_DRAFTS, Guess
from molink.scheduler.speculation.base import DraftSource, Foretold
from molink.scheduler.speculation.record import GuessRecord, Yield

#: From so many tokens on that agree, the last drafts that were right included, a class of its own.
CLASSES = (1, 2, 3, 4, 6, 9)
#: Of a request that has had no drafts: the chance that one is right, by class. So it was with the
#: texts of ``docs/results/lookup.json``, rounded down.
PRIORS = (0.2, 0.45, 0.65, 0.7, 0.85, 0.95)
#: Weight of the last forced tokens in the trust in them.
_SMOOTHING = 0.15


class Drafting:
    """A request's drafts, and the chance that one is right if those before it are.

    They come from ``source``, or a draft model has ``guessed`` them. The chance is what can be
    expected, by the tokens that agree or as the model says, and how such drafts have done so far.
    ``trust`` is that chance of tokens that the last stage says are forced.
    """

    __slots__ = (
        "_begin",
        "_forced",
        "_forced_at",
        "_foretold",
        "_guess",
        "_record",
        "_sure",
        "guess_at",
        "guesses",
        "paid",
        "source",
        "trust",
    )

    def __init__(
        self, source: DraftSource, guesses: GuessRecord | None = None, paid: Yield | None = None
    ) -> None:
        """``guesses`` is how those of a draft model have done so far, ``paid`` what they bring."""
        self.source = source
        self.trust = 1.0
        self._record = GuessRecord()
        self.guesses = guesses or GuessRecord()
        self.paid = paid or Yield()
        #: What was foretold last, and the position of its first token.
        self._foretold: Foretold | Guess = Foretold()
        self._begin = 0
        #: Those before this position are forced.
        self._sure = 0
        self._forced: Sequence[int] = ()
        self._forced_at = -1
        #: What the draft model says, and from which position on.
        self._guess = Guess(-1)
        self.guess_at = -1

    def offered(self, position: int, tokens: Sequence[int]) -> None:
        """The last stage says that ``tokens`` have to come from ``position`` on."""
        self._forced_at, self._forced = position, tokens

    def guessed(self, position: int, guess: Guess) -> None:
        """A draft model says what may come from ``position`` on."""
        self.guess_at, self._guess = position, guess

    def is_forced(self, position: int) -> bool:
        """Whether the last stage says what has to come at ``position``."""
        return position == self._forced_at and len(self._forced) > 0

    def draft(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Up to ``count`` tokens that may follow ``tokens``."""
        self._begin, self._sure = len(tokens), 0
        if self.is_forced(self._begin):
            self._foretold = Foretold(self._forced[:count])
            self._sure = self._begin + len(self._forced)
        else:
            self._foretold = found = self.source.draft(tokens, count)
            if self.guess_at == self._begin and self._worth(self._guess) > self._worth(found):
                self._foretold = self._guess
        return self._foretold.tokens[:count]

    def rest(self, tokens: Sequence[int], path: Sequence[int], count: int) -> Sequence[int]:
        """Up to ``count`` tokens that may follow ``tokens`` and the drafts of ``path``.

        If what was foretold last is used up, it looks whether more is foretold now.
        """
        told = self._foretold
        rest = told.tokens[len(tokens) + len(path) - self._begin :]
        if not rest and told.tokens and isinstance(told, Foretold) and len(tokens) > self._begin:
            longer = self.draft(tokens, len(path) + count)
            if list(longer[: len(path)]) != path:
                self._foretold = Foretold()
            rest = self._foretold.tokens[len(path) :]
        return rest[:count]

    def chance(self, position: int) -> float:
        """That of the draft at ``position``, if those before it are right."""
        if position < self._sure:
            return self.trust
        return self._chance(self._foretold, position - self._begin)

    def looked_up(self, tokens: Sequence[int]) -> float:
        """The chance of the first token that ``source`` foretells; 0 if it foretells none."""
        found = self.source.draft(tokens, 1)
        return self._chance(found, 0) if found.tokens else 0.0

    @property
    def is_proven(self) -> bool:
        """Whether its drafts were right more often than one could expect."""
        return self._record.success > 1.0

    @property
    def best(self) -> float:
        """The chance of a draft at best; of one that is neither forced nor guessed by a model."""
        return self._record.chance(PRIORS[-1])

    def verified(self, position: int, drafts: int, right: int) -> None:
        """Of ``drafts`` from ``position`` on the first ``right`` were; what follows a wrong one
        tells nothing."""
        sure = max(0, min(drafts, self._sure - position))
        if sure:
            self.trust += _SMOOTHING * ((right >= sure) - self.trust)
        for at in range(position + sure, position + right):
            self._learn(at, right=True)
        if right < drafts:
            if right >= sure:
                self._learn(position + right, right=False)
            self._foretold = Foretold()

    def rested(self) -> None:
        """A pass went without drafts."""
        self._record.rested()
        self.guesses.rested()

    def went(self, position: int, rows: int) -> None:
        """A pass from ``position`` on has ``rows`` drafts."""
        if self.guess_at == position:
            guessed = rows if self._foretold is self._guess else 0
            self.paid.learn(self._worth(self._guess, guessed), guessed)
        else:
            self.paid.rested()

    def _chance(self, told: Foretold | Guess, index: int) -> float:
        return self._record_of(told).chance(_expected(told, index))

    def _record_of(self, told: Foretold | Guess) -> GuessRecord:
        return self.guesses if isinstance(told, Guess) else self._record

    def _worth(self, told: Foretold | Guess, most: int = MAX_DRAFTS) -> float:
        """How many tokens it is likely to bring in a pass that has up to so many of it."""
        tokens, chance = 0.0, 1.0
        for index in range(min(len(told.tokens), most)):
            chance *= self._chance(told, index)
            tokens += chance
        return tokens

    def _learn(self, position: int, *, right: bool) -> None:
        expected = _expected(self._foretold, position - self._begin)
        self._record_of(self._foretold).learn(expected, right=right)


def _expected(told: Foretold | Guess, index: int) -> float:
    """The chance of a token that was foretold, by itself."""
    if isinstance(told, Guess):
        return told.chances[min(index, len(told.chances) - 1)]
    return PRIORS[max(0, bisect_right(CLASSES, told.evidence + index) - 1)]
