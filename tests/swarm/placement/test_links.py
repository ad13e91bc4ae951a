from molink.swarm.placement.links import (
    ASSUMED_LATENCY,
    ASSUMED_RATE,
    LOCAL_LATENCY,
    LOCAL_RATE,
    Links,
)


def test_missing_direction_uses_the_other() -> None:
    links = Links()
    assert links.latency_and_rate("a", "b") == (ASSUMED_LATENCY, ASSUMED_RATE)
    links.record_measurement("a", "b", 0.02, None)
    assert (
        links.latency_and_rate("a", "b") == links.latency_and_rate("b", "a") == (0.02, ASSUMED_RATE)
    )
    links.record_measurement("b", "a", 0.03, 2e6)
    assert links.latency_and_rate("a", "b") == (0.02, 2e6)
    assert links.latency_and_rate("b", "a") == (0.03, 2e6)
    links.record_measurement("b", "a", None, 3e6)
    assert links.latency_and_rate("b", "a") == (0.03, 3e6)
    links.drop_peer("b")
    assert links.latency_and_rate("b", "a") == (ASSUMED_LATENCY, ASSUMED_RATE)


def test_jitter_is_no_change() -> None:
    links = Links()
    links.record_measurement("a", "b", 0.002, None)
    assert not links.has_changed
    links.record_measurement("a", "b", 0.020, None)
    assert links.has_changed
    links.mark_placed()
    assert not links.has_changed
    for latency, rate, news in [
        (0.023, None, False),
        (0.017, None, False),
        (0.020, 11e6, False),
        (0.028, None, True),
        (0.028, 20e6, True),
    ]:
        links.record_measurement("a", "b", latency, rate)
        assert links.has_changed == news
        if news:
            links.mark_placed()
    assert not links.has_changed
    assert links.is_measured("b", "a")
    links.record_measurement("a", "c", None, None)
    assert not links.is_measured("a", "c")


def test_devices_of_one_pc_default_to_loopback() -> None:
    links = Links()
    links.set_primary_peer("a2", "a")
    for pair in (("a", "a2"), ("a2", "a")):
        assert links.latency_and_rate(*pair) == (LOCAL_LATENCY, LOCAL_RATE)
    assert links.latency_and_rate("a2", "b") == (ASSUMED_LATENCY, ASSUMED_RATE)
    assert links.copy().latency_and_rate("a", "a2") == (LOCAL_LATENCY, LOCAL_RATE)
    links.record_measurement("a", "a2", 0.002, None)
    assert links.latency_and_rate("a2", "a") == (0.002, LOCAL_RATE)
    links.drop_peer("a2")
    assert links.latency_and_rate("a2", "a") == (ASSUMED_LATENCY, ASSUMED_RATE)
