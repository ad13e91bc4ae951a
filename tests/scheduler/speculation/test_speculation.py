"""How many drafts requests get: exact decisions, without a ring."""

from collections.abc import Sequence

import pytest

from molink.facts.drafts import AUTO_DRAFTS, MAX_AHEAD, MAX_DRAFTS
from molink.facts.profile import Profile
from molink.facts.ringtimes import LinkFacts, RingTimes
from molink.scheduler.job import Job
from molink.scheduler.limits import HeadLimits
from molink.scheduler.request import HeadRequest
from molink.scheduler.speculation.base import DraftSource, Foretold
from molink.scheduler.speculation.costs import RingLoad
from molink.scheduler.speculation.drafting import PRIORS, Drafting
from molink.scheduler.speculation.speculation import Speculation
from molink.wire.messages.data import Sampling

#: A row takes 1 ms more at each of two stages; in a chunk, which has whole tiles of 16, 2 ms.
STAGE = Profile(decode=((1, 0.010), (101, 0.110)), prefill=((16, 0.040), (116, 0.240)), tile=16)
FAR = (LinkFacts(0.1, None),) * 2
NEAR = (LinkFacts(0.0, None),) * 2
ROOM = 100
ALONE = RingLoad(1, 1, 0)


class Counts:
    """As many drafts as it is asked for."""

    def draft(self, tokens: Sequence[int], count: int) -> Foretold:
        return Foretold(range(count))


class Sure(Drafting):
    """Each draft is right with this chance."""

    def __init__(self, source: DraftSource, sure: float) -> None:
        super().__init__(source)
        self.sure = sure

    def chance(self, position: int) -> float:
        return super().chance(position) if position < self._sure else self.sure

    @property
    def best(self) -> float:
        return self.sure

    @property
    def is_proven(self) -> bool:
        return True


class Rises:
    """Each token is one more than the one before."""

    def draft(self, tokens: Sequence[int], count: int) -> Foretold:
        return Foretold(list(range(tokens[-1] + 1, tokens[-1] + 1 + count)), 9)


def speculation(links: Sequence[LinkFacts] = FAR, setting: int = AUTO_DRAFTS) -> Speculation:
    made = Speculation(HeadLimits(64, 4, 0, stages=2, draft_tokens=setting), Counts)
    made.set_times(RingTimes((STAGE, STAGE), links, 0))
    return made


def pipelined(links: Sequence[LinkFacts] = FAR) -> Speculation:
    limits = HeadLimits(64, 4, 0, stages=2, draft_tokens=AUTO_DRAFTS, ahead=MAX_AHEAD)
    made = Speculation(limits, Counts)
    made.set_times(RingTimes((STAGE, STAGE), links, 0))
    return made


def jobs(count: int, chance: float = 0.0) -> list[Job]:
    """Whose drafts are each right with ``chance``; 0: as those of which nothing is known."""
    made = []
    for index in range(count):
        job = Job.of(HeadRequest("d", str(index), (1, 2), 2, 1000, Sampling(), window=1 << 20))
        job.id = index
        job.drafting = Sure(Counts(), chance) if chance else Drafting(Counts())
        made.append(job)
    return made


def counts(of: Speculation, given: Sequence[Job], load: RingLoad, room: int = ROOM) -> list[int]:
    found = {job.id: len(drafts) for job, drafts in of.drafts(given, load, room)}
    return [found.get(job.id, 0) for job in given]


def test_a_turn_that_is_mostly_latency_has_room_for_drafts() -> None:
    # A turn takes 220 ms and a draft 2 more: worth it down to a chance of 0.011.
    alone = RingLoad(1, 1, 0)
    assert counts(speculation(), jobs(1, 0.9), alone) == [MAX_DRAFTS]
    assert counts(speculation(), jobs(1, 0.5), alone) == [5]
    # The more of them are right, the better are the chances of the next.
    assert counts(speculation(), jobs(1), alone) == [12]
    assert counts(speculation(), jobs(1, 0.01), alone) == [0]


def test_where_stages_compute_all_the_time_only_good_drafts_pay() -> None:
    # A turn takes 20 ms, and a draft a tenth of it.
    alone = RingLoad(1, 1, 0)
    assert counts(speculation(NEAR), jobs(1, 0.9), alone) == [9]
    assert counts(speculation(NEAR), jobs(1, 0.1), alone) == [0]
    # Beside 20 rows in each of two volumes: 2 ms of 58 for 20 tokens.
    full = RingLoad(20, 2, 0)
    assert sum(counts(speculation(NEAR), jobs(20, 0.9), full)) > 0
    assert sum(counts(speculation(NEAR), jobs(20, 0.8), full)) == 0


def test_the_best_chances_come_first() -> None:
    given = [*jobs(1, 0.2), *jobs(1, 0.9), *jobs(1, 0.6)]
    for index, job in enumerate(given):
        job.id = index
    # 0.9, 0.81, 0.73, 0.66, 0.6, …
    assert counts(speculation(), given, RingLoad(3, 1, 0), room=5) == [0, 4, 1]


@pytest.mark.parametrize("setting", [1, 3, MAX_DRAFTS])
def test_a_fixed_number_asks_for_nothing(setting: int) -> None:
    fixed = speculation(NEAR, setting)
    assert counts(fixed, jobs(3, 0.01), RingLoad(3, 2, 0, True)) == [setting] * 3


def test_off() -> None:
    assert speculation(setting=0).drafts(jobs(1, 1.0), RingLoad(1, 1, 0), ROOM) == []


def test_nothing_is_drafted_where_the_stages_are_unknown() -> None:
    made = speculation()
    made.set_times(RingTimes((STAGE, Profile()), FAR, 0))
    assert counts(made, jobs(1, 0.9), RingLoad(1, 1, 0)) == [0]
    (job,) = jobs(1)
    made.offered(job, [7])
    assert counts(made, [job], RingLoad(1, 1, 0)) == [0]
    made.set_times(RingTimes((STAGE, STAGE), FAR, 0))
    assert counts(made, jobs(1, 0.9), RingLoad(1, 1, 0)) == [MAX_DRAFTS]


def test_beside_chunks_a_tile_of_drafts_or_none() -> None:
    # One draft more than a chunk has room for takes 2 * 32 ms more, 15 others nothing.
    chunks = RingLoad(1, 1, 0, prefilling=True)
    assert counts(speculation(), jobs(1, 0.9), chunks) == [MAX_DRAFTS]
    assert counts(speculation(), jobs(1, 0.36), chunks) == [4]
    assert counts(speculation(), jobs(1), chunks) == [0]
    assert counts(speculation(NEAR), jobs(1, 0.5), chunks) == [0]


def test_drafts_that_are_wrong_end_and_come_again_later() -> None:
    made, (job,) = speculation(NEAR), jobs(1)
    alone, passes = RingLoad(1, 1, 0), 0
    while made.drafts([job], alone, ROOM):
        made.verified(job, 1, 0)
        passes += 1
    assert passes == 6
    rested = 0
    while not made.drafts([job], alone, ROOM):
        rested += 1
    assert 10 < rested < 100
    made.verified(job, 1, 1)
    assert len(made.drafts([job], alone, ROOM)) == 1
    assert made.accepted == 1


def test_what_follows_a_wrong_draft_tells_nothing() -> None:
    one, other = Drafting(Counts()), Drafting(Counts())
    one.verified(0, 2, 1)
    other.verified(0, 9, 1)
    assert one.chance(0) == other.chance(0)
    one.verified(0, 3, 3)
    assert one.is_proven


FORCED = [7, 8, 9]


def test_forced_tokens_pay_where_guesses_do_not() -> None:
    # Beside 20 rows in each of two volumes, a row more is worth a token and costs less than one.
    full = RingLoad(20, 2, 0)
    given = jobs(20)
    made = speculation(NEAR)
    assert sum(counts(made, given, full)) == 0
    made.offered(given[3], FORCED)
    assert made.drafts(given, full, ROOM) == [(given[3], FORCED)]
    assert made.drafts(given, full, 2) == [(given[3], FORCED[:2])]


def test_forced_tokens_teach_nothing_of_guesses() -> None:
    made, (job,) = speculation(), jobs(1, 0.1)
    job.drafting = Drafting(Counts())
    before = job.drafting.best
    for _ in range(20):
        made.offered(job, FORCED)
        assert made.drafts([job], ALONE, ROOM) == [(job, FORCED)]
        made.verified(job, 3, 3)
    assert (job.drafting.best, job.drafting.is_proven) == (before, False)
    job.tokens.append(5)
    assert made.drafts([job], ALONE, ROOM) != [(job, FORCED)]


def test_forced_tokens_go_ahead() -> None:
    made, (job,) = pipelined(), jobs(1, 0.0)
    made.offered(job, list(range(9)))
    assert made.drafts([job], ALONE, ROOM, (1,)) == [(job, [0, 1, 2])]
    job.path = [0, 1, 2]
    assert made.ahead([job], ALONE, (4,), ROOM) == [(job, [3, 4, 5, 6, 7, 8])]


def test_a_last_stage_that_is_wrong_is_trusted_less() -> None:
    made, (job,) = speculation(NEAR), jobs(1)
    alone, passes = RingLoad(1, 1, 0), 0
    made.offered(job, FORCED)
    while made.drafts([job], alone, ROOM):
        made.verified(job, 3, 0)
        passes += 1
        assert passes < 30


def test_drafts_that_are_off_are_off_for_forced_tokens_too() -> None:
    made, (job,) = speculation(setting=0), jobs(1)
    made.offered(job, FORCED)
    assert made.drafts([job], RingLoad(1, 1, 0), ROOM) == []


def test_a_draft_is_as_good_as_the_tokens_before_it_that_agree() -> None:
    made = Drafting(Counts())
    made.draft((1, 2), 9)
    assert [made.chance(2 + at) for at in range(5)] == [*PRIORS[:4], PRIORS[3]]
    assert made.chance(2 + 8) == made.chance(2 + 100) == PRIORS[-1]
    made.verified(2, 3, 3)
    assert made.chance(2) > PRIORS[0]
    made.verified(2, 1, 0)
    made.verified(2, 1, 0)
    after = made.chance(2)
    # A wrong draft tells less where none was to be expected.
    made.draft((1, 2, 3), 9)
    made.verified(9, 1, 0)
    assert made.chance(3) < 0.8 * after


# --- ahead ----------------------------------------------------------------------------------------


def ahead(of: Speculation, given: Sequence[Job], flying: Sequence[int] = (1,)) -> list[int]:
    found = {job.id: len(drafts) for job, drafts in of.ahead(given, ALONE, flying, ROOM)}
    return [found.get(job.id, 0) for job in given]


def under_way(chance: float, path: int) -> Job:
    """A request with drafts in flight."""
    (job,) = jobs(1, chance)
    assert job.drafting is not None
    job.path = list(job.drafting.draft(job.tokens, 99))[:path]
    return job


def test_drafts_go_ahead_if_those_before_them_are_likely_to_be_right() -> None:
    # A turn takes 220 ms, and a volume of 6 rows 15, of which others wait for half: 0.033.
    made = pipelined()
    assert ahead(made, [under_way(0.9, 15)]) == [6]
    assert ahead(made, [under_way(0.9, 35)]) == [0]
    assert ahead(made, [under_way(0.5, 3)]) == [6]
    assert ahead(made, [under_way(0.5, 4)]) == [0]
    assert ahead(made, jobs(1, 0.9)) == [0], "nothing was foretold"


def test_the_most_likely_goes_ahead() -> None:
    likely, less = under_way(0.9, 2), under_way(0.9, 3)
    less.id = 1
    assert ahead(pipelined(), [less, likely]) == [0, 6]


def test_nothing_goes_ahead_where_the_ring_is_busy() -> None:
    # Four fifths of a turn are 176 ms.
    assert ahead(pipelined(), [under_way(0.9, 2)], [1, *[15] * 6]) == [6]
    assert ahead(pipelined(), [under_way(0.9, 2)], [1, *[15] * 7]) == [0]
    assert ahead(pipelined(NEAR), [under_way(0.9, 2)]) == [0]


def test_no_more_goes_ahead_than_is_wanted() -> None:
    made, job = pipelined(), under_way(0.9, 2)
    job.credited = len(job.tokens)
    job.request = HeadRequest("d", "0", (1, 2), 2, 1000, Sampling(), window=7)
    # Two drafts, four more, and the token after them.
    assert ahead(made, [job]) == [4]
    job.request = HeadRequest("d", "0", (1, 2), 2, 5, Sampling(), window=1 << 20)
    assert ahead(made, [job]) == [2]


def test_more_is_foretold_when_that_is_used_up() -> None:
    made, job = pipelined(), under_way(0.99, 99)
    assert ahead(made, [job]) == [0]
    job.tokens += job.path[:90]
    del job.path[:90]
    # It says other tokens now than are in flight.
    assert ahead(made, [job]) == [0]
    job = under_way(0.99, 0)
    job.drafting = Sure(Rises(), 0.99)
    job.path = list(job.drafting.draft(job.tokens, 99))
    job.tokens += job.path[:90]
    del job.path[:90]
    assert made.ahead([job], ALONE, (1,), ROOM)[0][1][:3] == [102, 103, 104]
