"""Exact decisions of one stage's scoreboard; whole rings are in tests/ring/test_random_rings.py."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.errors import InvariantError
from molink.ring.scoreboard import (
    MAX_SEQ_SPAN,
    MAX_WAITING_VOLUMES,
    Scoreboard,
    ScoreboardLimits,
    TrackedRequest,
)
from molink.ring.step import CompletedControl, Step, StepInput
from molink.ring.volume_queue import SeqSet
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    MAX_GRAMMAR_BYTES,
    Admit,
    BlockTable,
    Grammar,
    History,
    Release,
    RequestSlice,
    SamplingParams,
    Tombstone,
    Volume,
)


def admit(seq: int, request: int) -> Admit:
    return Admit(seq, request, SamplingParams(), 4)


def rows(
    request: int, after: int, start: int = 0, count: int = 1, drafts: tuple[int, ...] = ()
) -> RequestSlice:
    return RequestSlice(request, start, count, after, (request,), True, drafts=drafts)


def volume(seq: int, *slices: RequestSlice, prefill: bool = False) -> Volume:
    count = sum(request_slice.count for request_slice in slices)
    return Volume(seq, prefill, slices, Payload("f32", (count, 1)))


def feed(scoreboard: Scoreboard, *bodies: Any, data: object = "data") -> list:
    """Deliver messages; returns the bodies to be forwarded."""
    out = []
    for body in bodies:
        scoreboard.on_message(body, data, 0.0)
        out += [control.body for control in scoreboard.complete_volumes((), 0.0)]
        scoreboard.validate()
    return out


def run(scoreboard: Scoreboard) -> tuple[tuple[int, ...], list]:
    """Run the next step; returns its seqs and the forwarded bodies."""
    work = scoreboard.next_step(0.0)
    scoreboard.validate()
    seqs = () if work is None else work.seqs
    out = [control.body for control in scoreboard.complete_volumes(seqs, 0.0)]
    scoreboard.validate()
    return seqs, out


# --- order ---------------------------------------------------------------------------------------


def test_rows_wait_for_their_admission() -> None:
    scoreboard = Scoreboard()
    late = volume(3, rows(0, after=2), prefill=True)
    history = History(2, 0, 0, Payload("i32", (4,)))
    assert feed(scoreboard, late) == []
    assert scoreboard.next_step(0.0) is None
    assert (scoreboard.num_queued, scoreboard.num_waiting) == (0, 1)
    assert feed(scoreboard, admit(1, 0)) == [admit(1, 0)]
    assert scoreboard.next_step(0.0) is None
    scoreboard.on_message(history, "ids", 0.0)
    assert scoreboard.complete_volumes((), 0.0) == [CompletedControl(history, "ids")]
    assert scoreboard.num_queued == 1
    assert scoreboard.next_step(0.0) == Step(None, StepInput(late, "data"))
    assert (scoreboard.num_queued, scoreboard.num_waiting) == (1, 0)
    assert scoreboard.complete_volumes((3,), 0.0) == []
    assert (scoreboard.num_queued, scoreboard.last_completed_seq) == (0, 3)


def test_step_takes_lowest_seq_of_each_kind() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, *(admit(seq, seq - 1) for seq in (1, 2, 3, 4)))
    feed(scoreboard, volume(8, rows(3, after=4), prefill=True), volume(7, rows(2, 3), prefill=True))
    feed(scoreboard, volume(6, rows(1, after=2)), volume(5, rows(0, after=1)))
    assert run(scoreboard) == ((5, 7), [])
    assert run(scoreboard) == ((6, 8), [])
    assert run(scoreboard) == ((), [])


def test_later_volume_overtakes_a_blocked_one() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0), admit(2, 1))
    feed(scoreboard, volume(4, rows(0, after=3), prefill=True), volume(5, rows(1, after=2)))
    assert run(scoreboard) == ((5,), [])
    assert scoreboard.last_completed_seq == 5
    assert run(scoreboard) == ((), [])
    feed(scoreboard, volume(3, rows(0, after=1), prefill=True))
    assert run(scoreboard) == ((3,), [])
    assert run(scoreboard) == ((4,), [])
    # The completed seq is 7 although older ones ran last.
    assert scoreboard.last_completed_seq == 7


def test_volume_waits_until_its_predecessor_has_run() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0))
    feed(scoreboard, volume(2, rows(0, after=1), prefill=True))
    feed(scoreboard, volume(3, rows(0, after=2), prefill=True))
    work = scoreboard.next_step(0.0)
    assert work.seqs == (2,)
    assert scoreboard.next_step(0.0) is None
    scoreboard.complete_volumes(work.seqs, 0.0)
    assert scoreboard.next_step(0.0).seqs == (3,)


def test_rows_wait_for_the_writer_of_shared_blocks() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0), admit(2, 1))
    feed(
        scoreboard,
        volume(4, rows(1, after=3, start=2)),
        volume(3, rows(0, 1, count=2), prefill=True),
    )
    assert run(scoreboard) == ((3,), [])
    assert run(scoreboard) == ((4,), [])


# --- dropped and released requests ----------------------------------------------------------------


def test_rows_of_a_released_request_are_dropped_from_a_volume() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0), admit(2, 1), admit(3, 2))
    slices = rows(0, 1, count=2), rows(1, 2, count=3), rows(2, 3, count=1)
    feed(scoreboard, volume(4, *slices, prefill=True))
    assert feed(scoreboard, Release(5, 1, after_seq=4)) == []
    work = scoreboard.next_step(0.0)
    assert work.prefill.volume.slices == (slices[0], slices[2])
    assert work.prefill.row_indices == (0, 1, 5)
    assert [control.body for control in scoreboard.complete_volumes((4,), 0.0)] == [
        Release(5, 1, after_seq=4)
    ]
    assert feed(scoreboard, volume(6, rows(1, after=4))) == [Tombstone(6)]
    assert scoreboard.counters == {"dropped_slices": 2, "dropped_volumes": 1}


def test_a_volume_without_rows_becomes_a_tombstone() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0))
    feed(scoreboard, volume(2, rows(0, after=1), prefill=True))
    release = Release(3, 0, after_seq=2)
    assert feed(scoreboard, release) == [Tombstone(2), release]
    assert scoreboard.next_step(0.0) is None


def test_release_waits_for_running_rows() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0), volume(2, rows(0, after=1)))
    scoreboard.next_step(0.0)
    release = Release(3, 0, after_seq=2)
    assert feed(scoreboard, release) == []
    assert [control.body for control in scoreboard.complete_volumes((2,), 0.0)] == [release]


def test_release_waits_for_rows_that_it_overtook() -> None:
    scoreboard = Scoreboard()
    release = Release(4, 0, after_seq=3, pending_seqs=(2,))
    feed(scoreboard, admit(1, 0))
    assert feed(scoreboard, release) == []
    # The last volume was dropped upstream and its tombstone overtakes the one before.
    assert feed(scoreboard, Tombstone(3)) == [Tombstone(3)]
    assert feed(scoreboard, volume(2, rows(0, after=1), prefill=True)) == [Tombstone(2), release]


def test_release_without_rows_completes_at_once() -> None:
    scoreboard = Scoreboard()
    release = Release(2, 0, after_seq=1)
    assert feed(scoreboard, admit(1, 0), release) == [admit(1, 0), release]


def test_release_does_not_block_other_requests() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0), admit(2, 1))
    slow, quick = Release(5, 0, after_seq=3), Release(6, 1, after_seq=2)
    assert feed(scoreboard, slow, quick) == [quick]
    assert feed(scoreboard, Tombstone(3)) == [Tombstone(3), slow]


def test_scoreboard_memory_is_bounded() -> None:
    scoreboard = Scoreboard()
    for request in range(500):
        seq = 3 * request + 1
        feed(scoreboard, admit(seq, request), volume(seq + 1, rows(request, after=seq)))
        assert run(scoreboard)[0] == (seq + 1,)
        feed(scoreboard, Release(seq + 2, request, after_seq=seq + 1))
    assert scoreboard._complete.watermark == 1500
    kept = (scoreboard._requests, scoreboard._volumes, scoreboard._releases, scoreboard._completed)
    assert not any(map(len, kept))
    assert len(scoreboard._complete) == 0


# --- misbehaviour --------------------------------------------------------------------------------


def test_duplicate_seqs_are_ignored() -> None:
    scoreboard = Scoreboard()
    one = volume(2, rows(0, after=1))
    release = Release(3, 0, after_seq=2)
    feed(scoreboard, admit(1, 0), one, one)
    scoreboard.next_step(0.0)
    assert feed(scoreboard, one, release, release, admit(1, 0)) == []
    assert [control.body for control in scoreboard.complete_volumes((2,), 0.0)] == [release]
    assert feed(scoreboard, one, release, Tombstone(2)) == []
    assert scoreboard.counters == {"duplicates": 7}


def test_drafts_in_a_prefill_volume_are_rejected() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0))
    with_drafts = rows(0, 1, count=2, drafts=(5,))
    assert feed(scoreboard, volume(2, with_drafts, prefill=True)) == [Tombstone(2)]
    feed(scoreboard, volume(3, with_drafts))
    assert run(scoreboard) == ((3,), [])


def test_lookahead_rows_are_valid() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0))
    feed(scoreboard, volume(2, rows(0, 1)), volume(3, rows(0, 2, start=1, count=2, drafts=(5, 6))))
    assert run(scoreboard) == ((2,), [])
    assert run(scoreboard) == ((3,), [])


@pytest.mark.parametrize(
    "slices",
    [
        (rows(0, after=2),),
        (rows(0, after=9),),
        (rows(0, 1), rows(0, 1, start=1)),
        (rows(0, 1, count=2, drafts=(5, 6, 7)),),
        (RequestSlice(0, 0, 2, 1, (0,), sample=False, drafts=(5,)),),
        tuple(rows(index, 1, count=16, drafts=(5,) * 15) for index in range(9)),
    ],
)
def test_invalid_volume_becomes_a_tombstone(slices: tuple[RequestSlice, ...]) -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0))
    assert feed(scoreboard, volume(2, *slices)) == [Tombstone(2)]
    feed(scoreboard, volume(3, rows(0, after=1)))
    assert run(scoreboard) == ((3,), [])
    assert scoreboard.counters == {"bad_volumes": 1}


def test_rows_of_unadmitted_requests_are_dropped() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0))
    feed(scoreboard, volume(2, rows(5, after=1)), volume(3, rows(0, 1), rows(5, 1)))
    seqs, out = run(scoreboard)
    assert (seqs, out) == ((3,), [Tombstone(2)])
    assert scoreboard.counters == {"invalid_slices": 2, "dropped_volumes": 1}


def test_rows_after_a_completed_release_are_dropped() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0), Release(2, 0, after_seq=1))
    assert feed(scoreboard, volume(3, rows(0, after=1))) == [Tombstone(3)]


def test_invalid_controls_become_tombstones() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 4))
    assert feed(scoreboard, admit(2, 3)) == [Tombstone(2)]
    assert feed(scoreboard, admit(3, 4)) == [Tombstone(3)]
    assert feed(scoreboard, History(4, 9, 0, Payload("i32", (1,)))) == [Tombstone(4)]
    feed(scoreboard, volume(5, rows(4, after=1)), volume(6, rows(3, after=1)))
    assert run(scoreboard)[0] == (5,)
    assert scoreboard.counters == {
        "stale_admits": 2,
        "stray_histories": 1,
        "dropped_slices": 1,
        "dropped_volumes": 1,
    }


def test_invalid_releases_complete() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0))
    stray, impossible = Release(2, 9, after_seq=1), Release(3, 0, after_seq=7, pending_seqs=(1, 3))
    assert feed(scoreboard, stray, impossible) == [stray, impossible]
    assert scoreboard.counters == {"stray_releases": 1, "bad_releases": 1}


def test_release_prevents_later_admission() -> None:
    scoreboard = Scoreboard()
    assert feed(scoreboard, Release(2, 4, after_seq=1)) == []
    assert feed(scoreboard, admit(3, 4)) == [Tombstone(3)]
    assert feed(scoreboard, admit(1, 5)) == [admit(1, 5), Release(2, 4, after_seq=1)]
    assert scoreboard.counters == {"stray_releases": 1, "stale_admits": 1}


def test_incomplete_release_waits_for_running_rows() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0), volume(2, rows(0, after=1)))
    work = scoreboard.next_step(0.0)
    assert work is not None
    release = Release(3, 0, after_seq=1)
    assert feed(scoreboard, release) == []
    assert [control.body for control in scoreboard.complete_volumes(work.seqs, 0.0)] == [release]


def test_excess_messages_are_rejected() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0))
    for seq in range(10, 10 + MAX_WAITING_VOLUMES):
        scoreboard.on_message(volume(seq, rows(0, after=2)), None, 0.0)
    assert feed(scoreboard, volume(9, rows(0, after=2))) == [Tombstone(9)]
    assert feed(scoreboard, admit(MAX_SEQ_SPAN + 2, 1)) == []
    assert scoreboard.counters == {"floods": 1, "far_seqs": 1}


def test_waiting_rows_are_bounded_in_bytes() -> None:
    scoreboard = Scoreboard(ScoreboardLimits(waiting_bytes=100))
    feed(scoreboard, admit(1, 0))
    assert feed(scoreboard, volume(3, rows(0, after=1)), data=bytearray(60)) == []
    assert feed(scoreboard, volume(4, rows(0, after=3)), data=bytearray(60)) == [Tombstone(4)]
    assert run(scoreboard) == ((3,), [])
    assert feed(scoreboard, volume(5, rows(0, after=6)), data=bytearray(101)) == [Tombstone(5)]
    assert feed(scoreboard, volume(6, rows(0, after=3)), data=bytearray(100)) == []
    feed(scoreboard, Release(7, 0, after_seq=6))
    assert feed(scoreboard, admit(8, 1), volume(9, rows(1, after=8)), data=bytearray(100)) == [
        admit(8, 1)
    ]
    assert (
        scoreboard.counters["floods"] + scoreboard.counters["bad_volumes"]
        == scoreboard.num_refused
        == 2
    )


def test_live_and_released_requests_are_bounded() -> None:
    scoreboard = Scoreboard(ScoreboardLimits(max_requests=2))
    waiting = [Release(3, 0, after_seq=2), Release(6, 1, after_seq=2)]
    assert feed(scoreboard, admit(1, 0), waiting[0], admit(4, 1)) == [admit(1, 0), admit(4, 1)]
    assert feed(scoreboard, admit(5, 2)) == [Tombstone(5)]
    assert feed(scoreboard, waiting[1], Release(7, 9, after_seq=2)) == [Tombstone(7)]
    assert feed(scoreboard, Tombstone(2)) == [Tombstone(2), *waiting]
    assert feed(scoreboard, admit(8, 3)) == [admit(8, 3)]
    assert scoreboard.counters["floods"] == 2


@pytest.mark.parametrize(
    ("first", "payload"),
    [
        (0, Payload("u8", (3,))),
        (0, Payload("f32", (2,))),
        (0, Payload("i32", (2, 2))),
        (0, Payload("i32", (9,))),
        (1, Payload("i32", (1,))),
        (2**53, Payload("i32", (1,))),
    ],
)
def test_out_of_order_history_is_rejected(first: int, payload: Payload) -> None:
    scoreboard = Scoreboard(ScoreboardLimits(max_model_len=8))
    bad = History(2, 0, first, payload)
    good = [History(3, 0, 0, Payload("i32", (5,))), History(4, 0, 5, Payload("i32", (3,)))]
    assert feed(scoreboard, admit(1, 0), bad, *good) == [admit(1, 0), Tombstone(2), *good]
    assert feed(scoreboard, History(5, 0, 8, Payload("i32", (1,)))) == [Tombstone(5)]
    assert scoreboard.counters == {"bad_histories": 2}


def ids(*blocks: int) -> bytes:
    return array("i", blocks).tobytes()


def test_rows_start_after_cached_blocks() -> None:
    scoreboard = Scoreboard(
        ScoreboardLimits(max_table_blocks=4, blocks=8, block_size=2, max_model_len=16)
    )
    scheduler = BlockTable(2, 0, Payload("i32", (2,)))
    feed(scoreboard, admit(1, 0))
    scoreboard.on_message(scheduler, ids(5, 6), 0.0)
    assert scoreboard.complete_volumes((), 0.0) == [CompletedControl(scheduler, ids(5, 6))]
    feed(scoreboard, volume(3, RequestSlice(0, 5, 2, 2, (7, 0), False, copy_from_block=4)))
    feed(scoreboard, volume(4, RequestSlice(0, 7, 1, 3, (), True)))
    assert run(scoreboard) == ((3,), [])
    assert run(scoreboard) == ((4,), [])
    assert scoreboard.num_refused == 0


@pytest.mark.parametrize(
    ("payload", "data"),
    [
        (Payload("i32", (2,)), ids(5)),
        (Payload("i32", (2,)), ids(5, 8)),
        (Payload("i32", (2,)), ids(5, -1)),
        (Payload("i32", (1, 2)), ids(5, 6)),
        (Payload("f32", (2,)), ids(5, 6)),
        (Payload("i32", (2,)), None),
        (Payload("i32", (0,)), b""),
        (Payload("i32", (4,)), ids(1, 2, 3, 4)),
    ],
)
def test_invalid_block_table_is_rejected(payload: Payload, data: bytes | None) -> None:
    scoreboard = Scoreboard(ScoreboardLimits(max_table_blocks=3, blocks=8, block_size=2))
    feed(scoreboard, admit(1, 0))
    assert feed(scoreboard, BlockTable(2, 0, payload), data=data) == [Tombstone(2)]
    assert feed(scoreboard, BlockTable(3, 7, Payload("i32", (1,))), data=ids(1)) == [Tombstone(3)]
    feed(scoreboard, volume(4, RequestSlice(0, 0, 2, 1, (1,))))
    assert run(scoreboard) == ((4,), [])
    assert feed(scoreboard, BlockTable(5, 0, Payload("i32", (1,))), data=ids(2)) == [Tombstone(5)]
    assert scoreboard.counters == {"bad_tables": 2, "stray_tables": 1}


@pytest.mark.parametrize(
    "bad",
    [
        RequestSlice(0, 4, 1, 3, (6,), True, copy_from_block=3),
        RequestSlice(0, 5, 1, 3, (6,), True, copy_from_block=8),
        RequestSlice(0, 4, 1, 3, (6, 7), True),
        RequestSlice(0, 4, 1, 3, (8,), True),
        RequestSlice(0, 4, 1, 3, (), True),
        RequestSlice(0, 2**53, 1, 3, (), True),
        RequestSlice(0, 4, 7, 3, (7,), True),
    ],
    ids=[
        "nothing to copy",
        "copy from beyond the pool",
        "long table",
        "block beyond the pool",
        "no block",
        "far position",
        "beyond the context",
    ],
)
def test_uncomputable_rows_are_dropped(bad: RequestSlice) -> None:
    scoreboard = Scoreboard(
        ScoreboardLimits(max_table_blocks=3, blocks=8, block_size=2, max_model_len=10)
    )
    feed(scoreboard, admit(1, 0), admit(2, 1))
    feed(scoreboard, volume(3, RequestSlice(0, 0, 4, 1, (4, 5), False), rows(1, 2)))
    feed(scoreboard, volume(4, bad, RequestSlice(1, 1, 1, 3, (), True)))
    feed(scoreboard, volume(5, RequestSlice(0, 4, 2, 3, (6,), True)))
    assert run(scoreboard) == ((3,), [])
    work = scoreboard.next_step(0.0)
    assert [request_slice.request for request_slice in work.decode.volume.slices] == [1]
    scoreboard.complete_volumes(work.seqs, 0.0)
    assert run(scoreboard) == ((5,), [])
    assert scoreboard.counters == {"invalid_slices": 1}


def test_completing_an_untaken_volume_raises() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0), volume(2, rows(0, after=1)))
    with pytest.raises(InvariantError, match="seq 2 completed but not taken") as caught:
        scoreboard.complete_volumes((2,), 0.0)
    assert any("arrive Volume 2" in line for line in caught.value.story)


def test_broken_invariant_carries_the_story() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0))
    scoreboard._requests._live[7] = TrackedRequest()
    with pytest.raises(InvariantError, match="never admitted") as caught:
        scoreboard.validate()
    assert caught.value.story


@pytest.mark.parametrize(
    "payload",
    [
        Payload("i32", (3,)),
        Payload("u8", (3, 3)),
        Payload("u8", (0,)),
        Payload("u8", (MAX_GRAMMAR_BYTES + 1,)),
    ],
)
def test_invalid_grammar_is_rejected(payload: Payload) -> None:
    scoreboard = Scoreboard()
    good, second = (Grammar(seq, 0, Payload("u8", (3,))) for seq in (3, 4))
    assert feed(scoreboard, admit(1, 0), Grammar(2, 0, payload)) == [admit(1, 0), Tombstone(2)]
    assert feed(scoreboard, good, second) == [good, Tombstone(4)]
    assert feed(scoreboard, Grammar(5, 9, Payload("u8", (3,)))) == [Tombstone(5)]
    assert scoreboard.counters == {"bad_grammars": 2, "stray_grammars": 1}


def test_late_grammar_is_rejected() -> None:
    scoreboard = Scoreboard()
    feed(scoreboard, admit(1, 0), volume(2, rows(0, 1)))
    assert run(scoreboard)[0] == (2,)
    assert feed(scoreboard, Grammar(3, 0, Payload("u8", (3,)))) == [Tombstone(3)]


@given(st.lists(st.integers(1, 30)))
def test_seq_set_behaves_like_a_set(seqs: list[int]) -> None:
    done = SeqSet()
    for seq in seqs:
        done.add_seq(seq)
    assert {seq for seq in range(1, 40) if seq in done} == set(seqs)
    assert 0 in done
    assert done.find_missing(range(40)) == set(range(1, 40)) - set(seqs)
    assert len(done) + done.watermark == len(set(seqs))


@given(st.permutations(range(1, 30)))
def test_seq_set_keeps_nothing_below_the_watermark(seqs: list[int]) -> None:
    done = SeqSet()
    for seq in seqs:
        done.add_seq(seq)
    assert (done.watermark, len(done)) == (29, 0)
