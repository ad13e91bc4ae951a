"""When failing steps mean a broken device, and when only a batch that was too large."""

from molink.ring.patience import LARGE_STEPS, MAX_FAILED_STEPS, Patience, StepSize
from molink.wire.messages.base import Payload
from molink.wire.messages.data import Rows, Volume

SMALL, LARGE = StepSize(4, 100), StepSize(512, 512)


def test_failures_one_after_another_end_it() -> None:
    patience = Patience()
    patience.worked(LARGE)
    for _ in range(MAX_FAILED_STEPS - 1):
        patience.failed(SMALL, out_of_memory=False)
        assert not patience.exhausted
    patience.failed(SMALL, out_of_memory=False)
    assert patience.exhausted
    assert patience.failures == MAX_FAILED_STEPS


def test_a_step_that_works_forgives_all_before_it() -> None:
    patience = Patience()
    for _ in range(10 * MAX_FAILED_STEPS):
        patience.failed(SMALL, out_of_memory=False)
        patience.worked(SMALL)
    assert not patience.exhausted
    assert patience.failures == 0


def test_large_batches_that_run_out_of_memory_are_their_own_fault() -> None:
    patience = Patience()
    patience.worked(SMALL)
    for _ in range(MAX_FAILED_STEPS * LARGE_STEPS - 1):
        patience.failed(LARGE, out_of_memory=True)
        assert not patience.exhausted


def test_but_not_for_ever() -> None:
    patience = Patience()
    for _ in range(MAX_FAILED_STEPS * LARGE_STEPS):
        patience.failed(LARGE, out_of_memory=True)
    assert patience.exhausted


def test_memory_that_is_gone_for_steps_which_worked_before_ends_it_soon() -> None:
    patience = Patience()
    patience.worked(LARGE)
    for _ in range(MAX_FAILED_STEPS):
        patience.failed(SMALL, out_of_memory=True)
    assert patience.exhausted


def test_a_step_is_larger_if_it_has_more_rows_or_a_longer_context() -> None:
    volume = Volume(3, False, (Rows(0, 99, 1, 1), Rows(1, 7, 3, 1)), Payload("i32", (4,)))
    assert StepSize.of([volume]) == StepSize(4, 110)
    assert StepSize.of([]) == StepSize()
    worked = StepSize(4, 110)
    assert not worked.exceeds(worked)
    assert StepSize(5, 5).exceeds(worked)
    assert StepSize(1, 111).exceeds(worked)
    assert worked.merged(StepSize(5, 5)) == StepSize(5, 110)
