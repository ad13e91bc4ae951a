"""Multi-level feedback queues: who is where, and what holds for every load."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.facts.profile import Profile
from molink.facts.ringtimes import RingTimes
from molink.scheduler.job import Job
from molink.scheduler.policies.fixed_priority import FixedPriority
from molink.scheduler.policies.mlfq import LEVELS, PATIENCE, WORTH, Mlfq
from molink.scheduler.policies.skip_join_mlfq import SkipJoinMlfq
from molink.scheduler.prefix import Match
from molink.scheduler.request import HeadRequest
from molink.wire.messages.data import Sampling

#: An iteration takes a second, a prompt a second for each row.
TIMES = RingTimes((Profile(decode=((1, 1.0),), prefill=((1, 1.0), (8, 8.0))),), (), 0)


def make(policy: Mlfq, key: str, now: float = 0.0, tokens: int = 1, cached: int = 0) -> Job:
    """A job that has just arrived, and has a place."""
    prompt = tuple(range(tokens))
    job = Job.of(HeadRequest("d", key, prompt, tokens, 1000, Sampling()), now)
    job.uncached = tokens - cached
    policy.arrived(job, now)
    job.begin(0, [], Match(tokens=cached))
    return job


def run(policy: Mlfq, job: Job, now: float, seconds: float) -> None:
    """An iteration with all rows that are left."""
    job.issued = len(job.tokens)
    policy.issued(job, now)
    policy.ran(job, seconds, now + seconds)
    job.tokens.append(0)


def order(policy: Mlfq, jobs: Sequence[Job], now: float) -> str:
    return "".join(job.request.key for job in policy.running_order(jobs, now))


def skip_join() -> SkipJoinMlfq:
    policy = SkipJoinMlfq()
    policy.set_times(TIMES)
    return policy


def test_a_job_falls_when_it_has_consumed_its_quantum() -> None:
    policy = skip_join()
    a, b = make(policy, "a"), make(policy, "b")
    assert order(policy, [b, a], 0.0) == "ab"
    run(policy, a, 0.0, 0.75)
    assert order(policy, [a, b], 0.75) == "ab"
    run(policy, a, 0.75, 0.25)
    assert order(policy, [a, b], 1.0) == "ba"


def test_it_joins_the_queue_that_covers_what_is_not_cached_of_its_prompt() -> None:
    policy = skip_join()
    jobs = [
        make(policy, "a", tokens=9),  # 9 s: the fifth queue, 16 s
        make(policy, "b", tokens=5),  # the fourth, 8 s
        make(policy, "c", tokens=9, cached=7),  # the second
        make(policy, "d", tokens=9, cached=6),  # the third
        make(policy, "e", tokens=1),  # the first
    ]
    assert order(policy, jobs, 0.0) == "ecdba"


def test_it_falls_to_the_queue_that_covers_the_rest_of_its_prompt() -> None:
    policy = skip_join()
    a = make(policy, "a", tokens=9, cached=8)
    a.tokens += range(7)
    a.issued = 8
    policy.issued(a, 0.0)
    policy.ran(a, 1.0, 1.0)  # 8 rows are left: the fourth queue
    assert policy.rank(a, 1.0)[0] == 3


def test_rows_that_fly_together_count_once() -> None:
    policy = skip_join()
    a = make(policy, "a", tokens=4)  # the third queue, 4 s
    a.issued = 4
    for tick in (1, 2):
        a.flight[tick] = 0
        policy.issued(a, 0.0)
    del a.flight[1]
    policy.ran(a, 3.0, 3.0)
    del a.flight[2]
    policy.ran(a, 3.5, 3.5)
    assert policy.rank(a, 3.5)[0] == 2
    run(policy, a, 3.5, 0.5)
    assert policy.rank(a, 4.0)[0] == 3


def test_who_waits_is_promoted_and_stays_for_its_own_quantum() -> None:
    policy = skip_join()
    a, b = make(policy, "a", tokens=2), make(policy, "b")
    patience = PATIENCE * 2.0  # quanta of its queue
    assert order(policy, [a, b], patience - 0.1) == "ba"
    c = make(policy, "c", now=patience + 0.5)
    now = patience + 1.0
    assert order(policy, [a, b, c], now) == "bac"
    run(policy, a, now, 1.5)  # longer than the first quantum
    now += 1.5
    d = make(policy, "d", now=now)
    assert order(policy, [a, b, c, d], now) == "bacd"
    run(policy, a, now, 0.5)
    assert order(policy, [a, b, c, d], now + 0.5) == "bcda"


def test_who_flies_does_not_wait() -> None:
    policy = skip_join()
    a, b = make(policy, "a", tokens=2), make(policy, "b")
    a.flight[1] = 0
    policy.issued(a, 0.0)
    assert order(policy, [a, b], 99.0) == "ba"


def test_who_waits_for_his_client_is_not_promoted() -> None:
    policy = skip_join()
    a, b = make(policy, "a", tokens=2), make(policy, "b")
    a.credited = -1000
    assert a.stalled
    assert order(policy, [a, b], 99.0) == "ba"


def test_the_naive_one_knows_nothing_of_prompts() -> None:
    policy = Mlfq()
    policy.set_times(TIMES)
    a, b = make(policy, "a", tokens=9), make(policy, "b", tokens=1)
    assert order(policy, [b, a], 0.0) == "ab"


def test_the_shortest_iteration_is_heard_where_profiles_say_nothing() -> None:
    policy = SkipJoinMlfq()
    a = make(policy, "a", tokens=100)
    run(policy, a, 0.0, 0.5)
    run(policy, a, 0.5, 0.25)
    assert [policy.quantum(level) for level in (0, 1)] == [0.25, 0.5]


def test_the_last_queue_is_the_last() -> None:
    policy = skip_join()
    a = make(policy, "a", tokens=1 << 20)
    assert policy.rank(a, 0.0)[0] == LEVELS - 1
    run(policy, a, 0.0, 1e6)
    assert policy.rank(a, 0.0)[0] == LEVELS - 1


class Server:
    """Runs one job at a time, each iteration to its end; no answer ever ends."""

    def __init__(self, policy: Mlfq) -> None:
        self.policy = policy
        self.now = 0.0
        self.jobs: list[Job] = []
        #: Since when each job has waited.
        self.since: dict[Job, float] = {}
        #: Of each wait: the job, from when to when.
        self.waits: list[tuple[Job, float, float]] = []

    def add(self, job: Job) -> None:
        self.jobs.append(job)
        self.since[job] = self.now

    def step(self) -> None:
        job = self.policy.running_order(self.jobs, self.now)[0]
        self.waits.append((job, self.since[job], self.now))
        seconds = float(len(job.tokens) - job.issued)
        run(self.policy, job, self.now, seconds)
        self.now += seconds
        self.since[job] = self.now


@pytest.mark.parametrize("alpha", [0.3, 1e9])
def test_a_long_prompt_goes_on_though_short_ones_come_without_end(alpha: float) -> None:
    """It is promoted, and then waits only for those that were promoted before it."""
    policy = SkipJoinMlfq(alpha)
    policy.set_times(TIMES)
    server = Server(policy)
    long = make(policy, "long", tokens=8)
    server.add(long)
    for number in range(400):
        server.add(make(policy, str(number), server.now))
        server.step()
    begun = [end for job, _, end in server.waits if job is long]
    patience = PATIENCE * 8.0
    if alpha < 1:  # each second one job more waits, and 32 s later it is promoted, for 2 s
        assert patience < begun[0] <= patience + 2 * (patience - 32)
    else:
        assert not begun


def test_who_has_hardly_run_since_it_was_computed_does_not_give_way() -> None:
    policy = skip_join()
    new, old = make(policy, "new"), make(policy, "old", tokens=8)
    new.state, old.state = "waiting", "decode"
    old.issued = 8
    assert policy.victim(new, [old], [old], 0.0) is None
    while policy.quantum(int(policy.rank(old, 0.0)[0])) < WORTH * 8.0:
        assert policy.victim(new, [old], [old], 0.0) is None
        policy.issued(old, 0.0)
        policy.ran(old, 1e3, 1e3)
    found = policy.victim(new, [old], [old], 0.0)
    assert found is not None
    assert found.job is old


def test_to_a_shorter_prompt_any_job_gives_way_where_priorities_are_fixed() -> None:
    policy = FixedPriority()
    policy.set_times(TIMES)
    new, old = make(policy, "new"), make(policy, "old", tokens=8)
    new.state, old.state = "waiting", "decode"
    found = policy.victim(new, [old], [old], 0.0)
    assert found is not None
    assert found.job is old
    old.state, new.state = "waiting", "decode"
    assert policy.victim(old, [new], [new], 0.0) is None


def test_of_those_that_decode_the_first_gets_blocks_of_the_last() -> None:
    policy = skip_join()
    a, b = make(policy, "a"), make(policy, "b")
    a.state = b.state = "decode"
    found = policy.victim(a, [b], [a, b], 0.0)
    assert found is not None
    assert found.job is b
    assert policy.victim(b, [a], [a, b], 0.0) is None


@given(
    prompts=st.lists(st.integers(1, 2), min_size=1, max_size=6),
    alpha=st.sampled_from([0.0, 0.3, 5.0]),
    every=st.integers(1, 2),
    naive=st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_nobody_starves(prompts: list[int], alpha: float, every: int, naive: bool) -> None:
    """After so long a wait only those go first that had come by then, each once.

    It is ``alpha`` or :data:`PATIENCE` quanta of the job's queue; each of them goes on for its own
    quantum and an iteration at most. Meanwhile others come without end.
    """
    policy = Mlfq(alpha) if naive else SkipJoinMlfq(alpha)
    policy.set_times(TIMES)
    server = Server(policy)
    for number, tokens in enumerate(prompts):
        server.add(make(policy, str(number), 0.0, tokens))
    came = [0.0] * len(prompts)
    homes: dict[Job, list[int]] = {job: [] for job in server.jobs}
    for number in range(300):
        for job in homes:
            homes[job].append(policy._places[job].home)
        if number % every == 0:
            came.append(server.now)
            server.add(make(policy, "new", server.now))
        server.step()
    waits = [(job, since, until) for job, since, until in server.waits if job in homes]
    waits += [(job, server.since[job], server.now) for job in homes]
    for job, since, until in waits:
        longest = policy.quantum(max(homes[job]))
        over = since + max(alpha, PATIENCE * longest)
        before = sum(1 for each in came if each <= over)
        assert until <= over + before * (longest + 2)
