"""When prefill chunks go unpaired, and how many are in flight."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.facts.profile import UNKNOWN_PROFILE, Profile
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.scheduler.micro_batches import MicroBatchCount
from molink.scheduler.prefill_only import (
    MAX_LINK_BACKLOG_S,
    MIN_LINK_ROWS,
    NO_WINDOW,
    link_chunk_rows,
    prefill_only_window,
)
from molink.wire.messages.data_plane import MAX_MICRO_BATCHES

#: A step takes 5 ms, whatever its rows are; one of prefill rows 6 ms.
STAGE = Profile(decode=((1, 0.005), (2, 0.005)), prefill=((128, 0.006), (256, 0.006)))
#: 1 kB rows.
ROW = 1000


def ring(latency: float | None, rate: float | None, stages: int = 3) -> RingTimes:
    return RingTimes((STAGE,) * stages, (LinkFacts(latency, rate),) * stages, ROW)


def test_they_fill_the_slowest_stage_for_a_whole_turn() -> None:
    # Three passes and three latencies: 108 ms.
    assert prefill_only_window(ring(0.03, None), 128, 0, piggybacked=2).max_volumes == 18


def test_or_the_slowest_link() -> None:
    # A chunk of 128 kB takes 25.6 ms; the last link carries 64 bytes a token.
    round_trip = 3 * 0.006 + 3 * 0.03 + 2 * 0.0256 + 128 * 64 / 5e6
    assert 6 < round_trip / 0.0256 < 7
    assert prefill_only_window(ring(0.03, 5e6), 128, 0, piggybacked=2).max_volumes == 7


def test_a_chunk_is_over_at_each_stage_before_a_decode_volume_comes_there() -> None:
    # A turn of 105 ms. Chunks take 18 ms in all; at the last stage the volume is 10 ms later.
    found = prefill_only_window(ring(0.03, None), 128, 0, piggybacked=2)
    assert found.window_s == pytest.approx(0.105 - (3 * 0.006 - 2 * 0.005))


def test_the_stage_where_the_chunk_is_least_ahead_decides() -> None:
    slow = replace_prefill(STAGE, 0.05)
    times = replace(ring(0.03, None), profiles=(slow, STAGE, STAGE))
    # From the first stage on it is the same millisecond that a chunk takes longer.
    assert prefill_only_window(times, 128, 0, piggybacked=2).window_s == pytest.approx(
        0.105 - 0.05 - 2 * 0.001
    )
    quick = replace_prefill(STAGE, 0.001)
    times = replace(ring(0.03, None), profiles=(slow, quick, quick))
    assert prefill_only_window(times, 128, 0, piggybacked=2).window_s == pytest.approx(0.105 - 0.05)


def replace_prefill(stage: Profile, seconds: float) -> Profile:
    return Profile(decode=stage.decode, prefill=((128, seconds), (256, seconds)))


def test_without_profiles_none_goes() -> None:
    unknown = RingTimes((UNKNOWN_PROFILE,) * 3, (LinkFacts(0.03, 1e6),) * 3, 0)
    assert prefill_only_window(RingTimes((), (), ROW), 128, 0, piggybacked=0) == NO_WINDOW
    assert (
        MicroBatchCount(0, 3, unknown.profiles, ROW).prefill_only_window(128, 0, streams=0)
        == NO_WINDOW
    )


def test_it_can_be_switched_off_whatever_k_is() -> None:
    for count in (0, 3):
        off = MicroBatchCount(count, 3, (STAGE,) * 3, ROW, allows_prefill_only=False)
        off.set_times(ring(0.03, None))
        assert off.prefill_only_window(128, 0, streams=4) == NO_WINDOW


def test_a_fixed_k_bounds_paired_volumes_only() -> None:
    fixed = MicroBatchCount(3, 3, (STAGE,) * 3, ROW)
    fixed.set_times(ring(0.03, None))
    assert fixed.prefill_only_window(128, 0, streams=4).max_volumes == 18


def test_it_follows_links() -> None:
    decider = MicroBatchCount(0, 3, (STAGE,) * 3, ROW)
    # In no time at all from PC to PC: a chunk may go for 15 - 8 ms.
    assert decider.prefill_only_window(128, 0, streams=4).window_s == pytest.approx(0.007)
    decider.set_times(ring(0.03, None))
    assert decider.prefill_only_window(128, 0, streams=4).window_s == pytest.approx(0.097)


def test_late_in_a_prompt_chunks_are_dearer() -> None:
    stage = Profile(decode=STAGE.decode, prefill=STAGE.prefill, prefill_token_s=1e-8)
    times = RingTimes((stage,) * 3, (LinkFacts(0.01, None),) * 3, ROW)
    # 45 ms without chunks; beyond 10 000 tokens one takes 18.8 ms at each stage.
    decider = MicroBatchCount(0, 3, times.profiles, ROW)
    decider.set_times(times)
    assert decider.prefill_only_window(128, 100, streams=4).window_s == pytest.approx(0.037)
    assert decider.prefill_only_window(128, 10_112, streams=4).window_s == pytest.approx(
        0.045 - 3 * (0.006 + 1e-8 * 128 * 10_112) + 0.01
    )


@given(
    latency=st.floats(0, 1),
    rate=st.none() | st.floats(1e3, 1e9),
    stages=st.integers(1, 8),
    rows=st.integers(1, 2048),
    riding=st.integers(0, 64),
)
def test_they_are_no_more_than_a_ring_can_have(
    latency: float, rate: float | None, stages: int, rows: int, riding: int
) -> None:
    found = prefill_only_window(ring(latency, rate, stages), rows, 0, riding)
    assert 0 <= found.max_volumes <= MAX_MICRO_BATCHES
    assert found.window_s <= ring(latency, rate, stages).round_trip_s(riding)


@pytest.mark.parametrize("riding", [1, 8, 64])
def test_longer_latency_never_lessens_them(riding: int) -> None:
    found = [prefill_only_window(ring(ms / 1000, 12e6), 128, 0, riding) for ms in range(0, 200, 5)]
    for figures in ([each.max_volumes for each in found], [each.window_s for each in found]):
        assert figures == sorted(figures)
        assert figures[-1] > figures[0]


def test_chunks_in_flight_keep_a_slow_link_busy_for_so_long_only() -> None:
    # 100 rows a second.
    slow = ring(0.03, 1e5)
    assert link_chunk_rows(slow, 1) == 100 * MAX_LINK_BACKLOG_S
    assert link_chunk_rows(slow, 3) == MIN_LINK_ROWS
    assert link_chunk_rows(ring(0.03, 1e7), 3) == pytest.approx(
        10_000 * MAX_LINK_BACKLOG_S / 3, abs=1
    )
    assert link_chunk_rows(ring(0.03, None), 3) is None
    assert link_chunk_rows(RingTimes((STAGE,), (), ROW), 3) is None
