from molink.util.timeouts import TIMEOUTS


def test_idle_and_new_stages_get_more_time() -> None:
    assert TIMEOUTS.stage < TIMEOUTS.idle_stage < TIMEOUTS.new_stage
    assert TIMEOUTS.suspected_worker < TIMEOUTS.worker
