"""How long a request will wait, by what has been served of late and what is before it."""

import math
from collections.abc import Iterable

from molink.scheduler.job import Job
from molink.scheduler.limits import HeadLimits
from molink.scheduler.roster import Roster
from molink.scheduler.shares import W_INPUT, W_OUTPUT

#: Seconds of serving after which what was measured counts e times less, and before which a rate is
#: not known.
MEMORY_S, LEAST_S = 30.0, 0.5
#: Weight of the latest answer's length.
_SMOOTHING = 0.1


class ServingRate:
    """How many of something per second, while there is something to do."""

    def __init__(self) -> None:
        self._count = self._seconds = 0.0
        #: At the last look: when it was, how many there had been, and whether there was more to do.
        self._at, self._total, self._busy = 0.0, 0, False

    def observe(self, total: int, now: float, *, busy: bool) -> None:
        """By now there have been ``total``; ``busy`` is whether there is more to do from now on."""
        if self._busy and now > self._at:
            kept = math.exp((self._at - now) / MEMORY_S)
            self._count *= kept
            self._seconds = self._seconds * kept + MEMORY_S * (1 - kept)
        self._count += total - self._total
        self._at, self._total, self._busy = now, total, busy

    @property
    def rate(self) -> float | None:
        """So many per second, above 0; ``None`` while nothing is known."""
        known = self._seconds >= LEAST_S and self._count > 0
        return self._count / self._seconds if known else None


class Waits:
    """Foretells waits of one head. An answer is taken to be as long as others were of late.

    What waits takes as long as as many units (:mod:`molink.scheduler.shares`) of late, be they of
    prompts or of answers; and those who come later are not foreseen.
    """

    def __init__(self, limits: HeadLimits, roster: Roster) -> None:
        self._limits = limits
        self._roster = roster
        self._units, self._tokens = ServingRate(), ServingRate()
        #: Tokens of an answer, on average.
        self._answer: float | None = None

    def observe(self, now: float) -> None:
        """Something was served, or begins or ceases to be."""
        shares, busy = self._roster.shares, self._roster.admitted > 0
        self._units.observe(shares.total, now, busy=busy)
        self._tokens.observe(shares.generated, now, busy=busy)

    def ended(self, job: Job) -> None:
        """An answer has come to its end."""
        before = job.generated if self._answer is None else self._answer
        self._answer = before + _SMOOTHING * (job.generated - before)

    def next_place(self) -> float | None:
        """Seconds until the next request should end, if the rate is known."""
        rate = self._tokens.rate
        if rate is None:
            return None
        jobs = list(self._roster.running)
        return min(map(self._more, jobs), default=0.0) * len(jobs) / rate

    def turn_of(self, job: Job) -> float | None:
        """Seconds until a new request should be admitted, if that is known."""
        roster = self._roster
        if not roster.waiting and roster.admitted < self._limits.max_running:
            return 0.0
        rate, first = self._units.rate, self.next_place()
        if rate is None or first is None:
            return None
        return first + roster.shares.ahead(job, self._backlog(roster.queued)) / rate

    def _backlog(self, jobs: Iterable[Job]) -> Iterable[tuple[Job, float]]:
        for job in jobs:
            prompt = job.uncached if not job.admissions else 0
            yield job, W_INPUT * prompt + W_OUTPUT * self._more(job)

    def _more(self, job: Job) -> float:
        """Tokens that a request will still get."""
        most = job.request.max_tokens - job.generated
        if self._answer is None:
            return most
        # Whoever is beyond the average has as much before it again.
        left = self._answer - job.generated
        return min(most, left if left >= 1 else self._answer)
