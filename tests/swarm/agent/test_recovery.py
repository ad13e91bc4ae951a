"""Phases of an interruption: one begins where another ends, and nothing is left out."""

import pytest

from molink.swarm.agent.recovery import PHASES, Recovery


def test_the_phases_of_a_worker_that_was_lost() -> None:
    recovery = Recovery()
    recovery.noticed(10.0, 1000.0)
    recovery.noticed(10.1, 1000.1)  # the coordinator says so too
    assert recovery.under_way
    recovery.ended("decided", 10.3)
    recovery.ended("files", 10.4)
    recovery.loaded(0.5, 0.25, 12.4)
    recovery.ended("others", 12.5)
    recovery.ended("formed", 12.75)
    said = recovery.over(13.0)
    expected = [0.3, 0.1, 1.25, 0.5, 0.25, 0.1, 0.25, 0.25]
    assert [recovery.last[phase] for phase in PHASES] == pytest.approx(expected)
    assert not recovery.under_way
    assert said is not None
    assert said.startswith("served again after 3.00 s: decided 0.30, files 0.10, process 1.25,")
    assert recovery.counters["recoveries"] == 1
    assert recovery.counters["recovery_weights_seconds"] == 0.5
    assert recovery.gauges["recovery_noticed_timestamp_seconds"] == 1000.0
    assert recovery.gauges["recovery_last_formed_seconds"] == pytest.approx(0.25)


def test_a_stage_that_stays_only_waits_for_the_others() -> None:
    recovery = Recovery()
    recovery.noticed(0.0, 0.0)
    recovery.ended("decided", 1.0)
    recovery.ended("others", 3.0)
    recovery.ended("formed", 3.5)
    recovery.over(4.0)
    assert recovery.last["process"] == recovery.last["weights"] == 0.0
    assert recovery.last["others"] == 2.0


def test_a_second_failure_on_the_way_is_added_up() -> None:
    recovery = Recovery()
    for decided in (1.0, 6.0):
        recovery.noticed(0.0, 0.0)
        recovery.ended("decided", decided)
        recovery.ended("others", decided + 1)
    recovery.over(8.0)
    assert recovery.last["decided"] == 5.0
    assert sum(recovery.last.values()) == 8.0


def test_what_nobody_waits_for_is_no_recovery() -> None:
    recovery = Recovery()
    recovery.ended("decided", 1.0)
    recovery.loaded(1.0, 1.0, 3.0)
    assert recovery.over(4.0) is None
    assert recovery.count == 0
    assert set(recovery.last.values()) == {0.0}


def test_parts_are_never_longer_than_the_whole() -> None:
    recovery = Recovery()
    recovery.noticed(0.0, 0.0)
    recovery.loaded(9.0, 1.5, 2.0)
    recovery.over(2.0)
    assert recovery.last["profile"] == 1.5
    assert recovery.last["weights"] == 0.5
    assert recovery.last["process"] == 0.0
