"""How many micro-batches are in flight."""

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

#: Reading the weights takes 10 ms, each row 1 ms more.
STAGE = Profile(decode=((1, 0.011), (101, 0.111)), prefill=((16, 0.02),))
#: 1 kB rows at 1 MB/s: 1 ms a row.
ROW, RATE = 1000, 1e6


def ring(latency: float, stages: int = 3, rate: float | None = RATE) -> RingTimes:
    return RingTimes((STAGE,) * stages, (LinkFacts(latency, rate),) * stages, ROW)


def test_what_each_count_promises() -> None:
    times = ring(0.1)
    curve = estimate_counts(times, 12)
    assert [(each.count, each.rows) for each in curve] == [(3, 4), (4, 3), (5, 3), (6, 2)]
    # A turn: three steps, three latencies, two transfers of rows and one of tokens.
    round_trip = 3 * 0.014 + 0.3 + 2 * 4 * 1e-3 + 64 * 4 / RATE
    assert curve[0].token_s == pytest.approx(round_trip)
    assert curve[0].busy == pytest.approx(3 * 0.014 / round_trip)


def test_a_ring_that_is_busy_goes_round_no_faster_than_its_slowest_stage() -> None:
    minimum, *more = estimate_counts(ring(0.0, rate=None), 12)
    assert minimum.token_s == pytest.approx(3 * 0.014)
    assert minimum.busy == pytest.approx(1.0)
    assert more[0].token_s == pytest.approx(4 * 0.013)


def test_a_slow_link_can_be_what_everyone_waits_for() -> None:
    curve = estimate_counts(ring(0.0, rate=RATE / 20), 12)
    assert [each.token_s for each in curve] == pytest.approx(
        [3 * 0.08, 4 * 0.06, 4 * 0.06, 6 * 0.04]
    )


def test_no_more_are_in_flight_than_there_are_streams() -> None:
    curve = estimate_counts(ring(0.0), 1)
    assert [each.token_s for each in curve] == [ring(0.0).round_trip_s(1)] * 4


def decider(links: RingTimes | None = None, fixed: int = 0) -> MicroBatchCount:
    micro_batches = MicroBatchCount(fixed, 3, (STAGE,) * 3, ROW)
    if links is not None:
        micro_batches.set_times(links)
    return micro_batches


def test_latency_wants_more_of_them_and_its_absence_fewer() -> None:
    assert decider(ring(0.1)).update_count(12) == 6
    assert decider(ring(0.0, rate=None)).update_count(12) == 3


def test_it_is_decided_anew_when_links_or_streams_change() -> None:
    micro_batches = decider(ring(0.1))
    assert micro_batches.update_count(12) == 6
    micro_batches.set_times(ring(0.0, rate=None))
    assert micro_batches.update_count(12) == 3
    assert micro_batches.update_count(0) == 3
    micro_batches.set_times(ring(0.1))
    assert micro_batches.update_count(1) == 3, "nothing is gained for one stream"
    assert micro_batches.update_count(12) == 6


#: Attention to 1000 tokens before takes as long as reading the weights.
DEEP = Profile(
    decode=STAGE.decode, prefill=STAGE.prefill, context=128, decode_token_s=1e-5 * 1000 / 872
)


def test_contexts_that_grow_make_steps_longer_and_fewer_micro_batches_enough() -> None:
    times = RingTimes((DEEP,) * 3, ring(0.03, rate=None).links, ROW)
    short, long = estimate_counts(times, 12), estimate_counts(times, 12, context=10_000)
    assert short[0].token_s == pytest.approx(estimate_counts(times, 12, context=128)[0].token_s)
    assert long[0].busy > short[0].busy
    micro_batches = MicroBatchCount(0, 3, (DEEP,) * 3, ROW)
    micro_batches.set_times(times)
    counts = [micro_batches.update_count(12, context) for context in (100, 10_000, 100)]
    assert counts == [6, 4, 6]


def test_stages_that_become_slower_need_fewer_micro_batches() -> None:
    links = ring(0.03, rate=None).links
    micro_batches = decider(ring(0.03, rate=None))
    assert micro_batches.update_count(12) == 6
    micro_batches.set_times(RingTimes((STAGE, STAGE.scale_by(4.0), STAGE), links, ROW))
    assert micro_batches.update_count(12) == 3
    micro_batches.set_times(RingTimes((STAGE,) * 3, links, ROW))
    assert micro_batches.update_count(12) == 6
    unknown = MicroBatchCount(0, 3, (STAGE, UNKNOWN_PROFILE, STAGE), ROW)
    unknown.set_times(RingTimes((STAGE,) * 3, links, ROW))
    assert not unknown.is_adaptive, "a ring that began without knowing its stages goes on without"


def test_a_fixed_number_stays_and_without_profiles_there_are_as_many_as_stages() -> None:
    assert decider(ring(0.1), fixed=4).update_count(12) == 4
    unknown = MicroBatchCount(0, 3, (STAGE, UNKNOWN_PROFILE, STAGE), ROW)
    unknown.set_times(ring(0.1))
    assert unknown.update_count(12) == 3


@given(st.lists(st.integers(0, 64), max_size=20), st.floats(0, 0.2), st.floats(1e4, 1e9))
def test_it_is_always_from_n_to_2n_and_within_a_little_of_the_best(
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


def test_the_head_spreads_decodes_over_as_many_as_pay() -> None:
    config = SchedulerConfig(
        256, 16, 0, max_num_batched_tokens=16, profiles=(STAGE,) * 3, num_stages=3, row_bytes=ROW
    )
    head = Scheduler(config, 1)
    assert head.collect_stats()[1]["scheduler_micro_batches"] == 3
    head.set_times(ring(0.1))
    for index in range(12):
        request = make_state("d", f"r{index}", (1, 2), 2, 8, SamplingParams())
        head.submit_request(request, 0.0)
    while head.next_batch(0.0) is not None:
        pass
    assert head.collect_stats()[1]["scheduler_micro_batches"] in (3, 6)


def test_the_head_goes_by_the_contexts_of_those_who_decode() -> None:
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
        head = Scheduler(config, 1)
        head.set_times(RingTimes((DEEP,) * 3, ring(0.03, rate=None).links, ROW))
        for index in range(12):
            tokens = tuple(range(index, index + prompt))
            head.submit_request(
                make_state(
                    "d", f"r{index}", tokens, prompt, 4000, SamplingParams(), credit_window=4096
                ),
                0.0,
            )
        for _ in range(200):
            batch = head.next_batch(0.0)
            for volume in batch.volumes if batch is not None else ():
                rows = [each for each in volume.header.slices if each.sample]
                choices = tuple(
                    SampledId(each.request, each.start + each.count, 1) for each in rows
                )
                head.on_sampled(SamplerOutput(volume.header.seq, choices), {}, 0.0)
        return head.collect_stats()[1]["scheduler_micro_batches"]

    assert count(16) == 6
    assert count(10_000) < 6


#: A step takes 5 ms, whatever its rows are; one of prefill rows 6 ms.
FLAT_STAGE = Profile(decode=((1, 0.005), (2, 0.005)), prefill=((128, 0.006), (256, 0.006)))


def link_ring(latency: float | None, rate: float | None, stages: int = 3) -> RingTimes:
    return RingTimes((FLAT_STAGE,) * stages, (LinkFacts(latency, rate),) * stages, ROW)


def test_they_fill_the_slowest_stage_for_a_whole_turn() -> None:
    # Three passes and three latencies: 108 ms.
    assert prefill_only_window(link_ring(0.03, None), 128, 0, piggybacked=2).max_volumes == 18


def test_or_the_slowest_link() -> None:
    # A chunk of 128 kB takes 25.6 ms; the last link carries 64 bytes a token.
    round_trip = 3 * 0.006 + 3 * 0.03 + 2 * 0.0256 + 128 * 64 / 5e6
    assert 6 < round_trip / 0.0256 < 7
    assert prefill_only_window(link_ring(0.03, 5e6), 128, 0, piggybacked=2).max_volumes == 7


def test_a_chunk_is_over_at_each_stage_before_a_decode_volume_comes_there() -> None:
    # A turn of 105 ms. Chunks take 18 ms in all; at the last stage the volume is 10 ms later.
    found = prefill_only_window(link_ring(0.03, None), 128, 0, piggybacked=2)
    assert found.window_s == pytest.approx(0.105 - (3 * 0.006 - 2 * 0.005))


def test_the_stage_where_the_chunk_is_least_ahead_decides() -> None:
    slow = replace_prefill(FLAT_STAGE, 0.05)
    times = replace(link_ring(0.03, None), profiles=(slow, FLAT_STAGE, FLAT_STAGE))
    # From the first stage on it is the same millisecond that a chunk takes longer.
    assert prefill_only_window(times, 128, 0, piggybacked=2).window_s == pytest.approx(
        0.105 - 0.05 - 2 * 0.001
    )
    quick = replace_prefill(FLAT_STAGE, 0.001)
    times = replace(link_ring(0.03, None), profiles=(slow, quick, quick))
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
        off = MicroBatchCount(count, 3, (FLAT_STAGE,) * 3, ROW, allows_prefill_only=False)
        off.set_times(link_ring(0.03, None))
        assert off.prefill_only_window(128, 0, streams=4) == NO_WINDOW


def test_a_fixed_k_bounds_paired_volumes_only() -> None:
    fixed = MicroBatchCount(3, 3, (FLAT_STAGE,) * 3, ROW)
    fixed.set_times(link_ring(0.03, None))
    assert fixed.prefill_only_window(128, 0, streams=4).max_volumes == 18


def test_it_follows_links() -> None:
    decider = MicroBatchCount(0, 3, (FLAT_STAGE,) * 3, ROW)
    # In no time at all from PC to PC: a chunk may go for 15 - 8 ms.
    assert decider.prefill_only_window(128, 0, streams=4).window_s == pytest.approx(0.007)
    decider.set_times(link_ring(0.03, None))
    assert decider.prefill_only_window(128, 0, streams=4).window_s == pytest.approx(0.097)


def test_late_in_a_prompt_chunks_are_dearer() -> None:
    stage = Profile(decode=FLAT_STAGE.decode, prefill=FLAT_STAGE.prefill, prefill_token_s=1e-8)
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
    found = prefill_only_window(link_ring(latency, rate, stages), rows, 0, riding)
    assert 0 <= found.max_volumes <= MAX_MICRO_BATCHES
    assert found.window_s <= link_ring(latency, rate, stages).round_trip_s(riding)


@pytest.mark.parametrize("riding", [1, 8, 64])
def test_longer_latency_never_lessens_them(riding: int) -> None:
    found = [
        prefill_only_window(link_ring(ms / 1000, 12e6), 128, 0, riding) for ms in range(0, 200, 5)
    ]
    for figures in ([each.max_volumes for each in found], [each.window_s for each in found]):
        assert figures == sorted(figures)
        assert figures[-1] > figures[0]


def test_chunks_in_flight_keep_a_slow_link_busy_for_so_long_only() -> None:
    # 100 rows a second.
    slow = link_ring(0.03, 1e5)
    assert link_chunk_rows(slow, 1) == 100 * MAX_LINK_BACKLOG_S
    assert link_chunk_rows(slow, 3) == MIN_LINK_ROWS
    assert link_chunk_rows(link_ring(0.03, 1e7), 3) == pytest.approx(
        10_000 * MAX_LINK_BACKLOG_S / 3, abs=1
    )
    assert link_chunk_rows(link_ring(0.03, None), 3) is None
    assert link_chunk_rows(RingTimes((FLAT_STAGE,), (), ROW), 3) is None
