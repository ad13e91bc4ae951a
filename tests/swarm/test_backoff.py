from molink.swarm.backoff import MAX_DELAY, MEMORY, Backoff


def test_the_first_failure_is_free_and_then_it_doubles() -> None:
    backoff = Backoff()
    delays = [backoff.failed("a", "oops", now=0.0) for _ in range(40)]
    assert delays[:9] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert delays[-1] == MAX_DELAY
    assert backoff.blocked("a", now=59.9)
    assert not backoff.blocked("a", now=60.0)
    assert not backoff.blocked("b", now=0.0)


def test_a_long_time_without_failure_clears_the_record() -> None:
    backoff = Backoff()
    backoff.failed("a", "oops", now=0.0)
    assert backoff.suspect("a", now=MEMORY)
    assert not backoff.suspect("a", now=MEMORY + 1)
    assert backoff.failed("a", "oops", now=MEMORY + 1) == 0.0
    assert backoff.failed("a", "oops", now=MEMORY + 2) == 1.0


def test_it_explains_itself() -> None:
    backoff = Backoff()
    backoff.failed("a", "oops", now=0.0)
    assert backoff.explain("a", now=0.0) == ""
    backoff.failed("a", "no memory", now=0.0)
    assert backoff.explain("a", now=0.0) == (
        "left out for 1 s more after 2 failures, the last: no memory"
    )
    backoff.forget("a")
    assert backoff.explain("a", now=0.0) == ""
