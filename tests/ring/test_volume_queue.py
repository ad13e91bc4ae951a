"""Volumes cut into sub-chunks: their rows and data, and the fields that apply once per slice."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.ring.volume_queue import WaitingVolume, clip_slice
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import RequestSlice, Volume

SLICE = RequestSlice(3, 10, 4, 7, (5, 6), True, copy_from_block=2)


def waiting(*counts: int, arrived: int | None = None) -> WaitingVolume:
    """A volume with slices of these row counts; a row's data are two bytes of its index."""
    slices = tuple(
        RequestSlice(i, 0, count, 1, (i,), True, copy_from_block=i)
        for i, count in enumerate(counts)
    )
    total = sum(counts)
    data = bytearray(byte for row in range(total) for byte in (row, row))
    return WaitingVolume.of_volume(
        Volume(9, True, slices, Payload("u8", (total, 2))), data, arrived, 0.0
    )


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [
        (0, 4, SLICE),
        (0, 3, RequestSlice(3, 10, 3, 7, (5, 6), False, copy_from_block=2)),
        (1, 2, RequestSlice(3, 11, 2, 7, (), False)),
        (1, 3, RequestSlice(3, 11, 3, 7, (), True)),
    ],
)
def test_once_only_work_stays_in_one_slice(first: int, count: int, expected: RequestSlice) -> None:
    assert clip_slice(SLICE, first, count) == expected


def test_whole_volume_is_taken_unchanged() -> None:
    volume = waiting(2, 3)
    ready = volume.take_rows(5)
    assert ready.volume is ready.full_volume is volume.volume
    assert ready.data is volume.data
    assert (ready.row_indices, ready.first_row, ready.is_last) == (None, 0, True)


def test_row_rate_excludes_the_first_rows() -> None:
    volume = waiting(100, arrived=40)
    assert volume.row_rate == 0
    volume.extend_rows(50, 0.0)
    assert volume.row_rate == 0, "at the same time"
    volume.extend_rows(60, 0.5)
    assert volume.row_rate == 40
    volume.extend_rows(70, 1.0)
    assert (volume.row_rate, volume.num_available) == (30, 70)


def test_sub_chunks_share_the_buffer() -> None:
    volume = waiting(2, 3)
    first, second = volume.take_rows(3), volume.take_rows(2)
    assert [(rows.request, rows.start, rows.count) for rows in first.volume.slices] == [
        (0, 0, 2),
        (1, 0, 1),
    ]
    assert (bytes(first.data), bytes(second.data)) == (bytes([0, 0, 1, 1, 2, 2]), b"\3\3\4\4")
    assert second.volume.slices == (RequestSlice(1, 1, 2, 1, (), True),)
    assert first.full_volume is second.full_volume is volume.volume
    assert (first.first_row, first.is_last, second.first_row, second.is_last) == (0, False, 3, True)
    volume.data[4] = 77
    assert first.data[4] == 77


def test_dropped_slices_are_excluded() -> None:
    volume = waiting(2, 3, 1, 2, arrived=6)
    volume.keep_slices([0, 2, 3])
    assert (volume.num_available, volume.num_remaining) == (3, 5)
    ready = volume.take_rows(3)
    assert [rows.request for rows in ready.volume.slices] == [0, 2]
    assert [rows.request for rows in ready.full_volume.slices] == [0, 2, 3]
    assert ready.row_indices == (0, 1, 5)
    assert len(ready.data) == 12
    volume.num_arrived = 8
    assert volume.num_available == 2
    last = volume.take_rows(2)
    assert (last.row_indices, bytes(last.data), last.is_last) == (None, b"\6\6\7\7", True)
    assert volume.is_taken


@given(st.data())
def test_remaining_rows_run_once_in_order(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    volume = waiting(*counts, arrived=1)
    indices = list(range(len(counts)))
    kept = data.draw(st.lists(st.sampled_from(indices), min_size=1, unique=True).map(sorted))
    volume.keep_slices(kept)
    wanted = [row for i in kept for row in range(sum(counts[:i]), sum(counts[: i + 1]))]
    slices: dict[int, list[RequestSlice]] = {}
    seen: list[int] = []
    while not volume.is_taken:
        volume.num_arrived = data.draw(st.integers(volume.num_arrived, volume.num_rows))
        assert 0 <= volume.num_available <= volume.num_remaining - volume.num_taken
        assert volume.num_remaining == len(wanted)
        if not volume.num_available:
            volume.num_arrived = min(volume.num_rows, volume.num_arrived + 1)
            continue
        ready = volume.take_rows(data.draw(st.integers(1, volume.num_available)))
        rows = bytes(ready.data)[::2]
        assert ready.first_row == len(seen)
        sub_chunk = (
            list(rows)
            if ready.row_indices is None
            else [rows[index] for index in ready.row_indices]
        )
        assert len(sub_chunk) == ready.volume.count
        seen += sub_chunk
        assert ready.is_last is (len(seen) == len(wanted))
        for request_slice in ready.volume.slices:
            slices.setdefault(request_slice.request, []).append(request_slice)
    assert seen == wanted
    for request, parts in slices.items():
        assert [part.sample for part in parts] == [False] * (len(parts) - 1) + [True]
        starts = [part.start + part.count for part in parts]
        assert [part.start for part in parts] == [0, *starts[:-1]]
        assert [(part.blocks, part.copy_from_block) for part in parts[1:]] == [((), -1)] * (
            len(parts) - 1
        )
        whole = msgspec.structs.replace(parts[0], count=starts[-1], sample=True)
        assert whole == volume.volume.slices[request]
