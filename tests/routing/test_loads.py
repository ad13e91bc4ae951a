"""What a pipeline has to do: exact seconds."""

from molink.routing.loads import Loads, Routed


def left(loads: Loads, now: float) -> float:
    return loads.of("a", now).left_s(now)


def test_what_is_computed_now_is_done_in_part_and_one_after_the_other() -> None:
    loads = Loads(100.0)
    loads.place("first", Routed("a", 10.0, prefill_s=8.0, answer_s=1.0))
    loads.place("second", Routed("a", 12.0, prefill_s=4.0, answer_s=1.0))
    assert left(loads, 12.0) == 12.0
    assert left(loads, 30.0) == 6.0  # late: it can't take less than nothing
    loads.began("first", 20.0)
    assert left(loads, 21.0) == 5.0
    loads.over("first", 9, 22.0)
    loads.over("second", 0, 22.0)
    assert left(loads, 23.0) == 0.0


def test_what_a_pipeline_served_before_it_was_gone_is_not_taken_from_its_next_load() -> None:
    loads = Loads(100.0)
    loads.place("lost", Routed("a", 0.0, prefill_s=8.0, answer_s=1.0))
    loads.forget("a")
    loads.place("next", Routed("a", 1.0, prefill_s=2.0, answer_s=1.0))
    loads.over("lost", 3, 1.0)
    assert left(loads, 1.0) == 3.0
    assert len(loads) == 1
