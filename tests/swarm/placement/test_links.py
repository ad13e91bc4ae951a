from molink.swarm.placement.links import (
    ASSUMED_LATENCY,
    ASSUMED_RATE,
    LOCAL_LATENCY,
    LOCAL_RATE,
    Links,
)


def test_what_one_direction_lacks_the_other_one_tells() -> None:
    links = Links()
    assert links.between("a", "b") == (ASSUMED_LATENCY, ASSUMED_RATE)
    links.measured("a", "b", 0.02, None)
    assert links.between("a", "b") == links.between("b", "a") == (0.02, ASSUMED_RATE)
    links.measured("b", "a", 0.03, 2e6)
    assert links.between("a", "b") == (0.02, 2e6)
    assert links.between("b", "a") == (0.03, 2e6)
    links.measured("b", "a", None, 3e6)
    assert links.between("b", "a") == (0.03, 3e6)
    links.forget("b")
    assert links.between("b", "a") == (ASSUMED_LATENCY, ASSUMED_RATE)


def test_jitter_is_no_news() -> None:
    links = Links()
    links.measured("a", "b", 0.002, None)
    assert not links.news
    links.measured("a", "b", 0.020, None)
    assert links.news
    links.placed()
    assert not links.news
    for latency, rate, news in [
        (0.023, None, False),
        (0.017, None, False),
        (0.020, 11e6, False),
        (0.028, None, True),
        (0.028, 20e6, True),
    ]:
        links.measured("a", "b", latency, rate)
        assert links.news == news
        if news:
            links.placed()
    assert not links.news
    assert links.known("b", "a")
    links.measured("a", "c", None, None)
    assert not links.known("a", "c")


def test_devices_of_one_pc_are_near_until_that_is_measured() -> None:
    links = Links()
    links.located("a2", "a")
    for pair in (("a", "a2"), ("a2", "a")):
        assert links.between(*pair) == (LOCAL_LATENCY, LOCAL_RATE)
    assert links.between("a2", "b") == (ASSUMED_LATENCY, ASSUMED_RATE)
    assert links.copy().between("a", "a2") == (LOCAL_LATENCY, LOCAL_RATE)
    links.measured("a", "a2", 0.002, None)
    assert links.between("a2", "a") == (0.002, LOCAL_RATE)
    links.forget("a2")
    assert links.between("a2", "a") == (ASSUMED_LATENCY, ASSUMED_RATE)
