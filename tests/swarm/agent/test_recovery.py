"""Phases of a recovery: contiguous and complete."""

import pytest

from molink.swarm.agent.recovery import RECOVERY_PHASES, RecoveryTimer


def test_phases_of_a_lost_worker() -> None:
    recovery = RecoveryTimer()
    recovery.start_outage(10.0, 1000.0)
    recovery.start_outage(10.1, 1000.1)  # the coordinator also reports it
    assert recovery.is_active
    recovery.end_phase("decided", 10.3)
    recovery.end_phase("files", 10.4)
    recovery.record_load(0.5, 0.25, 12.4)
    recovery.end_phase("others", 12.5)
    recovery.end_phase("formed", 12.75)
    said = recovery.finish_recovery(13.0)
    expected = [0.3, 0.1, 1.25, 0.5, 0.25, 0.1, 0.25, 0.25]
    assert [recovery.latest[phase] for phase in RECOVERY_PHASES] == pytest.approx(expected)
    assert not recovery.is_active
    assert said is not None
    assert said.startswith("served again after 3.00 s: decided 0.30, files 0.10, process 1.25,")
    assert recovery.counters["recoveries"] == 1
    assert recovery.counters["recovery_weights_seconds"] == 0.5
    assert recovery.gauges["recovery_noticed_timestamp_seconds"] == 1000.0
    assert recovery.gauges["recovery_last_formed_seconds"] == pytest.approx(0.25)


def test_surviving_stage_only_waits_for_others() -> None:
    recovery = RecoveryTimer()
    recovery.start_outage(0.0, 0.0)
    recovery.end_phase("decided", 1.0)
    recovery.end_phase("others", 3.0)
    recovery.end_phase("formed", 3.5)
    recovery.finish_recovery(4.0)
    assert recovery.latest["process"] == recovery.latest["weights"] == 0.0
    assert recovery.latest["others"] == 2.0


def test_repeated_phase_is_added_up() -> None:
    recovery = RecoveryTimer()
    for decided in (1.0, 6.0):
        recovery.start_outage(0.0, 0.0)
        recovery.end_phase("decided", decided)
        recovery.end_phase("others", decided + 1)
    recovery.finish_recovery(8.0)
    assert recovery.latest["decided"] == 5.0
    assert sum(recovery.latest.values()) == 8.0


def test_unnoticed_outage_is_not_counted() -> None:
    recovery = RecoveryTimer()
    recovery.end_phase("decided", 1.0)
    recovery.record_load(1.0, 1.0, 3.0)
    assert recovery.finish_recovery(4.0) is None
    assert recovery.count == 0
    assert set(recovery.latest.values()) == {0.0}


def test_load_parts_never_exceed_the_phase() -> None:
    recovery = RecoveryTimer()
    recovery.start_outage(0.0, 0.0)
    recovery.record_load(9.0, 1.5, 2.0)
    recovery.finish_recovery(2.0)
    assert recovery.latest["profile"] == 1.5
    assert recovery.latest["weights"] == 0.5
    assert recovery.latest["process"] == 0.0
