"""What a stage believes of its host memory, and of that of others."""

from array import array
from typing import Any

import pytest

from molink.ring.host_memory import NO_HOST_MEMORY, HostBlockLedger, HostMemory, HostMemoryReports
from molink.ring.scoreboard import Scoreboard
from molink.ring.tracked_requests import ScoreboardLimits
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    Admit,
    BlockTable,
    RequestSlice,
    SamplingParams,
    SwapIn,
    SwapOut,
    Tombstone,
    Volume,
)
from molink.wire.messages.ring_reports import HostMemoryReport

LIMITS = ScoreboardLimits(blocks=8, block_size=4, host_blocks=4)


def ids(*numbers: int) -> tuple[Payload, bytes]:
    """Blocks, then host blocks."""
    return Payload("i32", (2, len(numbers) // 2)), array("i", numbers).tobytes()


def board() -> Scoreboard:
    """Request 0 has the blocks 2 and 5."""
    found = Scoreboard(LIMITS)
    found.on_message(Admit(1, 0, SamplingParams(), 3), None, 0.0)
    found.on_message(BlockTable(2, 0, Payload("i32", (2,))), array("i", [2, 5]).tobytes(), 0.0)
    found.complete_volumes((), 0.0)
    return found


def refused(found: Scoreboard) -> bool:
    (control,) = found.complete_volumes((), 0.0)
    found.validate()
    return isinstance(control.body, Tombstone)


@pytest.mark.parametrize(
    "numbers",
    [
        (2, 5, 0, 0),
        (2, 2, 0, 1),
        (2, 8, 0, 1),
        (2, 5, 0, 4),
        (2, 5, -1, 1),
        (-1, 5, 0, 1),
        (2, 5, 6, 0, 1, 2),
        (),
    ],
)
def test_blocks_that_make_no_sense_are_not_copied_out(numbers: tuple[int, ...]) -> None:
    found = board()
    payload, data = ids(*numbers)
    found.on_message(SwapOut(3, 0, payload), data, 0.0)
    assert refused(found)
    assert found.counters["bad_swaps"] == 1


@pytest.mark.parametrize(
    ("payload", "data"),
    [
        (Payload("i32", (4,)), b"\0" * 16),
        (Payload("f32", (2, 1)), b"\0" * 8),
        (Payload("i32", (2, 1)), b"\0" * 4),
        (Payload("i32", (2, 1)), None),
    ],
)
def test_a_payload_that_is_none_is_refused(payload: Payload, data: Any) -> None:
    found = board()
    found.on_message(SwapOut(3, 0, payload), data, 0.0)
    assert refused(found)


def test_of_one_that_is_over_or_runs_nothing_is_copied() -> None:
    found = board()
    payload, data = ids(2, 0)
    found.on_message(SwapOut(3, 7, payload), data, 0.0)
    assert refused(found)
    found.on_message(Volume(4, False, (RequestSlice(0, 3, 1, 2),), Payload("i32", (1,))), (9,), 0.0)
    assert found.next_step(0.0) is not None
    found.on_message(SwapOut(5, 0, payload), data, 0.0)
    assert refused(found)
    found.complete_volumes((4,), 0.0)
    found.on_message(SwapOut(6, 0, payload), data, 0.0)
    assert not refused(found)


@pytest.mark.parametrize(
    ("filled", "numbers", "runs"),
    [
        (3, (2, 5, 0, 1), True),
        (9, (2, 5, 0, 1), False),  # another order has filled them, or none
        (3, (2, 5, 0, 2), False),
        (3, (2, 5, 0, 0), False),
        (3, (2, 8, 0, 1), False),
    ],
)
def test_rows_run_only_if_their_blocks_came_back(
    filled: int, numbers: tuple[int, ...], runs: bool
) -> None:
    found = board()
    payload, data = ids(2, 5, 0, 1)
    found.on_message(SwapOut(3, 0, payload), data, 0.0)
    assert not refused(found)
    found.on_message(Admit(4, 1, SamplingParams(), 3), None, 0.0)
    found.on_message(BlockTable(5, 1, Payload("i32", (2,))), array("i", [2, 5]).tobytes(), 0.0)
    found.complete_volumes((), 0.0)
    payload, data = ids(*numbers)
    found.on_message(SwapIn(6, 1, filled, payload), data, 0.0)
    assert refused(found) is not runs
    found.on_message(Volume(7, False, (RequestSlice(1, 7, 1, 6),), Payload("i32", (1,))), (9,), 0.0)
    assert (found.next_step(0.0) is not None) is runs


def test_what_has_come_back_is_there_no_more() -> None:
    ledger = HostBlockLedger(4)
    assert ledger.fill_blocks(3, (0, 1))
    assert ledger.drain_blocks(3, (1,))
    assert not ledger.drain_blocks(3, (0, 1))
    assert ledger.drain_blocks(3, (0,))


def test_the_smallest_stage_counts_once_all_are_known() -> None:
    rounds = HostMemoryReports(0, 3)
    report = rounds.make_report(HostMemory(40, 0.001))
    assert report == HostMemoryReport(0, 40, 0.001)
    assert rounds.accept_report(HostMemoryReport(1, 30, 0.004))
    assert rounds.common_memory == NO_HOST_MEMORY
    assert rounds.accept_report(HostMemoryReport(2, 50, 0.002))
    assert rounds.common_memory == HostMemory(30, 0.004)
    assert not rounds.accept_report(HostMemoryReport(0, 1, 0.0))  # its own
    assert not rounds.accept_report(HostMemoryReport(3, 1, 0.0))
    assert not rounds.accept_report(HostMemoryReport(1, 1, float("nan")))
    rounds.accept_report(HostMemoryReport(1, 10, 0.0))  # the first word counts
    assert rounds.common_memory.blocks == 30
