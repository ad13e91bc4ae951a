from itertools import pairwise

from molink.swarm.controller.backoff import FORGET_AFTER, RETRACT_WINDOW, Backoff


def test_first_failure_is_free_then_delay_doubles() -> None:
    backoff = Backoff()
    delays = [backoff.record_failure("a", "oops", now=0.0) for _ in range(40)]
    first, *others = delays
    assert first == 0.0
    longest = max(others)
    assert longest <= 60, "a repaired peer is back within a minute"
    for earlier, later in pairwise(others):
        assert later == min(2 * earlier, longest)
    assert others[-1] == longest
    assert backoff.is_excluded("a", now=longest - 0.1)
    assert not backoff.is_excluded("a", now=longest)
    assert not backoff.is_excluded("b", now=0.0)


def test_record_clears_after_a_long_time() -> None:
    backoff = Backoff()
    backoff.record_failure("a", "oops", now=0.0)
    assert backoff.record_failure("a", "oops", now=FORGET_AFTER + 1) == 0.0
    assert backoff.record_failure("a", "oops", now=FORGET_AFTER + 2) == 1.0


def test_peer_stays_suspect_longer_than_excluded() -> None:
    backoff = Backoff()
    rests = []
    for _ in range(8):
        delay = backoff.record_failure("a", "oops", now=0.0)
        rests.append(next(s for s in range(100) if not backoff.is_suspect("a", now=float(s))))
        assert rests[-1] >= delay
    assert 0 < rests[0] < rests[1], "the first failure counts, too"
    assert rests == sorted(rests)
    assert rests[-1] <= 60


def test_loss_retracts_a_neighbours_report() -> None:
    backoff = Backoff()
    backoff.record_failure("a", "no sign of life", now=0.0)
    backoff.retract_failure("a", now=4.0)
    assert not backoff.is_suspect("a", now=4.0)
    backoff.record_failure("a", "oops", now=10.0)
    assert backoff.record_failure("a", "no sign of life", now=20.0) == 1.0
    backoff.retract_failure("a", now=21.0)
    assert not backoff.is_excluded("a", now=20.5)
    assert backoff.record_failure("a", "oops", now=30.0) == 1.0
    much_later = 30.0 + RETRACT_WINDOW + 1
    backoff.retract_failure("a", now=much_later)  # the failure still counts
    assert backoff.record_failure("a", "oops", now=much_later) == 2.0


def test_exclusion_is_explained() -> None:
    backoff = Backoff()
    backoff.record_failure("a", "oops", now=0.0)
    assert backoff.explain_exclusion("a", now=0.0) == ""
    backoff.record_failure("a", "no memory", now=0.0)
    why = backoff.explain_exclusion("a", now=0.0)
    assert "2 failures" in why
    assert "no memory" in why
    backoff.drop_peer("a")
    assert backoff.explain_exclusion("a", now=0.0) == ""
