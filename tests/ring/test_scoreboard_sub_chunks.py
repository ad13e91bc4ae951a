"""Exact decisions of a scoreboard on volumes that arrive and run in sub-chunks."""

from dataclasses import dataclass

import pytest

from molink.errors import InvariantError
from molink.facts.images import ImageSpan
from molink.ring.scoreboard import Scoreboard, ScoreboardLimits
from molink.ring.step import Step, StepInput
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    Admit,
    PromptImages,
    Release,
    RequestSlice,
    SamplingParams,
    Tombstone,
    Volume,
)


@dataclass(frozen=True)
class Tens:
    """Sub-chunks of ten rows; only a volume's last one has fewer."""

    def next_rows(self, here: int, coming: int, piggybacked: int, slowdown: float) -> int:
        return 10 if here > 10 else here if not coming else 10 * (here == 10)


def admit(seq: int, request: int) -> Admit:
    return Admit(seq, request, SamplingParams(), 4)


def rows(request: int, after: int, count: int, start: int = 0) -> RequestSlice:
    return RequestSlice(request, start, count, after, (request,), True)


def volume(seq: int, *slices: RequestSlice, prefill: bool = True) -> Volume:
    count = sum(request_slice.count for request_slice in slices)
    return Volume(seq, prefill, slices, Payload("u8", (count, 1)))


def scoreboard_with(*requests: int, **limits: int) -> Scoreboard:
    """A scoreboard to which these requests were admitted, by seqs 1, 2, …"""
    scoreboard = Scoreboard(ScoreboardLimits(**limits), Tens())
    for seq, request in enumerate(requests, 1):
        scoreboard.on_message(admit(seq, request), None, 0.0)
    scoreboard.complete_volumes((), 0.0)
    return scoreboard


def arrive(scoreboard: Scoreboard, body: Release | Volume, arrived: int | None = None) -> list:
    """Deliver a message; returns the bodies to forward."""
    data = bytearray(range(body.payload.nbytes)) if isinstance(body, Volume) else None
    scoreboard.on_message(body, data, 0.0, arrived)
    scoreboard.validate()
    return [control.body for control in scoreboard.complete_volumes((), 0.0)]


def extend(scoreboard: Scoreboard, seq: int, arrived: int) -> None:
    scoreboard.extend_volume(seq, arrived, 0.0)
    scoreboard.validate()
    assert scoreboard.complete_volumes((), 0.0) == []


def take(scoreboard: Scoreboard) -> Step:
    work = scoreboard.next_step(0.0)
    assert work is not None
    scoreboard.validate()
    return work


def ran(scoreboard: Scoreboard, *seqs: int) -> list:
    out = [control.body for control in scoreboard.complete_volumes(seqs, 0.0)]
    scoreboard.validate()
    return out


def sizes(ready: StepInput | None) -> list[tuple[int, int, int]]:
    """Request, start and count of a sub-chunk's groups."""
    assert ready is not None
    return [
        (request_slice.request, request_slice.start, request_slice.count)
        for request_slice in ready.volume.slices
    ]


def test_seq_completes_with_the_last_sub_chunk() -> None:
    scoreboard = scoreboard_with(0, 1)
    whole = volume(3, rows(0, 1, 4), rows(1, 2, 21))
    arrive(scoreboard, whole, 4)
    arrive(scoreboard, volume(4, rows(0, 3, 1, start=4), prefill=False))
    assert (scoreboard.num_queued, scoreboard.num_waiting) == (0, 2), (
        "both wait for what is on its way"
    )
    assert scoreboard.next_step(0.0) is None
    extend(scoreboard, 3, 12)
    assert scoreboard.num_queued == 1
    work = take(scoreboard)
    assert work.seqs == (3,)
    assert sizes(work.prefill) == [(0, 0, 4), (1, 0, 6)]
    assert work.prefill.full_volume is whole
    assert (work.prefill.first_row, work.prefill.is_last) == (0, False)
    assert bytes(work.prefill.data) == bytes(range(10))
    extend(scoreboard, 3, 25)
    assert scoreboard.next_step(0.0) is None, "one piece of a volume at a time"
    assert ran(scoreboard, 3) == []
    assert scoreboard.last_completed_seq == 1
    assert sizes(take(scoreboard).prefill) == [(1, 6, 10)]
    ran(scoreboard, 3)
    last = take(scoreboard)
    assert sizes(last.prefill) == [(1, 16, 5)]
    assert last.prefill.is_last
    assert (scoreboard.num_queued, scoreboard.num_waiting) == (1, 1)
    ran(scoreboard, 3)
    assert scoreboard.last_completed_seq == 3
    assert take(scoreboard).seqs == (4,)


@pytest.mark.parametrize("whole", [True, False])
def test_images_are_not_cut(whole: bool) -> None:
    """Rows 6 to 18 of one request and 7 to 9 of the other are images."""
    scoreboard = scoreboard_with(0, 1)
    for seq, request, span in (
        (3, 0, ImageSpan(6, 12, 8, 8)),
        (4, 1, ImageSpan(7, 2, 8, 8)),
    ):
        scoreboard.on_message(PromptImages(seq, request, (span,), whole), None, 0.0)
    scoreboard.complete_volumes((), 0.0)
    arrive(scoreboard, volume(5, rows(0, 3, 20), rows(1, 4, 12)), 12)
    found = [sizes(take(scoreboard).prefill)]
    ran(scoreboard, 5)
    if not whole:
        assert found == [[(0, 0, 10)]]
        return
    assert scoreboard.next_step(0.0) is None, "the image has not arrived"
    for arrived in (17, 28, 32):
        extend(scoreboard, 5, arrived)
        while (step := scoreboard.next_step(0.0)) is not None:
            found.append(sizes(step.prefill))
            ran(scoreboard, 5)
    assert found == [
        [(0, 0, 6)],
        [(0, 6, 12)],
        [(0, 18, 2), (1, 0, 7)],
        [(1, 7, 5)],
    ]


def test_decode_rows_are_never_split() -> None:
    scoreboard = scoreboard_with(0, 1)
    arrive(scoreboard, volume(4, rows(0, 1, 2), prefill=False), 1)
    arrive(scoreboard, volume(3, rows(1, 2, 15)))
    assert take(scoreboard).seqs == (3,)
    ran(scoreboard, 3)
    extend(scoreboard, 4, 2)
    assert take(scoreboard).seqs == (4, 3)


def test_later_volume_runs_while_rows_are_awaited() -> None:
    scoreboard = scoreboard_with(0, 1)
    arrive(scoreboard, volume(3, rows(0, 1, 30)), 10)
    arrive(scoreboard, volume(4, rows(1, 2, 5)))
    assert take(scoreboard).seqs == (3,)
    ran(scoreboard, 3)
    assert take(scoreboard).seqs == (4,)
    extend(scoreboard, 3, 20)
    assert take(scoreboard).seqs == (3,), "beside another one that runs"
    ran(scoreboard, 4)
    ran(scoreboard, 3)


def test_unstarted_volume_drops_finished_requests() -> None:
    scoreboard = scoreboard_with(0, 1, 2)
    arrive(scoreboard, volume(4, rows(0, 1, 5), rows(1, 2, 5), rows(2, 3, 20)), 12)
    assert arrive(scoreboard, Release(5, 1, after_seq=4)) == []
    assert scoreboard.next_step(0.0) is None, "seven rows are left of those that are here"
    extend(scoreboard, 4, 16)
    work = take(scoreboard)
    assert sizes(work.prefill) == [(0, 0, 5), (2, 0, 5)]
    assert [request_slice.request for request_slice in work.prefill.full_volume.slices] == [0, 2]
    assert (bytes(work.prefill.data), work.prefill.row_indices) == (
        bytes(range(15)),
        (*range(5), *range(10, 15)),
    )
    extend(scoreboard, 4, 30)
    ran(scoreboard, 4)
    work = take(scoreboard)
    assert (sizes(work.prefill), work.prefill.row_indices) == ([(2, 5, 10)], None)
    ran(scoreboard, 4)
    take(scoreboard)
    assert ran(scoreboard, 4) == [Release(5, 1, after_seq=4)]
    assert scoreboard.counters == {"dropped_slices": 1}


def test_release_waits_for_started_volumes() -> None:
    scoreboard = scoreboard_with(0, 1)
    arrive(scoreboard, volume(3, rows(0, 1, 12), rows(1, 2, 12)), 10)
    take(scoreboard)
    release = Release(4, 1, after_seq=3)
    assert arrive(scoreboard, release) == []
    ran(scoreboard, 3)
    assert arrive(scoreboard, volume(5, rows(1, 3, 1, start=12))) == [Tombstone(5)]
    extend(scoreboard, 3, 24)
    assert sizes(take(scoreboard).prefill) == [(0, 10, 2), (1, 0, 8)], (
        "its rows have been announced"
    )
    assert ran(scoreboard, 3) == []
    take(scoreboard)
    assert ran(scoreboard, 3) == [release]
    assert scoreboard.counters == {"dropped_slices": 1, "dropped_volumes": 1}


def test_incomplete_release_waits_for_started_volumes() -> None:
    scoreboard = scoreboard_with(0)
    arrive(scoreboard, volume(2, rows(0, 1, 20)), 10)
    take(scoreboard)
    ran(scoreboard, 2)
    release = Release(3, 0, after_seq=1)
    assert arrive(scoreboard, release) == []
    extend(scoreboard, 2, 20)
    take(scoreboard)
    assert ran(scoreboard, 2) == [release]


def test_late_rows_of_a_dropped_volume_are_ignored() -> None:
    scoreboard = scoreboard_with(0)
    arrive(scoreboard, volume(2, rows(0, 1, 20)), 9)
    release = Release(3, 0, after_seq=2)
    assert arrive(scoreboard, release) == [Tombstone(2), release]
    extend(scoreboard, 2, 20)
    assert scoreboard.next_step(0.0) is None
    assert scoreboard.num_refused == 0


def test_invalid_fragments_are_counted_and_ignored() -> None:
    scoreboard = scoreboard_with(0)
    arrive(scoreboard, volume(2, rows(0, 1, 20)), 9)
    for seq, arrived in ((2, 9), (2, 5), (2, 21), (7, 3)):
        extend(scoreboard, seq, arrived)
    assert scoreboard.counters == {"bad_parts": 4}
    assert scoreboard.num_refused == 4
    assert scoreboard.next_step(0.0) is None
    for arrived in (0, -1, 3):
        assert arrive(scoreboard, volume(8 + arrived, rows(0, 1, 2)), arrived) == [
            Tombstone(8 + arrived)
        ]


def test_rows_with_incomplete_predecessors_are_dropped() -> None:
    scoreboard = scoreboard_with(0)
    arrive(scoreboard, volume(2, rows(0, 1, 20)), 10)
    take(scoreboard)
    ran(scoreboard, 2)
    arrive(scoreboard, volume(3, rows(0, 1, 1, start=20), prefill=False))
    assert scoreboard.next_step(0.0) is None
    assert scoreboard.counters["invalid_slices"] == 1


def test_waiting_bytes_are_freed_with_the_last_sub_chunk() -> None:
    scoreboard = scoreboard_with(0, 1, waiting_bytes=30)
    arrive(scoreboard, volume(3, rows(0, 1, 20)), 10)
    take(scoreboard)
    ran(scoreboard, 3)
    assert arrive(scoreboard, volume(5, rows(1, 2, 11))) == [Tombstone(5)]
    extend(scoreboard, 3, 20)
    take(scoreboard)
    assert arrive(scoreboard, volume(6, rows(1, 2, 30))) == []


def test_only_remainders_are_recognized() -> None:
    scoreboard = scoreboard_with(0, 1)
    arrive(scoreboard, volume(3, rows(0, 1, 20)))
    assert not scoreboard.has_only_remainders
    take(scoreboard)
    ran(scoreboard, 3)
    assert scoreboard.has_only_remainders
    arrive(scoreboard, volume(4, rows(1, 2, 1), prefill=False))
    assert not scoreboard.has_only_remainders


def test_sub_chunk_completes_once() -> None:
    scoreboard = scoreboard_with(0)
    arrive(scoreboard, volume(2, rows(0, 1, 20)))
    take(scoreboard)
    ran(scoreboard, 2)
    with pytest.raises(InvariantError, match="seq 2 completed but not taken"):
        scoreboard.complete_volumes((2,), 0.0)
