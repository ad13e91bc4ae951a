import pytest

from molink.swarm.membership.loss_meter import LossMeter


def test_late_handshakes_are_losses() -> None:
    meter = LossMeter()
    for _ in range(2):
        meter.record_handshakes([0.03, 1.03, 0.031, 0.9])
        assert meter.loss is None
    meter.record_handshakes([1.2, 0.03, 0.03, 0.03])
    assert meter.loss == pytest.approx(3 / 12 / 2)


def test_slow_path_loses_nothing() -> None:
    meter = LossMeter()
    for _ in range(9):
        meter.record_handshakes([1.4, 1.5, 2.2])
    assert meter.loss is None


def test_old_losses_count_less() -> None:
    meter = LossMeter()
    meter.record_handshakes([0.03] * 1000 + [1.03] * 20)
    before = meter.loss
    for _ in range(4):
        meter.record_handshakes([0.03] * 1000)
    assert before is not None
    assert meter.loss is None or meter.loss < before / 4
