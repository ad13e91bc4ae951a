"""The Gittins index, by answers' lengths as they are learned."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from molink.facts.costs import UNKNOWN, Costs
from molink.facts.ringtimes import RingTimes
from molink.scheduler.job import Job, JobState
from molink.scheduler.policies.lengths import AnswerLengths
from molink.scheduler.policies.mlfq import ALPHA, PATIENCE, UNKNOWN_S
from molink.scheduler.policies.ranked import Rank, Ranked

#: Levels by which an index doubles; jobs of one level go as they came.
STEPS = 2
#: The best level's index, in seconds times tokens.
_BEST = 1e-6
#: Of the answers that are left at least this share ends within a horizon: one that happens to end
#: next tells nothing.
LEAST_SHARE = 0.5
#: All are judged anew where rows or tokens take so many times as long, or as short.
CHANGED = 1.2
#: An answer is looked at anew when it has grown by one token in so many.
_GROWN = 8


@dataclass(slots=True)
class _Standing:
    """What is known of a job."""

    #: As which of all jobs it came.
    number: int
    #: When it last had no rows in flight; no time while it has.
    rests_since: float
    #: For which the following holds: its state, whether its KV is in host memory, and up to how
    #: many tokens.
    state: JobState = "waiting"
    copied: bool = False
    until: int = 0
    #: Seconds that it is to be given next: of a ring that it shares, and of its own.
    work_s: float = 0.0
    turn_s: float = 0.0
    #: When it is promoted, if it rests until then.
    due_at: float = math.inf
    #: The inverse of its index: seconds of the ring for one over the answer's tokens; its level.
    index: float = 0.0
    level: int = 0
    #: Since when it goes before all that aren't promoted, for how long, and how long it has run.
    promoted_at: float | None = None
    granted_s: float = 0.0
    spent: float = 0.0
    counted_until: float = 0.0

    def rests(self, since: float) -> None:
        """It has rested since then, or runs."""
        self.rests_since = since
        self.due_at = since + max(ALPHA, PATIENCE * self.turn_s)


class Gittins(Ranked):
    """Who brings most for the ring's time goes first, by what similar requests took (Gittins 1979).

    What is to be least is the mean latency per token, so that a request that is over brings one
    over its answer's tokens. How long the answer will be nobody knows, but how long those to
    similar prompts were (:class:`AnswerLengths`), that it is longer than what there is of it, and
    what the client lets it take.
    The index of a job is the most that it can bring for the time that is spent on it, over all
    horizons: the rest of its prompt, then tokens until the answer is over or the horizon reached.
    An answer that has outlived those that were like it is taken to be half done, so that without
    any knowledge this is least attained service first.

    *The ring's time.* Where memory is short, a token takes its share of an iteration: by the part
    of all KV blocks that the job holds, or of all places. A row of a prompt takes what it adds to a
    step.

    A job gives way to one that waits if that goes before it even after the time that it takes to
    bring the former back.

    *Clients* have equal shares first; the index is for those of one client.

    *Promotion* is as in :class:`Mlfq`: who rests for :data:`PATIENCE` times as long as it is to run
    next, and at least :data:`ALPHA`, goes before all that came to this later, for as long as that.
    """

    places_at_once = 32

    def __init__(self) -> None:
        super().__init__()
        self._lengths = AnswerLengths()
        self._standings: dict[Job, _Standing] = {}
        self._arrivals = 0
        self._costs = UNKNOWN
        self._room, self._places = 1, 1
        #: Seconds of a prompt's row and of an answer's token when all were last judged anew.
        self._judged_by = self._costs.token, UNKNOWN_S

    # --- events ----------------------------------------------------------------------------------

    def set_room(self, tokens: int, places: int) -> None:
        """As :class:`SchedulingPolicy` says."""
        self._room, self._places = tokens, places

    def set_answers(self, answers: AnswerLengths) -> None:
        """As :class:`SchedulingPolicy` says."""
        self._lengths = answers

    def set_times(self, times: RingTimes) -> None:
        """As :class:`SchedulingPolicy` says."""
        super().set_times(times)
        self._costs = Costs.of(times) or UNKNOWN
        measures = self._costs.token, self._token_s(1.0)[0]
        if not all(map(_is_about, measures, self._judged_by)):
            self._judged_by = measures
            for standing in self._standings.values():
                standing.until = 0

    def arrived(self, job: Job, now: float) -> None:
        """It is judged by its prompt."""
        standing = self._standings[job] = _Standing(self._arrivals, now)
        self._arrivals += 1
        self._judge(job, standing)

    def issued(self, job: Job, now: float) -> None:
        """It runs; perhaps as one that has waited for too long until now."""
        standing = self._standings[job]
        if standing.rests_since < math.inf:
            if standing.promoted_at is None and now >= standing.due_at:
                standing.promoted_at, standing.spent = standing.due_at, 0.0
                standing.granted_s = standing.turn_s
            standing.counted_until = now
            standing.rests(math.inf)
        if job.state == "prefill":  # less is left
            standing.until = 0

    def ran(self, job: Job, seconds: float, now: float) -> None:
        """It has run for some more time."""
        standing = self._standings[job]
        standing.spent += now - standing.counted_until
        standing.counted_until = now
        if not job.awaited:
            standing.rests(now)
        if standing.promoted_at is not None and standing.spent >= standing.granted_s:
            standing.promoted_at = None

    def answered(self, job: Job) -> None:
        """That is how long such answers are."""
        self._lengths.add(job.request.prompt_tokens, _answered(job))

    def over(self, job: Job, now: float) -> None:
        """Forget it."""
        del self._standings[job]

    # --- judgement -------------------------------------------------------------------------------

    def _standing(self, job: Job) -> _Standing:
        """What is known of it, judged anew where it has changed."""
        found = self._standings[job]
        copied = job.copy is not None
        if found.state != job.state or found.copied != copied or len(job.tokens) >= found.until:
            found.state, found.copied = job.state, copied
            self._judge(job, found)
        return found

    def _judge(self, job: Job, standing: _Standing) -> None:
        tokens, request = _answered(job), job.request
        most = tokens + request.max_tokens - job.generated
        longer = self._lengths.beyond(tokens, request.prompt_tokens)
        answers = [min(answer, most) for answer in longer]
        count, before_s = len(answers), self._before_s(job)
        context = len(job.tokens) + (sum(answers) / count - tokens) / 2
        share_s, turn_s = self._token_s(context)
        best, horizon, mean, brings, run = math.inf, 0, 0.0, 0.0, 0
        for index, answer in enumerate(answers, start=1):
            brings += 1 / answer
            run += answer - tokens
            if index < LEAST_SHARE * count:
                continue
            rest = run + (count - index) * (answer - tokens)
            seconds = (count * before_s + share_s * rest) / brings
            if seconds < best:
                best, horizon, mean = seconds, answer - tokens, rest / count
        standing.index, standing.level = best, _level(best)
        standing.until = len(job.tokens) + max(1, tokens // _GROWN)
        standing.work_s, standing.turn_s = before_s + share_s * mean, before_s + turn_s * horizon
        standing.rests(standing.rests_since)

    def _before_s(self, job: Job) -> float:
        """Seconds until it brings its next token, beside those of an iteration."""
        if job.state != "waiting":
            return self._costs.prefill_s(max(0, len(job.tokens) - job.issued - 1), job.issued)
        if job.copy is not None:
            kept = job.copy.tokens
            rest = self._costs.prefill_s(max(0, len(job.tokens) - kept - 1), kept)
            return (self.restoring(job) or 0.0) + rest
        if job.admissions:
            return self._costs.prefill_s(len(job.tokens))
        return self._costs.prefill_s(job.uncached, len(job.tokens) - job.uncached)

    def _restoring_s(self, job: Job) -> float:
        """Seconds until a job that gives way now is where it was."""
        seconds = self.restoring(job)
        return seconds if seconds is not None else self._costs.prefill_s(job.computed)

    def _token_s(self, context: float) -> tuple[float, float]:
        """What a token of a job of that context takes of the ring, and how long it takes."""
        jobs = max(1.0, min(self._places, self._room / context))
        seconds = self.times.turn_s(int(jobs), context) or UNKNOWN_S
        return seconds / jobs, seconds

    # --- questions -------------------------------------------------------------------------------

    def rank(self, job: Job, now: float) -> Rank:
        """By the level of its index; within one, who came first."""
        standing = self._standing(job)
        if standing.promoted_at is not None:
            return -1, standing.promoted_at, standing.number
        if now >= standing.due_at and not job.stalled:
            return -1, standing.due_at, standing.number
        return standing.level, 0.0, standing.number

    def next_admitted(
        self, waiting: Sequence[Job], admitted: Collection[Job], now: float
    ) -> Job | None:
        """Of the client whose turn it is, the first one.

        If indices came before shares, who asks for what is cached would go before all others.
        """
        theirs = [job for job in waiting if job.request.whose == waiting[0].request.whose]
        return min(theirs, key=lambda job: (job.request.priority, self.rank(job, now)))

    def goes_before(self, needy: Job, other: Job, now: float) -> bool:
        """Whether it would do so if it took as much longer as it takes to bring ``other`` back."""
        first, second = self.rank(needy, now), self.rank(other, now)
        if first[0] < 0 or second[0] < 0:
            return first < second
        mine = self._standing(needy)
        share = self._restoring_s(other) / mine.work_s if mine.work_s else 0.0
        return _level(mine.index * (1 + share)) < second[0]

    def next_turns(self, jobs: Collection[Job], batch: int, now: float) -> Mapping[Job, float]:
        """When those who go before it and don't fit beside it are over, or it is promoted."""
        tokens, places, work_s, turns = self._room, self._places, 0.0, {}
        asked = set(jobs)
        for job in sorted(self._standings, key=lambda job: self.rank(job, now)):
            standing = self._standings[job]
            tokens, places = tokens - len(job.tokens), places - 1
            if job in asked:
                promoted_s = max(0.0, standing.due_at - now)
                turns[job] = min(work_s, promoted_s)
            if tokens < 0 or places < 0:
                work_s += standing.work_s
        return turns


def _answered(job: Job) -> int:
    return len(job.tokens) - job.request.prompt_tokens


def _is_about(seconds: float, others: float) -> bool:
    return max(seconds, others) <= CHANGED * min(seconds, others)


def _level(index: float) -> int:
    return max(0, math.ceil(STEPS * math.log2(max(index, _BEST) / _BEST)))
