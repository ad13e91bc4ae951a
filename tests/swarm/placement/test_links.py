from itertools import permutations

from molink.swarm.placement.links import (
    ASSUMED_LATENCY,
    ASSUMED_RATE,
    LOCAL_LATENCY,
    LOCAL_RATE,
    MAX_NEARBY_LATENCY,
    Links,
)


def test_missing_latency_is_that_of_the_other_direction() -> None:
    links = Links()
    assert links.latency_and_rate("a", "b") == (ASSUMED_LATENCY, ASSUMED_RATE)
    links.record_measurement("a", "b", 0.02, None)
    for pair in (("a", "b"), ("b", "a")):
        assert links.latency_and_rate(*pair) == (0.02, ASSUMED_RATE)
    links.record_measurement("b", "a", 0.03, 2e6)
    assert links.latency_and_rate("b", "a") == (0.03, 2e6)
    links.record_measurement("b", "a", None, 3e6)
    assert links.latency_and_rate("b", "a") == (0.03, 3e6)
    links.drop_peer("b")
    assert links.latency_and_rate("b", "a") == (ASSUMED_LATENCY, ASSUMED_RATE)


def test_nearby_link_is_as_fast_in_the_other_direction() -> None:
    links = Links()
    links.record_measurement("a", "b", MAX_NEARBY_LATENCY, 1e8)
    assert links.latency_and_rate("b", "a") == (MAX_NEARBY_LATENCY, 1e8)


def test_distant_link_is_as_fast_as_uplink_and_downlink() -> None:
    links = Links()
    for one, other in permutations("abc", 2):
        links.record_measurement(one, other, 0.02, None)
    links.record_measurement("a", "b", None, 1e6)  # the uplink of a, or the downlink of b
    assert links.latency_and_rate("b", "a")[1] == ASSUMED_RATE
    assert links.latency_and_rate("a", "c")[1] == 1e6
    assert links.latency_and_rate("c", "b")[1] == 1e6
    links.record_measurement("c", "b", None, 4e6)  # so it was the uplink of a
    assert links.latency_and_rate("a", "c")[1] == 1e6
    links.record_measurement("a", "near", 0.001, 1e8)  # doesn't change the uplink
    assert links.latency_and_rate("a", "c")[1] == 1e6
    links.drop_peer("b")
    assert links.latency_and_rate("a", "c")[1] == ASSUMED_RATE


def test_loss_is_known_by_direction() -> None:
    links = Links()
    assert links.loss("a", "b") == 0
    links.record_measurement("a", "b", None, None, 0.01)
    assert (links.loss("a", "b"), links.loss("b", "a")) == (0.01, 0.01)
    assert links.has_changed
    links.mark_placed()
    links.record_measurement("b", "a", 0.001, None, 0.0)
    assert (links.loss("a", "b"), links.loss("b", "a")) == (0.01, 0.0)
    links.record_measurement("a", "b", None, None, 0.011)
    assert not links.has_changed


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
