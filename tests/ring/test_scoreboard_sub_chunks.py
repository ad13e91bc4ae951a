"""Exact decisions of a scoreboard about volumes that arrive and run in pieces."""

from dataclasses import dataclass

import pytest

from molink.errors import InvariantError
from molink.ring.scoreboard import Scoreboard, ScoreboardLimits
from molink.ring.step import Step, StepInput
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    Admit,
    Release,
    RequestSlice,
    SamplingParams,
    Tombstone,
    Volume,
)


@dataclass(frozen=True)
class Tens:
    """Pieces of ten rows, less only at the end."""

    def next_rows(self, here: int, coming: int, riding: int, pace: float) -> int:
        return 10 if here > 10 else here if not coming else 10 * (here == 10)


def admit(seq: int, request: int) -> Admit:
    return Admit(seq, request, SamplingParams(), 4)


def rows(request: int, after: int, count: int, start: int = 0) -> RequestSlice:
    return RequestSlice(request, start, count, after, (request,), True)


def volume(seq: int, *groups: RequestSlice, prefill: bool = True) -> Volume:
    count = sum(group.count for group in groups)
    return Volume(seq, prefill, groups, Payload("u8", (count, 1)))


def board_with(*requests: int, **limits: int) -> Scoreboard:
    """Requests of these ids are admitted, by seqs 1, 2, …"""
    board = Scoreboard(ScoreboardLimits(**limits), Tens())
    for seq, request in enumerate(requests, 1):
        board.on_message(admit(seq, request), None, 0.0)
    board.complete_volumes((), 0.0)
    return board


def arrive(board: Scoreboard, body: Release | Volume, arrived: int | None = None) -> list:
    """A message comes; returns the bodies to be forwarded."""
    data = bytearray(range(body.payload.nbytes)) if isinstance(body, Volume) else None
    board.on_message(body, data, 0.0, arrived)
    board.validate()
    return [control.body for control in board.complete_volumes((), 0.0)]


def extend(board: Scoreboard, seq: int, arrived: int) -> None:
    board.extend_volume(seq, arrived, 0.0)
    board.validate()
    assert board.complete_volumes((), 0.0) == []


def take(board: Scoreboard) -> Step:
    work = board.next_step(0.0)
    assert work is not None
    board.validate()
    return work


def ran(board: Scoreboard, *seqs: int) -> list:
    out = [control.body for control in board.complete_volumes(seqs, 0.0)]
    board.validate()
    return out


def sizes(ready: StepInput | None) -> list[tuple[int, int, int]]:
    """Request, start and count of a piece's groups."""
    assert ready is not None
    return [(group.request, group.start, group.count) for group in ready.volume.slices]


def test_seq_completes_with_the_last_sub_chunk() -> None:
    board = board_with(0, 1)
    whole = volume(3, rows(0, 1, 4), rows(1, 2, 21))
    arrive(board, whole, 4)
    arrive(board, volume(4, rows(0, 3, 1, start=4), prefill=False))
    assert (board.num_queued, board.num_waiting) == (0, 2), "both wait for what is on its way"
    assert board.next_step(0.0) is None
    extend(board, 3, 12)
    assert board.num_queued == 1
    work = take(board)
    assert work.seqs == (3,)
    assert sizes(work.prefill) == [(0, 0, 4), (1, 0, 6)]
    assert work.prefill.full_volume is whole
    assert (work.prefill.first_row, work.prefill.is_last) == (0, False)
    assert bytes(work.prefill.data) == bytes(range(10))
    extend(board, 3, 25)
    assert board.next_step(0.0) is None, "one piece of a volume at a time"
    assert ran(board, 3) == []
    assert board.last_completed_seq == 1
    assert sizes(take(board).prefill) == [(1, 6, 10)]
    ran(board, 3)
    last = take(board)
    assert sizes(last.prefill) == [(1, 16, 5)]
    assert last.prefill.is_last
    assert (board.num_queued, board.num_waiting) == (1, 1)
    ran(board, 3)
    assert board.last_completed_seq == 3
    assert take(board).seqs == (4,)


def test_decode_rows_are_never_split() -> None:
    board = board_with(0, 1)
    arrive(board, volume(4, rows(0, 1, 2), prefill=False), 1)
    arrive(board, volume(3, rows(1, 2, 15)))
    assert take(board).seqs == (3,)
    ran(board, 3)
    extend(board, 4, 2)
    assert take(board).seqs == (4, 3)


def test_later_volume_runs_while_rows_are_awaited() -> None:
    board = board_with(0, 1)
    arrive(board, volume(3, rows(0, 1, 30)), 10)
    arrive(board, volume(4, rows(1, 2, 5)))
    assert take(board).seqs == (3,)
    ran(board, 3)
    assert take(board).seqs == (4,)
    extend(board, 3, 20)
    assert take(board).seqs == (3,), "beside another one that runs"
    ran(board, 4)
    ran(board, 3)


def test_unstarted_volume_drops_finished_requests() -> None:
    board = board_with(0, 1, 2)
    arrive(board, volume(4, rows(0, 1, 5), rows(1, 2, 5), rows(2, 3, 20)), 12)
    assert arrive(board, Release(5, 1, after_seq=4)) == []
    assert board.next_step(0.0) is None, "seven rows are left of those that are here"
    extend(board, 4, 16)
    work = take(board)
    assert sizes(work.prefill) == [(0, 0, 5), (2, 0, 5)]
    assert [group.request for group in work.prefill.full_volume.slices] == [0, 2]
    assert (bytes(work.prefill.data), work.prefill.row_indices) == (
        bytes(range(15)),
        (*range(5), *range(10, 15)),
    )
    extend(board, 4, 30)
    ran(board, 4)
    work = take(board)
    assert (sizes(work.prefill), work.prefill.row_indices) == ([(2, 5, 10)], None)
    ran(board, 4)
    take(board)
    assert ran(board, 4) == [Release(5, 1, after_seq=4)]
    assert board.counters == {"dropped_slices": 1}


def test_release_waits_for_started_volumes() -> None:
    board = board_with(0, 1)
    arrive(board, volume(3, rows(0, 1, 12), rows(1, 2, 12)), 10)
    take(board)
    release = Release(4, 1, after_seq=3)
    assert arrive(board, release) == []
    ran(board, 3)
    assert arrive(board, volume(5, rows(1, 3, 1, start=12))) == [Tombstone(5)]
    extend(board, 3, 24)
    assert sizes(take(board).prefill) == [(0, 10, 2), (1, 0, 8)], "its rows have been announced"
    assert ran(board, 3) == []
    take(board)
    assert ran(board, 3) == [release]
    assert board.counters == {"dropped_slices": 1, "dropped_volumes": 1}


def test_incomplete_release_waits_for_started_volumes() -> None:
    board = board_with(0)
    arrive(board, volume(2, rows(0, 1, 20)), 10)
    take(board)
    ran(board, 2)
    release = Release(3, 0, after_seq=1)
    assert arrive(board, release) == []
    extend(board, 2, 20)
    take(board)
    assert ran(board, 2) == [release]


def test_late_rows_of_a_dropped_volume_are_ignored() -> None:
    board = board_with(0)
    arrive(board, volume(2, rows(0, 1, 20)), 9)
    release = Release(3, 0, after_seq=2)
    assert arrive(board, release) == [Tombstone(2), release]
    extend(board, 2, 20)
    assert board.next_step(0.0) is None
    assert board.num_refused == 0


def test_invalid_fragments_are_counted_and_ignored() -> None:
    board = board_with(0)
    arrive(board, volume(2, rows(0, 1, 20)), 9)
    for seq, arrived in ((2, 9), (2, 5), (2, 21), (7, 3)):
        extend(board, seq, arrived)
    assert board.counters == {"bad_parts": 4}
    assert board.num_refused == 4
    assert board.next_step(0.0) is None
    for arrived in (0, -1, 3):
        assert arrive(board, volume(8 + arrived, rows(0, 1, 2)), arrived) == [
            Tombstone(8 + arrived)
        ]


def test_rows_with_incomplete_predecessors_are_dropped() -> None:
    board = board_with(0)
    arrive(board, volume(2, rows(0, 1, 20)), 10)
    take(board)
    ran(board, 2)
    arrive(board, volume(3, rows(0, 1, 1, start=20), prefill=False))
    assert board.next_step(0.0) is None
    assert board.counters["invalid_slices"] == 1


def test_waiting_bytes_are_freed_with_the_last_sub_chunk() -> None:
    board = board_with(0, 1, waiting_bytes=30)
    arrive(board, volume(3, rows(0, 1, 20)), 10)
    take(board)
    ran(board, 3)
    assert arrive(board, volume(5, rows(1, 2, 11))) == [Tombstone(5)]
    extend(board, 3, 20)
    take(board)
    assert arrive(board, volume(6, rows(1, 2, 30))) == []


def test_only_remainders_are_recognized() -> None:
    board = board_with(0, 1)
    arrive(board, volume(3, rows(0, 1, 20)))
    assert not board.has_only_remainders
    take(board)
    ran(board, 3)
    assert board.has_only_remainders
    arrive(board, volume(4, rows(1, 2, 1), prefill=False))
    assert not board.has_only_remainders


def test_sub_chunk_completes_once() -> None:
    board = board_with(0)
    arrive(board, volume(2, rows(0, 1, 20)))
    take(board)
    ran(board, 2)
    with pytest.raises(InvariantError, match="seq 2 completed but not taken"):
        board.complete_volumes((2,), 0.0)
