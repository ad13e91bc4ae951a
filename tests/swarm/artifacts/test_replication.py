import pytest

from molink.facts.model import LayerRange
from molink.swarm.artifacts.replication import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MAX_REST,
    REST_FACTOR,
    ReplicationSchedule,
    has_disk_room,
    layer_distance,
    to_ranges,
)


def test_pause_is_bounded_on_a_slow_line() -> None:
    pace = ReplicationSchedule()
    pace.is_serving = True
    pace.record_duration(0.01, 10.0, fetch=True)
    assert pace.wait_time(10.0, fetch=True) == pytest.approx(REST_FACTOR * 0.01)
    pace.record_duration(2.0, 20.0, fetch=True)
    assert pace.wait_time(20.0, fetch=True) == MAX_REST


@pytest.mark.parametrize(
    ("held", "order"),
    [
        ((2, 4), [2, 3, 4, 1, 5, 0, 6]),
        ((0, 3), [0, 1, 2, 3, 4, 5, 6]),
        ((5, 7), [5, 6, 4, 3, 2, 1, 0]),
        ((0, 0), [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_nearest_layers_are_replicated_first(held: LayerRange, order: list[int]) -> None:
    assert sorted(range(7), key=lambda layer: layer_distance(layer, held)) == order


def test_replication_leaves_free_disk_space() -> None:
    assert has_disk_room(10, 20, 100)
    assert not has_disk_room(10, 19, 100)
    assert has_disk_room(1, 51, 1000)
    assert not has_disk_room(1, 50, 1000)
    assert not has_disk_room(10, -5, 100)


def test_pause_is_a_multiple_of_the_chunk_time() -> None:
    pace = ReplicationSchedule()
    pace.is_serving = True
    assert pace.wait_time(100.0, fetch=True) == 0.0
    pace.record_duration(0.5, 100.5, fetch=False)
    assert pace.wait_time(100.5, fetch=True) == REST_FACTOR * 0.5
    assert pace.wait_time(101.5, fetch=False) == REST_FACTOR * 0.5 - 1.0
    assert pace.wait_time(200.0, fetch=True) == 0.0


def test_nothing_is_fetched_before_a_pipeline_serves() -> None:
    pace = ReplicationSchedule()
    assert pace.wait_time(1.0, fetch=True) is None
    assert pace.wait_time(1.0, fetch=False) == 0.0
    pace.is_serving = True
    assert pace.wait_time(1.0, fetch=True) == 0.0


def test_failures_back_off_and_are_reported_once() -> None:
    pace = ReplicationSchedule()
    pace.is_serving = True
    assert pace.record_failure("no source", 10.0)
    assert pace.wait_time(10.0, fetch=True) == FIRST_PAUSE
    assert not pace.record_failure("no source", 20.0)
    assert pace.wait_time(20.0, fetch=True) == 2 * FIRST_PAUSE
    assert pace.record_failure("the disk is full", 30.0)
    for _ in range(20):
        pace.record_failure("the disk is full", 40.0)
    assert pace.wait_time(40.0, fetch=False) == LONGEST_PAUSE
    pace.retry_now()
    assert pace.wait_time(40.0, fetch=True) == 0.0
    assert not pace.record_failure("the disk is full", 50.0)
    assert pace.wait_time(50.0, fetch=True) == LONGEST_PAUSE
    pace.reset_backoff()
    assert pace.record_failure("the disk is full", 60.0)
    assert pace.wait_time(60.0, fetch=True) == FIRST_PAUSE


def test_ranges_of_layers() -> None:
    assert to_ranges(()) == ()
    assert to_ranges({4, 0, 1, 6, 5}) == ((0, 2), (4, 7))
    assert to_ranges(range(0, 40, 2), most=2) == ((0, 1), (2, 3))
