"""First come, first served: its answers, one by one."""

from molink.scheduler.job import PATIENCE, Job
from molink.scheduler.policies.fcfs import Fcfs
from molink.scheduler.request import HeadRequest
from molink.wire.messages.data import Sampling


def waiting(key: str, owner: str = "d") -> Job:
    return Job.of(HeadRequest(owner, key, (1,), 1, 9, Sampling(), window=1))


def admitted(request_id: int, owner: str = "d", stalled_at: float | None = None) -> Job:
    """A job at rest that decodes, or has waited for its client since ``stalled_at``."""
    job = waiting(str(request_id), owner)
    job.state, job.id = "decode", request_id
    if stalled_at is not None:
        job.tokens.append(5)
        job.stalled_at = stalled_at
    return job


def test_the_first_one_is_admitted() -> None:
    jobs = [waiting("b0", "b"), waiting("a0", "a")]
    assert Fcfs().next_admitted(jobs, [admitted(0, "a")], 0.0) is jobs[0]


def test_jobs_run_as_they_came_back() -> None:
    jobs = [admitted(3), admitted(1), admitted(2)]
    assert Fcfs().running_order(jobs, 0.0) == jobs


def test_the_latest_one_gives_way_to_an_older_one() -> None:
    old, needy, young, younger = jobs = [admitted(number) for number in range(4)]
    found = Fcfs().victim(needy, [young, younger, old], jobs, 0.0)
    assert found is not None
    assert found.job is younger
    assert Fcfs().victim(needy, [old], jobs, 0.0) is None


def test_who_waits_for_a_client_gives_way_first() -> None:
    paused, paused_later = admitted(0, stalled_at=1.0), admitted(1, stalled_at=2.0)
    needy, young = admitted(2), admitted(3)
    jobs = [paused, paused_later, needy, young]
    found = Fcfs().victim(needy, [paused, paused_later, young], jobs, 3.0)
    assert found is not None
    assert found.job is paused_later


def test_a_newcomer_gets_the_place_of_an_abandoned_one_or_where_nobody_can_go_on() -> None:
    new, busy = waiting("new"), admitted(2)
    paused, paused_first = admitted(0, stalled_at=2.0), admitted(1, stalled_at=1.0)
    policy = Fcfs()
    assert policy.victim(new, [busy], [busy], 0.0) is None
    assert policy.victim(new, [paused, busy], [paused, busy], 1.9 + PATIENCE) is None
    for jobs, now in (
        ([paused, paused_first, busy], 1.0 + PATIENCE),
        ([paused, paused_first], 3.0),
    ):
        found = policy.victim(new, jobs, jobs, now)
        assert found is not None
        assert found.job is paused_first
