"""How many drafts the requests of a micro-batch get.

A draft is one row more in a decode volume. Drafts pay if the tokens that they may bring, by the
chance that each and those before it are right, are worth more than the time by which their rows
make the turn of the ring longer: what stages compute for them and links transfer
(:mod:`molink.facts.ringtimes`), for all tokens that the volume brings. Where a turn is mostly
latency rows cost next to nothing; where volumes are full of rows and stages compute all the time,
they cost their share, and none is drafted.

Tokens that a grammar forces are drafts that are sure to be right: their rows have to be computed
anyway, now or in a later pass.

A draft that doesn't fit into its pass, or isn't worth to make that pass longer, may go *ahead* in
one of its own, right behind it, where stages and links have time left.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from molink.facts.drafts import AUTO_DRAFTS, MAX_DRAFTS
from molink.facts.ringtimes import LinkFacts, RingTimes
from molink.scheduler.job import Job
from molink.scheduler.limits import HeadLimits
from molink.scheduler.speculation.asking import MARGIN, GuessRequests
from molink.scheduler.speculation.base import DraftSource
from molink.scheduler.speculation.costs import RingLoad, TurnCosts
from molink.scheduler.speculation.drafting import Drafting
from molink.scheduler.speculation.record import GuessRecord, Yield

#: Tokens that are foretold at once.
_FORETOLD = 128
#: Share of a turn in which decode volumes may keep the slowest stage or link busy, for rows to go
#: ahead.
_AHEAD_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class _Guess:
    """Tokens that may follow those of ``job``; ``chances`` of each if those before it are right.

    What is promised has to be ``margin`` times what it costs.
    """

    job: Job
    drafts: Sequence[int]
    chances: Sequence[float]
    margin: float = MARGIN


class Speculation:
    """Decides for one head, whose requests each have a :class:`Drafting`.

    As many drafts as ``limits.draft_tokens`` says, or as pay; ``source`` makes what guesses, and a
    draft model is asked beside it if ``limits`` has one.
    """

    def __init__(self, limits: HeadLimits, source: Callable[[], DraftSource]) -> None:
        self._limits = limits
        self._source = source
        self._auto = limits.draft_tokens == AUTO_DRAFTS
        links = (LinkFacts(),) * limits.stages
        self._costs = TurnCosts(RingTimes(limits.profiles, links, limits.row_bytes))
        fixed = 0 if self._auto else limits.draft_tokens
        model = limits.draft_model if limits.draft_tokens else None
        #: What the draft model is asked.
        self.asking = GuessRequests(model, self._costs, fixed)
        self.drafted = 0
        self.accepted = 0

    def set_times(self, times: RingTimes) -> None:
        """Stages have measured themselves or their links anew."""
        self._costs.set_times(times)

    def consult(self, jobs: Iterable[Job], load: RingLoad) -> None:
        """Ask the draft model what may follow the tokens of those that can go on."""
        each = [(job, self._drafting(job), _room(job)) for job in jobs]
        self.asking.consult(each, load.rounded)

    def drafts(
        self, jobs: Sequence[Job], load: RingLoad, room: int, flying: Sequence[int] = ()
    ) -> list[tuple[Job, Sequence[int]]]:
        """Drafts for those of a volume's ``jobs`` that get any; at most ``room`` in all.

        ``flying`` are the rows of each decode volume in flight.
        """
        if not self._limits.draft_tokens or not jobs:
            return []
        load = load.rounded
        least = self._least_chance(load) if self._auto else 0.0
        most = self._per_pass(load, flying)
        guesses = [
            guess for job in jobs if (guess := self._guess(job, least, most, load.prefilling))
        ]
        chosen = [
            (guess.job, guess.drafts[:count]) for guess, count in self._choose(guesses, load, room)
        ]
        drafted = {job.id: len(drafts) for job, drafts in chosen}
        for job in jobs:
            drafting = self._drafting(job)
            drafting.went(len(job.tokens), drafted.get(job.id, 0))
            if job.id not in drafted:
                drafting.rested()
        return chosen

    def ahead(
        self, jobs: Iterable[Job], load: RingLoad, flying: Sequence[int], room: int
    ) -> list[tuple[Job, Sequence[int]]]:
        """Drafts that go on from those of ``jobs`` in flight, in a volume of their own.

        ``flying`` are the rows of each decode volume in flight; ``room`` is for drafts in all.
        """
        load = load.rounded
        left = min(room, self._ahead_rows(load, flying))
        if left < 1:
            return []
        offers = [offer for job in jobs if (offer := self._offer(job)) is not None]
        offers.sort(key=lambda offer: -offer.chances[0])
        turn, chosen = self._costs.turn_s(0, load), list[tuple[Job, Sequence[int]]]()
        # Of those in a volume that comes behind one on a wrong path, on average.
        lost = self._costs.busy_s(left, load.context) / 2 * load.rows
        for offer in offers:
            chance = offer.chances[0]
            if left < 1 or (self._auto and chance * turn < (1 - chance) * lost):
                break
            chosen.append((offer.job, offer.drafts[:left]))
            left -= len(chosen[-1][1])
        return chosen

    def verified(self, job: Job, drafts: int, right: int) -> None:
        """Of the ``drafts`` of a job the first ``right`` were."""
        self.accepted += right
        self._drafting(job).verified(len(job.tokens), drafts, right)

    def offered(self, job: Job, tokens: Sequence[int]) -> None:
        """The last stage says that ``tokens`` have to follow those of ``job``."""
        self._drafting(job).offered(len(job.tokens), tokens)

    def _drafting(self, job: Job) -> Drafting:
        if job.drafting is None:
            asking = self.asking
            job.drafting = Drafting(self._source(), GuessRecord(asking.record), Yield(asking.paid))
        return job.drafting

    def _per_pass(self, load: RingLoad, flying: Sequence[int]) -> int:
        """Most drafts that follow a decode row.

        Half as many as go ahead, if two volumes can: those come hardly later, and don't make that
        row come later.
        """
        if not self._auto:
            return self._limits.draft_tokens
        if load.prefilling or not self._limits.ahead:
            return MAX_DRAFTS
        rows = self._ahead_rows(load, flying := (*flying, load.rows))
        again = rows and self._ahead_rows(load, (*flying, rows))
        return max(1, rows // 2) if again else MAX_DRAFTS

    def _guess(self, job: Job, least: float, per_pass: int, prefilling: bool) -> _Guess | None:
        """What may follow; ``None`` if nobody knows, or it is not to be tried at its chance."""
        drafting = self._drafting(job)
        first = len(job.tokens)
        is_forced = drafting.is_forced(first)
        is_told = is_forced or drafting.guess_at == first
        if self._auto and (least == math.inf if is_told else drafting.best <= least):
            return None
        most = min(_FORETOLD if self._limits.ahead else per_pass, _room(job))
        drafts = drafting.draft(job.tokens, most)[:per_pass] if most > 0 else ()
        if not drafts or not self._auto:
            return _Guess(job, drafts, [1.0] * len(drafts)) if drafts else None
        chances = [drafting.chance(first + at) for at in range(len(drafts))]
        if is_forced:
            return _Guess(job, drafts, chances, margin=1.0)
        if chances[0] <= least or (prefilling and not drafting.is_proven):
            return None
        return _Guess(job, drafts, chances)

    def _offer(self, job: Job) -> _Guess | None:
        """What may go on from its rows in flight, and the chance that these and the first of it
        are right."""
        drafting, room = job.drafting, _room(job)
        if drafting is None or room < 1:
            return None
        drafts = drafting.rest(job.tokens, job.path, min(_FORETOLD, room))[:MAX_DRAFTS]
        if not drafts:
            return None
        first = len(job.tokens)
        chances = (drafting.chance(first + at) for at in range(1 + len(job.path)))
        return _Guess(job, drafts, [math.prod(chances)])

    def _ahead_rows(self, load: RingLoad, flying: Sequence[int]) -> int:
        """Rows of a volume that goes ahead; 0 if there is no time for one."""
        if not self._auto:
            return self._limits.draft_tokens
        turn = self._costs.turn_s(0, load)
        if not turn:
            return 0
        rows = self._costs.keeping_pace(load.context)
        busy = sum(self._costs.busy_s(each, load.context) for each in (*flying, rows))
        return rows if busy <= _AHEAD_SHARE * turn else 0

    def _least_chance(self, load: RingLoad) -> float:
        """At which one draft pays, beside no chunk; no chance is enough if stages are unknown."""
        load = replace(load, prefilling=False)
        before, after = self._costs.turn_s(0, load), self._costs.turn_s(1, load)
        return MARGIN * load.rows * (after - before) / before if before else math.inf

    # --- how many ------------------------------------------------------------------------------

    def _choose(
        self, guesses: Sequence[_Guess], load: RingLoad, room: int
    ) -> list[tuple[_Guess, int]]:
        """How many drafts of each, those with the best chances first."""
        order = self._order(guesses, room)
        count = self._best(order, load) if self._auto else len(order)
        counts = [0] * len(guesses)
        for index, _ in order[:count]:
            counts[index] += 1
        return [(guess, count) for guess, count in zip(guesses, counts, strict=True) if count]

    def _order(self, guesses: Sequence[_Guess], room: int) -> list[tuple[int, float]]:
        """Whose next draft is the best, one after another, and the tokens that count for it."""
        heap = [(-guess.chances[0], index, 1) for index, guess in enumerate(guesses)]
        heapify(heap)
        order: list[tuple[int, float]] = []
        while heap and len(order) < room:
            gain, index, count = heappop(heap)
            guess = guesses[index]
            order.append((index, -gain / guess.margin))
            if count < len(guess.drafts):
                heappush(heap, (gain * guess.chances[count], index, count + 1))
        return order

    def _best(self, order: Sequence[tuple[int, float]], load: RingLoad) -> int:
        """With how many of these drafts the volume brings the most tokens in its time."""
        tokens = float(load.rows)
        best, most = 0, tokens / (self._costs.turn_s(0, load) or 1.0)
        for count, (_, gain) in enumerate(order, 1):
            tokens += gain
            if tokens / self._costs.turn_s(count, load) > most:
                best, most = count, tokens / self._costs.turn_s(count, load)
        return best


def _room(job: Job) -> int:
    """Drafts beyond those in flight that there may be: the last one may be right, and is followed
    by a token."""
    left = min(
        job.request.max_tokens - job.generated,
        job.request.window - (len(job.tokens) - job.credited),
    )
    return left - 1 - len(job.path)
