"""Swarms in virtual time, one per seed: whatever fails, every answer is complete and correct.

Replay a failing seed with ``python -m tests.dst SEED``.
"""

from collections import Counter
from functools import partial

import pytest

from molink.swarm.controller.registry import Registry
from tests.dst.world import REQUESTS, Outcome, run, run_all

#: Seeds in CI, all seeds, and how many each test runs.
SEEDS, ALL_SEEDS, SHARE = 300, 10_000, 100
#: Seeds with two models, in CI.
SEVERAL_SEEDS = 100


@pytest.mark.parametrize("first", range(0, SEEDS, SHARE))
def test_no_request_is_lost(first: int) -> None:
    outcomes = run_all(range(first, first + SHARE))
    assert all(len(outcome.faults) <= 6 for outcome in outcomes)
    whole = sum(outcome.ends.count("whole") for outcome in outcomes)
    assert whole > 0.8 * SHARE * REQUESTS
    if first == 0:
        assert_faults_matter(outcomes)


def assert_faults_matter(outcomes: list[Outcome]) -> None:
    """Each of the product's safeguards was needed within a hundred seeds."""
    counts = Counter[str]()
    for outcome in outcomes:
        counts.update(outcome.counts)
    for name in ("epochs", "stale", "strangers", "duplicates", "resent", "unbound"):
        assert counts[name] > 10, counts


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, ALL_SEEDS, SHARE))
def test_no_request_is_lost_in_many_seeds(first: int) -> None:
    run_all(range(first, first + SHARE))


@pytest.mark.parametrize("first", range(0, SEVERAL_SEEDS, SHARE))
def test_no_request_is_lost_with_two_models(first: int) -> None:
    outcomes = run_all(range(first, first + SHARE), several=True)
    whole = sum(outcome.ends.count("whole") for outcome in outcomes)
    assert whole > 0.8 * SHARE * REQUESTS


def test_no_request_is_lost_with_a_slow_leader() -> None:
    """Together with all other faults."""
    seeds = 25
    outcomes = run_all(range(seeds), late=True)
    assert sum(any("reads" in said for said in one.faults) for one in outcomes) > seeds // 2
    assert sum(outcome.ends.count("whole") for outcome in outcomes) > 0.8 * seeds * REQUESTS


def test_unread_peer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow leader places nothing again; without ``TimePassedEvent.read_lag`` it does."""
    alone = partial(run_all, range(12), late=True, faults=False)
    assert {outcome.counts["epochs"] for outcome in alone()} == {1}
    monkeypatch.setattr(Registry, "set_read_lag", lambda self, behind: None)
    assert sum(outcome.counts["epochs"] > 1 for outcome in alone()) > 6


def test_seeds_are_deterministic() -> None:
    assert run(7) == run(7)
