"""How many drafts the requests of a micro-batch get.

A draft is one row more in a decode volume. It pays if the token that it may bring, by the chance
that it and those before it are right, is worth more than the time by which the row makes the turn
of the ring longer: what stages compute for it and links transfer (:class:`RingTimes`), for all
tokens that the volume brings. Where a turn is mostly latency a row costs next to nothing; where
volumes are full of rows and stages compute all the time, it costs its share, and none is drafted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from molink.facts.drafts import AUTO_DRAFTS, MAX_DRAFTS
from molink.facts.ringtimes import LinkFacts, RingTimes
from molink.head.job import Job
from molink.head.limits import HeadLimits
from molink.head.speculation.base import DraftSource
from molink.head.speculation.drafting import Drafting

#: So many times what a row costs a draft has to promise: profiles and chances are estimates.
MARGIN = 1.2
#: Turns that are remembered.
_REMEMBERED = 4096
#: Tokens before rows are rounded to these, so that what a turn takes can be remembered.
_BEFORE = 128


@dataclass(frozen=True, slots=True)
class Load:
    """Of the micro-batches: ``flying`` in flight at most, ``context`` tokens before a row."""

    flying: int
    context: int


class Speculation:
    """Decides for one head, whose requests each have a :class:`Drafting`.

    As many drafts as ``limits.draft_tokens`` says, or as pay; ``source`` makes what guesses.
    """

    def __init__(self, limits: HeadLimits, source: Callable[[], DraftSource]) -> None:
        self._limits = limits
        self._source = source
        links = (LinkFacts(),) * limits.stages
        self._times = RingTimes(limits.profiles, links, limits.row_bytes)
        self._turns: dict[tuple[int, Load], float] = {}
        self.drafted = 0
        self.accepted = 0

    def set_times(self, times: RingTimes) -> None:
        """Stages have measured themselves or their links anew."""
        self._times = times
        self._turns.clear()

    def drafts(self, jobs: Sequence[Job], load: Load, room: int) -> list[tuple[Job, Sequence[int]]]:
        """Drafts for those of a volume's ``jobs`` that get any; at most ``room`` in all."""
        limits = self._limits
        if not limits.draft_tokens or not jobs:
            return []
        load = Load(load.flying, load.context - load.context % _BEFORE)
        auto = limits.draft_tokens == AUTO_DRAFTS
        found = []
        for job in jobs:
            drafting = self._drafting(job)
            chance = drafting.chance if auto else 1.0
            most = min(MAX_DRAFTS if auto else limits.draft_tokens, self._wanted(job))
            pays = not auto or self._pays(chance, len(jobs), len(jobs), load)
            drafts = drafting.source.draft(job.tokens, most) if pays and most > 0 else ()
            if drafts:
                found.append((job, drafts, chance))
            else:
                drafting.rested()
        counts = self._counts(found, len(jobs), load if auto else None, room)
        return [
            (job, drafts[:count])
            for (job, drafts, _), count in zip(found, counts, strict=True)
            if count
        ]

    def verified(self, job: Job, drafts: int, right: int) -> None:
        """Of the ``drafts`` of a job the first ``right`` were."""
        self.drafted += drafts
        self.accepted += right
        self._drafting(job).verified(drafts, right)

    def _drafting(self, job: Job) -> Drafting:
        if job.drafting is None:
            job.drafting = Drafting(self._source())
        return job.drafting

    def _wanted(self, job: Job) -> int:
        """Drafts that could all be right: the last of them is followed by a token."""
        tokens = len(job.tokens)
        return (
            min(
                job.request.max_tokens - job.generated,
                self._limits.max_context - tokens,
                job.request.window - (tokens - job.credited),
            )
            - 1
        )

    def _counts(
        self,
        found: Sequence[tuple[Job, Sequence[int], float]],
        jobs: int,
        load: Load | None,
        room: int,
    ) -> list[int]:
        """How many of each one's drafts go, those with the best chances first; all without load."""
        counts = [0] * len(found)
        heap = [(-chance, index) for index, (_, _, chance) in enumerate(found)]
        heapify(heap)
        tokens = float(jobs)
        while heap and sum(counts) < room:
            gain, index = heappop(heap)
            if load is not None and not self._pays(-gain, tokens, jobs + sum(counts), load):
                break
            tokens -= gain
            counts[index] += 1
            _, drafts, chance = found[index]
            if counts[index] < len(drafts):
                heappush(heap, (gain * chance, index))
        return counts

    def _pays(self, gain: float, tokens: float, rows: int, load: Load) -> bool:
        """Whether one row more is worth ``gain`` tokens more, in a volume that brings ``tokens``.

        Not where the stages are unknown.
        """
        before, after = self._turn_s(rows, load), self._turn_s(rows + 1, load)
        return gain * before > MARGIN * tokens * (after - before)

    def _turn_s(self, rows: int, load: Load) -> float:
        """What a stream waits for its next token, in volumes of so many rows; 0 if unknown."""
        key = rows, load
        if key not in self._turns:
            if len(self._turns) >= _REMEMBERED:
                self._turns.clear()
            self._turns[key] = self._measure(rows, load)
        return self._turns[key]

    def _measure(self, rows: int, load: Load) -> float:
        times = self._times
        if not times.profiles or not all(profile.known for profile in times.profiles):
            return 0.0
        steps = [profile.decode_s(rows, load.context) for profile in times.profiles]
        sends = [times.send_s(index, rows) for index in range(len(times.links))]
        return max(times.turn_s(rows, load.context), load.flying * max([*steps, *sends]))
