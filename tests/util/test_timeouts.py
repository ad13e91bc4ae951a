import pytest

from molink.util.timeouts import TIMEOUTS, SilenceLimit


def test_idle_and_new_stages_get_more_time() -> None:
    assert TIMEOUTS.stage < TIMEOUTS.idle_stage < TIMEOUTS.new_stage
    assert TIMEOUTS.suspected_worker < TIMEOUTS.worker


def hear(limit: SilenceLimit, interval: float, start: float, stop: float) -> None:
    now = start
    while now <= stop:
        limit.on_heard(now)
        now += interval


@pytest.mark.parametrize(
    ("interval", "seconds"),
    [(0.1, TIMEOUTS.shortest), (0.5, TIMEOUTS.shortest), (0.75, 2.25), (1.0, 3.0)],
)
def test_limit_follows_the_longest_wait(interval: float, seconds: float) -> None:
    limit = SilenceLimit(3.0)
    hear(limit, interval, 0.0, 4.5)
    assert limit.seconds == 3.0, "not known long enough"
    hear(limit, interval, 4.5 + interval, 20.0)
    assert limit.seconds == pytest.approx(seconds)


def test_one_long_wait_is_remembered_for_a_while() -> None:
    limit = SilenceLimit(3.0)
    hear(limit, 0.5, 0.0, 20.0)
    hear(limit, 0.5, 22.0, 45.0)
    assert limit.seconds == 3.0
    hear(limit, 0.5, 45.5, 100.0)
    assert limit.seconds == TIMEOUTS.shortest


def test_a_loss_is_no_wait() -> None:
    limit = SilenceLimit(3.0)
    hear(limit, 0.5, 0.0, 20.0)
    limit.on_heard(26.0)
    assert limit.seconds == TIMEOUTS.shortest


def test_restart_gives_the_full_time_and_keeps_waits() -> None:
    limit = SilenceLimit(3.0)
    hear(limit, 0.5, 0.0, 20.0)
    limit.restart()
    assert limit.seconds == 3.0
    hear(limit, 0.5, 20.75, 25.5)
    assert limit.seconds == 3.0
    hear(limit, 0.5, 25.75, 26.0)
    assert limit.seconds == 2.25, "the wait until it was heard again"
