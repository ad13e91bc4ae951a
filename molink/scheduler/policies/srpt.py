"""Shortest remaining processing time: an oracle, for simulations."""

from molink.facts.ringtimes import RingTimes
from molink.scheduler.job import Job
from molink.scheduler.policies.ranked import Rank, Ranked


class Srpt(Ranked):
    """Who is done soonest goes first, by what is left of prompt and answer.

    It takes ``max_tokens`` for the length of the answer, which only simulated clients know.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Job, int] = {}
        self._arrivals = 0
        #: Seconds of so many rows of a prompt, and of a token.
        self._prompt_s: dict[int, float] = {}
        self._token_s = 0.0

    def set_times(self, times: RingTimes) -> None:
        """What is left takes another time."""
        super().set_times(times)
        self._prompt_s, self._token_s = {}, times.turn_s(1)

    def arrived(self, job: Job, now: float) -> None:
        """It is counted."""
        self._numbers[job] = self._arrivals
        self._arrivals += 1

    def over(self, job: Job, now: float) -> None:
        """Forget it."""
        del self._numbers[job]

    def rank(self, job: Job, now: float) -> Rank:
        """By seconds that are left."""
        rows = len(job.tokens) - (job.issued if job.state != "waiting" else 0)
        if rows not in self._prompt_s:
            self._prompt_s[rows] = self.times.prompt_s(rows) if rows > 0 else 0.0
        more = job.request.max_tokens - job.generated - (rows > 0)
        return self._prompt_s[rows] + more * self._token_s, 0.0, self._numbers[job]
