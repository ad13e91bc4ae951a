"""Which requests wait for what a draft model guesses, and for how many tokens.

A model of the same vocabulary, small enough to be whole on the first stage's device, guesses what
n-grams don't find. That takes time in which its request waits: it is asked if the tokens that it
may bring are worth more than that and than their rows. Its own chances say when to stop.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from molink.facts.drafts import DraftAsk, DraftModelFacts, DraftOrder, Guess, Guesses
from molink.scheduler.job import Job
from molink.scheduler.speculation.costs import RingLoad, TurnCosts
from molink.scheduler.speculation.drafting import Drafting
from molink.scheduler.speculation.record import GuessRecord, Yield

#: What guesses promise is divided by this: profiles and chances are estimates.
MARGIN = 1.2
#: And what an ask promises, by this: others wait for it too, and it is tried before it is known.
_MARGIN_OF_ASKS = 1.8
#: Tokens that it guesses at most.
MOST_GUESSED = 8
#: Tokens that it has not been told yet for which a request waits. More it takes in beside, so many
#: at a time: steps of the stage wait for them.
_SOON, _AT_ONCE = 32, 512
#: What it costs to have it read a prompt has to be saved within so many tokens.
_PAID_BACK = 64
#: Asks before more than one request of a volume is asked for.
_TRIED = 8
#: Passes for an ask, as long as nothing is known of them.
_USUAL_PASSES = 3.0
#: Weight of the last answer in how much longer they take than the profile says, and passes; how
#: many times as long as those before it counts at most, as it may have stalled once; and how far
#: that is forgotten with each volume that asks nothing.
_SMOOTHING, _SLOWER, _EASING = 0.2, 4.0, 0.002
#: At least so many of the guesses that are to be right are held to be.
_LEAST_SUCCESS = 0.01


@dataclass(slots=True, eq=False)
class _Told:
    """What the model knows of a request, by its number there: its first ``tokens`` tokens.

    ``is_asked``: it hasn't answered yet.
    """

    number: int
    drafting: Drafting
    tokens: int = 0
    is_asked: bool = False


class GuessRequests:
    """What the requests of one head ask of its draft model; without a ``model`` nothing.

    ``fixed`` tokens are asked for in any case, if that isn't 0.
    """

    def __init__(self, model: DraftModelFacts | None, costs: TurnCosts, fixed: int) -> None:
        self._model = model
        self._costs = costs
        self._fixed = fixed
        self._numbers = count()
        self._told: dict[Job, _Told] = {}
        self._of: dict[int, _Told] = {}
        self._asks: list[DraftAsk] = []
        self._over: list[int] = []
        #: Whose rows wait for what is to be asked next, and for each order that isn't answered.
        self._holding: list[Job] = []
        self._orders: deque[tuple[DraftOrder, Sequence[Job]]] = deque()
        self._waiting: set[Job] = set()
        #: How many times as long as the profile says the model takes, and how many passes.
        self._pace, self._passes = 1.0, _USUAL_PASSES
        #: How all that it has guessed has done, and what it brought.
        self.record, self.paid = GuessRecord(), Yield()
        #: Tokens that it has guessed, and seconds that it took.
        self.guessed = 0
        self.seconds = 0.0

    @property
    def is_on(self) -> bool:
        """Whether there is a model to ask."""
        return self._model is not None

    def waits(self, job: Job) -> bool:
        """Whether the next row of a request waits for guesses, its own or beside which it goes."""
        return job in self._waiting

    def consult(self, jobs: Sequence[tuple[Job, Drafting, int]], load: RingLoad) -> None:
        """Ask what may follow the tokens of ``jobs`` that can go on, where that is worth it.

        They are a volume, which isn't torn apart: all wait if one does. With each comes how many
        drafts it may have.
        """
        model = self._model
        if model is None or load.prefilling:
            return
        able = [each for each in jobs if self._may_ask(*each, model)]
        before = len(self._asks)
        if self._fixed:
            for job, drafting, room in able:
                self._ask(job, drafting, min(self._fixed, room), 0.0)
        else:
            self._ask_if_worth_it(able, load, model)
        if any(ask.wanted for ask in self._asks[before:]):
            self._holding += [job for job, *_ in jobs]
            self._waiting.update(job for job, *_ in jobs)

    def _ask_if_worth_it(
        self, able: Sequence[tuple[Job, Drafting, int]], load: RingLoad, model: DraftModelFacts
    ) -> None:
        able = sorted(able, key=lambda each: -each[1].paid.tokens)
        if self.paid.known < _TRIED:
            able = able[:1]
        asked, saved = self._best([drafting.paid for _, drafting, _ in able], load)
        least = self._least(asked, load)
        if not asked:  # what was slow once is tried again later
            self._pace += _EASING * (1.0 - self._pace)
        for job, drafting, room in able[:asked]:
            behind = len(job.tokens) - self._known(job)
            if behind <= _SOON:
                # By what the model says, of which so much is true.
                said = least / max(_LEAST_SUCCESS, drafting.guesses.success)
                self._ask(job, drafting, min(MOST_GUESSED, room), min(1.0, said))
            elif model.profile.prefill_s(behind) * self._pace <= _PAID_BACK * saved:
                self._ask(job, drafting, 0, 0.0)

    def take(self) -> DraftOrder | None:
        """What is to be asked now."""
        if not self._asks and not self._over:
            return None
        order = DraftOrder(tuple(self._asks), tuple(self._over))
        self._orders.append((order, self._holding))
        self._asks, self._over, self._holding = [], [], []
        return order

    def answered(self, found: Guesses) -> None:
        """The model has answered an order."""
        self.seconds += found.seconds
        (asks, _), held = self._orders.popleft()
        self._waiting.difference_update(held)
        guesses = {guess.request: guess for guess in found.guesses}
        for ask in asks:
            guess = guesses.get(ask.request, Guess(ask.request))
            self.guessed += len(guess.tokens)
            told = self._of.get(ask.request)
            if told is not None:
                if ask.wanted:
                    told.drafting.guessed(told.tokens, guess)
                told.is_asked = False
        if found.failed:
            self._model = None
            self._told, self._of, self._asks = {}, {}, []
            self._waiting.clear()
        else:
            self._learn_pace(asks, found)

    def over(self, job: Job) -> None:
        """A request has ended."""
        told = self._told.pop(job, None)
        if told is not None:
            del self._of[told.number]
            self._over.append(told.number)
            self._asks = [ask for ask in self._asks if ask.request != told.number]

    # --- whom ----------------------------------------------------------------------------------

    def _may_ask(self, job: Job, drafting: Drafting, room: int, model: DraftModelFacts) -> bool:
        """Whether the model could tell something of a request that nobody has told yet.

        Not where n-grams, or a grammar, say what is as likely.
        """
        told, first = self._told.get(job), len(job.tokens)
        if room < 1 or first + MOST_GUESSED > model.context:
            return False
        if (told is not None and told.is_asked) or drafting.guess_at == first:
            return False
        return not drafting.is_forced(first) and drafting.looked_up(job.tokens) < _usual(drafting)

    def _known(self, job: Job) -> int:
        told = self._told.get(job)
        return 0 if told is None else told.tokens

    def _ask(self, job: Job, drafting: Drafting, wanted: int, least: float) -> None:
        """Ask for ``wanted`` tokens, or, if that is 0, tell more of those that there are."""
        told = self._told.get(job)
        if told is None:
            told = self._told[job] = _Told(next(self._numbers), drafting)
            self._of[told.number] = told
        upto = len(job.tokens) if wanted else min(len(job.tokens), told.tokens + _AT_ONCE)
        tokens = tuple(job.tokens[told.tokens : upto])
        self._asks.append(DraftAsk(told.number, told.tokens, tokens, wanted, least))
        told.tokens, told.is_asked = upto, True

    # --- what it costs, and brings -------------------------------------------------------------

    def _learn_pace(self, asks: Sequence[DraftAsk], found: Guesses) -> None:
        """How long an order took tells how long the next ones will."""
        model, new = self._model, sum(len(ask.tokens) for ask in asks)
        if model is None or not asks:
            return
        asked = sum(ask.wanted > 0 for ask in asks)
        passes = max((len(guess.tokens) for guess in found.guesses), default=0)
        first = self._pass_s(new, 0) if new <= 2 * asked else model.profile.prefill_s(new)
        predicted = first + max(0, passes - 1) * self._pass_s(asked, 0)
        if predicted:
            pace = min(found.seconds / predicted, _SLOWER * self._pace)
            self._pace += _SMOOTHING * (pace - self._pace)
        if asked:
            self._passes += _SMOOTHING * (passes - self._passes)

    def _pass_s(self, rows: int, context: int) -> float:
        """Seconds of a pass of the model, by its profile."""
        return 0.0 if self._model is None else self._model.profile.decode_s(rows, context)

    def _least(self, asked: int, load: RingLoad) -> float:
        """At which chance one guess more, and its row, pay; where so many requests have one."""
        before = self._costs.turn_s(0, load)
        if not before or not asked:
            return math.inf
        after = self._costs.turn_s(asked, load, self._pace * self._pass_s(asked, load.context))
        return MARGIN * load.rows * (after / before - 1) / asked

    def _best(self, paid: Sequence[Yield], load: RingLoad) -> tuple[int, float]:
        """Of how many of these requests, the best ones first, it pays most to ask for.

        And the seconds that a token of a stream takes less then.
        """
        before = self._costs.turn_s(0, load)
        best, most, rows, tokens = 0, before, 0.0, float(load.rows)
        if not before:
            return 0, 0.0
        for asked, each in enumerate(paid, 1):
            tokens += each.tokens / _MARGIN_OF_ASKS
            rows += each.rows
            guessing = self._passes * self._pace * self._pass_s(asked, load.context)
            turn = self._costs.turn_s(round(rows), load, guessing) * load.rows / tokens
            if turn < most:
                best, most = asked, turn
        return best, before - most


def _usual(drafting: Drafting) -> float:
    """The chance of a guess of which nothing is known yet, if all of an ask are as likely."""
    return drafting.paid.tokens / (1.0 + drafting.paid.tokens)
