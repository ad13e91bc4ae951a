"""Swarms in virtual time, one per seed: despite faults, every answer is complete and correct.

Replay a failing seed with ``python -m tests.dst SEED``.
"""

from collections import Counter
from functools import partial

import pytest

from molink.swarm.controller.registry import Registry
from molink.swarm.election.leader_election import ELECTION_BOUND, LEADER_TIMEOUT
from tests.dst.world import REQUESTS, Outcome, World, run, run_all

#: Seeds in CI, all seeds, and how many each test runs.
SEEDS, ALL_SEEDS, SHARE = 50, 10_000, 50
#: Seeds with two models, in CI.
SEVERAL_SEEDS = 12


@pytest.mark.parametrize("first", range(0, SEEDS, SHARE))
def test_no_request_is_lost(first: int) -> None:
    outcomes = run_all(range(first, first + SHARE))
    assert all(len(outcome.faults) <= 6 for outcome in outcomes)
    whole = sum(outcome.ends.count("whole") for outcome in outcomes)
    assert whole > 0.8 * SHARE * REQUESTS
    if first == 0:
        assert_faults_matter(outcomes)


def assert_faults_matter(outcomes: list[Outcome]) -> None:
    """Each of the product's safeguards was needed within fifty seeds."""
    counts = Counter[str]()
    for outcome in outcomes:
        counts.update(outcome.counts)
    for name in ("epochs", "stale", "strangers", "duplicates", "resent", "unbound"):
        assert counts[name] > 2, counts


def test_last_leader_does_not_wait_for_those_that_wait_for_it() -> None:
    """A swarm starts whose leader isn't the first in the order, and two PCs lie soon after."""
    run(3665)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, ALL_SEEDS, SHARE))
def test_no_request_is_lost_in_many_seeds(first: int) -> None:
    run_all(range(first, first + SHARE))


def test_no_request_is_lost_with_two_models() -> None:
    outcomes = run_all(range(SEVERAL_SEEDS), several=True)
    whole = sum(outcome.ends.count("whole") for outcome in outcomes)
    assert whole > 0.8 * SEVERAL_SEEDS * REQUESTS


def test_no_request_is_lost_with_a_slow_leader() -> None:
    """Together with all other faults."""
    seeds = 8
    outcomes = run_all(range(seeds), late=True)
    assert sum(any("reads" in said for said in one.faults) for one in outcomes) > seeds // 2
    assert sum(outcome.ends.count("whole") for outcome in outcomes) > 0.8 * seeds * REQUESTS


def test_unread_peer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow leader places nothing again; without ``TimePassedEvent.read_lag`` it does."""
    alone = partial(run_all, range(6), late=True, faults=False)
    assert {outcome.counts["epochs"] for outcome in alone()} == {1}
    monkeypatch.setattr(Registry, "set_read_lag", lambda self, behind: None)
    assert sum(outcome.counts["epochs"] > 1 for outcome in alone()) > 3


def lie_until_another_leads(seed: int) -> World:
    """Lies and a one-way cut, then the leader's death; somebody must lead soon."""
    world = World(seed, faults=False)
    event_queue, network, founder = world.event_queue, world.network, world.pcs[0]
    assert founder not in world.liars.known
    deaf = [(founder, world.pcs[1 + seed % (len(world.pcs) - 1)])]
    died = 12.0

    def check_leader() -> None:
        assert [one.pc for one in world.coordinators()] == [founder], "nobody is unseated"

    def end_founder() -> None:
        network.heal(deaf)
        world.kill_pc(founder)
        world.lost.add(founder)

    def check_successor() -> None:
        assert any(not one.frozen for one in world.coordinators()), "somebody leads"
        world.liars.stop()

    event_queue.schedule_at(2.0, world.liars.start)
    event_queue.schedule_at(3.0, network.cut, deaf)
    for step in range(4, 24):
        event_queue.schedule_at(step / 2, check_leader)
    event_queue.schedule_at(died, end_founder)
    # Besides: the loss is seen after the leader's timeout, and a coordinator needs time to start.
    until = died + LEADER_TIMEOUT + ELECTION_BOUND + 1.0
    event_queue.schedule_at(until, check_successor)
    world.faults.until, world.faults.long = until, True
    world.run()
    return world


def test_lies_neither_unseat_a_leader_nor_stop_an_election() -> None:
    lying = [World(seed, faults=False) for seed in range(2, 90, 6)]
    seeds = [one.seed for one in lying if one.pcs[0] not in one.liars.known]
    assert len(seeds) > 7
    for seed in seeds:
        lie_until_another_leads(seed)


def test_seeds_are_deterministic() -> None:
    assert run(7) == run(7)
