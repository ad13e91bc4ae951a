from molink.swarm.controller.backoff import FORGET_AFTER, MAX_DELAY, Backoff


def test_first_failure_is_free_then_delay_doubles() -> None:
    backoff = Backoff()
    delays = [backoff.record_failure("a", "oops", now=0.0) for _ in range(40)]
    assert delays[:9] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert delays[-1] == MAX_DELAY
    assert backoff.is_excluded("a", now=59.9)
    assert not backoff.is_excluded("a", now=60.0)
    assert not backoff.is_excluded("b", now=0.0)


def test_record_clears_after_a_long_time() -> None:
    backoff = Backoff()
    backoff.record_failure("a", "oops", now=0.0)
    assert backoff.record_failure("a", "oops", now=FORGET_AFTER + 1) == 0.0
    assert backoff.record_failure("a", "oops", now=FORGET_AFTER + 2) == 1.0


def test_suspect_period_doubles_up_to_a_minute() -> None:
    backoff = Backoff()
    rests = []
    for _ in range(5):
        backoff.record_failure("a", "oops", now=0.0)
        rests.append(next(s for s in range(100) if not backoff.is_suspect("a", now=float(s))))
    assert rests == [10, 20, 40, 60, 60]


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
    backoff.retract_failure("a", now=90.0)  # much later: the failure counts
    assert backoff.record_failure("a", "oops", now=91.0) == 2.0


def test_exclusion_is_explained() -> None:
    backoff = Backoff()
    backoff.record_failure("a", "oops", now=0.0)
    assert backoff.explain_exclusion("a", now=0.0) == ""
    backoff.record_failure("a", "no memory", now=0.0)
    assert backoff.explain_exclusion("a", now=0.0) == (
        "excluded for 1 s more after 2 failures, the last: no memory"
    )
    backoff.drop_peer("a")
    assert backoff.explain_exclusion("a", now=0.0) == ""
