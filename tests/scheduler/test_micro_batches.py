"""The number of micro-batches in flight, and prefill-only chunks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.facts.profile import UNKNOWN_PROFILE, Profile
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.micro_batches import (
    MAX_LINK_BACKLOG_S,
    MIN_LINK_ROWS,
    NO_WINDOW,
    MicroBatchCount,
    estimate_counts,
    link_chunk_rows,
    prefill_only_window,
)
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.data_plane import (
    MAX_MICRO_BATCHES,
    SampledId,
    SamplerOutput,
    SamplingParams,
)
from tests.support.request_states import make_state

#: Reading the weights takes 10 ms, and each row 1 ms.
STAGE = Profile(decode=((1, 0.011), (101, 0.111)), prefill=((16, 0.02),))
#: 1 kB rows at 1 MB/s: 1 ms per row.
ROW, RATE = 1000, 1e6


def ring(latency: float, stages: int = 3, rate: float | None = RATE) -> RingTimes:
    return RingTimes((STAGE,) * stages, (LinkFacts(latency, rate),) * stages, ROW)


def test_estimates_of_each_count() -> None:
    times = ring(0.1)
    curve = estimate_counts(times, 12)
    assert [(each.count, each.rows) for each in curve] == [(3, 4), (4, 3), (5, 3), (6, 2)]
    # A round trip: three steps, three latencies, two transfers of rows and one of tokens.
    round_trip = 3 * 0.014 + 0.3 + 2 * 4 * 1e-3 + 64 * 4 / RATE
    assert curve[0].token_s == pytest.approx(round_trip)
    assert curve[0].busy == pytest.approx(3 * 0.014 / round_trip)


def test_a_busy_ring_is_bound_by_the_slowest_stage() -> None:
    minimum, *more = estimate_counts(ring(0.0, rate=None), 12)
    assert minimum.token_s == pytest.approx(3 * 0.014)
    assert minimum.busy == pytest.approx(1.0)
    assert more[0].token_s == pytest.approx(4 * 0.013)


def test_a_busy_ring_is_bound_by_the_slowest_link() -> None:
    curve = estimate_counts(ring(0.0, rate=RATE / 20), 12)
    assert [each.token_s for each in curve] == pytest.approx(
        [3 * 0.08, 4 * 0.06, 4 * 0.06, 6 * 0.04]
    )


def test_micro_batches_do_not_exceed_streams() -> None:
    curve = estimate_counts(ring(0.0), 1)
    assert [each.token_s for each in curve] == [ring(0.0).round_trip_s(1)] * 4


def decider(links: RingTimes | None = None, fixed: int = 0) -> MicroBatchCount:
    micro_batches = MicroBatchCount(fixed, 3, (STAGE,) * 3, ROW)
    if links is not None:
        micro_batches.set_times(links)
    return micro_batches


def test_latency_increases_the_count() -> None:
    assert decider(ring(0.1)).update_count(12) == 6
    assert decider(ring(0.0, rate=None)).update_count(12) == 3


def test_the_count_follows_links_and_streams() -> None:
    micro_batches = decider(ring(0.1))
    assert micro_batches.update_count(12) == 6
    micro_batches.set_times(ring(0.0, rate=None))
    assert micro_batches.update_count(12) == 3
    assert micro_batches.update_count(0) == 3
    micro_batches.set_times(ring(0.1))
    assert micro_batches.update_count(1) == 3, "no gain for one stream"
    assert micro_batches.update_count(12) == 6


#: Attention to 1000 tokens takes as long as reading the weights.
DEEP = Profile(
    decode=STAGE.decode, prefill=STAGE.prefill, context=128, decode_token_s=1e-5 * 1000 / 872
)


def test_long_contexts_reduce_the_count() -> None:
    times = RingTimes((DEEP,) * 3, ring(0.03, rate=None).links, ROW)
    short, long = estimate_counts(times, 12), estimate_counts(times, 12, context=10_000)
    assert short[0].token_s == pytest.approx(estimate_counts(times, 12, context=128)[0].token_s)
    assert long[0].busy > short[0].busy
    micro_batches = MicroBatchCount(0, 3, (DEEP,) * 3, ROW)
    micro_batches.set_times(times)
    counts = [micro_batches.update_count(12, context) for context in (100, 10_000, 100)]
    assert counts == [6, 4, 6]


def test_slow_stages_reduce_the_count() -> None:
    links = ring(0.03, rate=None).links
    micro_batches = decider(ring(0.03, rate=None))
    assert micro_batches.update_count(12) == 6
    micro_batches.set_times(RingTimes((STAGE, STAGE.scale_by(4.0), STAGE), links, ROW))
    assert micro_batches.update_count(12) == 3
    micro_batches.set_times(RingTimes((STAGE,) * 3, links, ROW))
    assert micro_batches.update_count(12) == 6
    unknown = MicroBatchCount(0, 3, (STAGE, UNKNOWN_PROFILE, STAGE), ROW)
    unknown.set_times(RingTimes((STAGE,) * 3, links, ROW))
    assert not unknown.is_adaptive, "unknown stages stay unknown"


def test_the_count_is_fixed_or_the_number_of_stages() -> None:
    assert decider(ring(0.1), fixed=4).update_count(12) == 4
    unknown = MicroBatchCount(0, 3, (STAGE, UNKNOWN_PROFILE, STAGE), ROW)
    unknown.set_times(ring(0.1))
    assert unknown.update_count(12) == 3


@given(st.lists(st.integers(0, 64), max_size=20), st.floats(0, 0.2), st.floats(1e4, 1e9))
def test_the_count_is_within_n_and_2n_and_near_the_best(
    streams: list[int], latency: float, rate: float
) -> None:
    times = ring(latency, rate=rate)
    micro_batches = decider(times)
    for count in streams:
        chosen = micro_batches.update_count(count)
        assert 3 <= chosen <= 6
        if count:
            curve = {each.count: each.token_s for each in estimate_counts(times, count)}
            assert curve[chosen] <= 1.05 * min(curve.values())


def test_the_scheduler_spreads_decodes_over_the_best_count() -> None:
    config = SchedulerConfig(
        256, 16, 0, max_num_batched_tokens=16, profiles=(STAGE,) * 3, num_stages=3, row_bytes=ROW
    )
    scheduler = Scheduler(config, 1)
    assert scheduler.collect_stats()[1]["scheduler_micro_batches"] == 3
    scheduler.set_times(ring(0.1))
    for index in range(12):
        request = make_state("d", f"r{index}", (1, 2), 2, 8, SamplingParams())
        scheduler.submit_request(request, 0.0)
    while scheduler.next_batch(0.0) is not None:
        pass
    assert scheduler.collect_stats()[1]["scheduler_micro_batches"] in (3, 6)


def test_the_scheduler_uses_the_decode_contexts() -> None:
    def count(prompt: int) -> float:
        config = SchedulerConfig(
            1 << 14,
            16,
            0,
            max_num_batched_tokens=8192,
            profiles=(DEEP,) * 3,
            num_stages=3,
            row_bytes=ROW,
        )
        scheduler = Scheduler(config, 1)
        scheduler.set_times(RingTimes((DEEP,) * 3, ring(0.03, rate=None).links, ROW))
        for index in range(12):
            tokens = tuple(range(index, index + prompt))
            scheduler.submit_request(
                make_state(
                    "d", f"r{index}", tokens, prompt, 4000, SamplingParams(), credit_window=4096
                ),
                0.0,
            )
        for _ in range(200):
            batch = scheduler.next_batch(0.0)
            for volume in batch.volumes if batch is not None else ():
                rows = [each for each in volume.header.slices if each.sample]
                choices = tuple(
                    SampledId(each.request, each.start + each.count, 1) for each in rows
                )
                scheduler.on_sampled(SamplerOutput(volume.header.seq, choices), {}, 0.0)
        return scheduler.collect_stats()[1]["scheduler_micro_batches"]

    assert count(16) == 6
    assert count(10_000) < 6


#: A step takes 5 ms for any rows, a prefill step 6 ms.
FLAT_STAGE = Profile(decode=((1, 0.005), (2, 0.005)), prefill=((128, 0.006), (256, 0.006)))


def link_ring(latency: float | None, rate: float | None, stages: int = 3) -> RingTimes:
    return RingTimes((FLAT_STAGE,) * stages, (LinkFacts(latency, rate),) * stages, ROW)


def test_chunks_fill_the_slowest_stage_for_a_round_trip() -> None:
    # Three passes and three latencies: 108 ms.
    assert prefill_only_window(link_ring(0.03, None), 128, 0, piggybacked=2).max_volumes == 18


def test_chunks_fill_the_slowest_link_for_a_round_trip() -> None:
    # A chunk of 128 kB takes 25.6 ms; the last link carries 64 bytes per token.
    round_trip = 3 * 0.006 + 3 * 0.03 + 2 * 0.0256 + 128 * 64 / 5e6
    assert 6 < round_trip / 0.0256 < 7
    assert prefill_only_window(link_ring(0.03, 5e6), 128, 0, piggybacked=2).max_volumes == 7


def test_chunks_complete_before_the_next_decode_volume() -> None:
    # A round trip of 105 ms. Chunks take 18 ms; the volume reaches the last stage 10 ms later.
    found = prefill_only_window(link_ring(0.03, None), 128, 0, piggybacked=2)
    assert found.window_s == pytest.approx(0.105 - (3 * 0.006 - 2 * 0.005))


def test_the_least_lead_of_a_chunk_bounds_the_window() -> None:
    slow = replace_prefill(FLAT_STAGE, 0.05)
    times = replace(link_ring(0.03, None), profiles=(slow, FLAT_STAGE, FLAT_STAGE))
    # From the first stage on, a chunk takes the same millisecond longer.
    assert prefill_only_window(times, 128, 0, piggybacked=2).window_s == pytest.approx(
        0.105 - 0.05 - 2 * 0.001
    )
    quick = replace_prefill(FLAT_STAGE, 0.001)
    times = replace(link_ring(0.03, None), profiles=(slow, quick, quick))
    assert prefill_only_window(times, 128, 0, piggybacked=2).window_s == pytest.approx(0.105 - 0.05)


def replace_prefill(stage: Profile, seconds: float) -> Profile:
    return Profile(decode=stage.decode, prefill=((128, seconds), (256, seconds)))


def test_without_profiles_the_window_is_closed() -> None:
    unknown = RingTimes((UNKNOWN_PROFILE,) * 3, (LinkFacts(0.03, 1e6),) * 3, 0)
    assert prefill_only_window(RingTimes((), (), ROW), 128, 0, piggybacked=0) == NO_WINDOW
    assert (
        MicroBatchCount(0, 3, unknown.profiles, ROW).prefill_only_window(128, 0, streams=0)
        == NO_WINDOW
    )


def test_prefill_only_can_be_disabled() -> None:
    for count in (0, 3):
        off = MicroBatchCount(count, 3, (FLAT_STAGE,) * 3, ROW, allows_prefill_only=False)
        off.set_times(link_ring(0.03, None))
        assert off.prefill_only_window(128, 0, streams=4) == NO_WINDOW


def test_a_fixed_k_does_not_bound_prefill_only_chunks() -> None:
    fixed = MicroBatchCount(3, 3, (FLAT_STAGE,) * 3, ROW)
    fixed.set_times(link_ring(0.03, None))
    assert fixed.prefill_only_window(128, 0, streams=4).max_volumes == 18


def test_the_window_follows_links() -> None:
    decider = MicroBatchCount(0, 3, (FLAT_STAGE,) * 3, ROW)
    # Without latency, a chunk may be sent for 15 - 8 ms.
    assert decider.prefill_only_window(128, 0, streams=4).window_s == pytest.approx(0.007)
    decider.set_times(link_ring(0.03, None))
    assert decider.prefill_only_window(128, 0, streams=4).window_s == pytest.approx(0.097)


def test_late_chunks_cost_more() -> None:
    stage = Profile(decode=FLAT_STAGE.decode, prefill=FLAT_STAGE.prefill, prefill_token_s=1e-8)
    times = RingTimes((stage,) * 3, (LinkFacts(0.01, None),) * 3, ROW)
    # 45 ms without chunks; after 10 000 tokens one takes 18.8 ms per stage.
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
    piggybacked=st.integers(0, 64),
)
def test_prefill_only_chunks_are_bounded(
    latency: float, rate: float | None, stages: int, rows: int, piggybacked: int
) -> None:
    found = prefill_only_window(link_ring(latency, rate, stages), rows, 0, piggybacked)
    assert 0 <= found.max_volumes <= MAX_MICRO_BATCHES
    assert found.window_s <= link_ring(latency, rate, stages).round_trip_s(piggybacked)


@pytest.mark.parametrize("piggybacked", [1, 8, 64])
def test_latency_never_shrinks_the_window(piggybacked: int) -> None:
    found = [
        prefill_only_window(link_ring(ms / 1000, 12e6), 128, 0, piggybacked)
        for ms in range(0, 200, 5)
    ]
    for figures in ([each.max_volumes for each in found], [each.window_s for each in found]):
        assert figures == sorted(figures)
        assert figures[-1] > figures[0]


def test_link_backlog_bounds_the_chunk() -> None:
    # 100 rows per second.
    slow = link_ring(0.03, 1e5)
    assert link_chunk_rows(slow, 1) == 100 * MAX_LINK_BACKLOG_S
    assert link_chunk_rows(slow, 3) == MIN_LINK_ROWS
    assert link_chunk_rows(link_ring(0.03, 1e7), 3) == pytest.approx(
        10_000 * MAX_LINK_BACKLOG_S / 3, abs=1
    )
    assert link_chunk_rows(link_ring(0.03, None), 3) is None
    assert link_chunk_rows(RingTimes((FLAT_STAGE,), (), ROW), 3) is None
