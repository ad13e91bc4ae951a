"""How many prefill volumes are in flight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.facts.profile import UNKNOWN, Profile
from molink.facts.ringtimes import LinkFacts, RingTimes
from molink.head.depth import prefill_depth
from molink.head.microbatches import MicroBatches
from molink.wire.messages.data import MAX_MICRO_BATCHES

#: A step takes 5 ms, whatever its rows are; one of prefill rows 6 ms.
STAGE = Profile(decode=((1, 0.005), (2, 0.005)), prefill=((128, 0.006), (256, 0.006)))
#: 1 kB rows.
ROW = 1000


def ring(latency: float | None, rate: float | None, stages: int = 3) -> RingTimes:
    return RingTimes((STAGE,) * stages, (LinkFacts(latency, rate),) * stages, ROW)


def test_they_fill_the_slowest_stage_for_a_whole_turn() -> None:
    # Three passes and three latencies: 108 ms.
    assert prefill_depth(ring(0.03, None), 128, 0, riding=2, count=3) == 18


def test_or_the_slowest_link() -> None:
    # A chunk of 128 kB takes 25.6 ms; the last link carries 64 bytes a token.
    turn = 3 * 0.006 + 3 * 0.03 + 2 * 0.0256 + 128 * 64 / 5e6
    assert 6 < turn / 0.0256 < 7
    assert prefill_depth(ring(0.03, 5e6), 128, 0, riding=2, count=3) == 7


def test_none_goes_unpaired_where_those_who_decode_would_wait_for_it() -> None:
    # A turn of 15 ms would take 33 with a chunk before each step.
    assert prefill_depth(ring(0.0, None), 128, 0, riding=2, count=3) == 0
    # With 108 ms it would be 126, but six micro-batches of 11 ms each 66: fewer than the turn.
    assert prefill_depth(ring(0.03, None), 128, 0, riding=2, count=6) == 18
    # Of twenty the stages would be busy for 220 ms, without chunks for 105.
    assert prefill_depth(ring(0.03, None), 128, 0, riding=2, count=20) == 0


def test_while_nobody_decodes_nobody_waits() -> None:
    assert prefill_depth(ring(0.0, None), 128, 0, riding=0, count=3) == 3
    assert prefill_depth(ring(None, None), 128, 0, riding=0, count=3) == 3


def test_without_profiles_nothing_is_known() -> None:
    unknown = RingTimes((UNKNOWN,) * 3, (LinkFacts(0.03, 1e6),) * 3, 0)
    assert prefill_depth(RingTimes((), (), ROW), 128, 0, riding=0, count=1) == 0
    assert MicroBatches(0, 3, unknown.profiles, ROW).prefills(128, 0, streams=0) == 0


def test_it_can_be_switched_off_whatever_k_is() -> None:
    for count in (0, 3):
        off = MicroBatches(count, 3, (STAGE,) * 3, ROW, unpaired=False)
        off.set_times(ring(0.03, None))
        assert off.prefills(128, 0, streams=4) == 0


def test_a_fixed_k_bounds_paired_volumes_only() -> None:
    fixed = MicroBatches(3, 3, (STAGE,) * 3, ROW)
    fixed.set_times(ring(0.03, None))
    assert fixed.prefills(128, 0, streams=4) == 18


def test_micro_batches_that_no_stream_is_in_hold_nobody_up() -> None:
    many = MicroBatches(20, 3, (STAGE,) * 3, ROW)
    many.set_times(ring(0.03, None))
    assert many.prefills(128, 0, streams=40) == 0
    assert many.prefills(128, 0, streams=2) == 18


def test_it_follows_links_and_streams() -> None:
    decider = MicroBatches(0, 3, (STAGE,) * 3, ROW)
    assert decider.prefills(128, 0, streams=4) == 0
    decider.set_times(ring(0.03, None))
    assert decider.prefills(128, 0, streams=4) == 18
    assert decider.prefills(128, 0, streams=0) == 18
    decider.set_times(ring(0.001, None))
    assert decider.prefills(128, 0, streams=4) == 0


def test_late_in_a_prompt_chunks_are_dearer() -> None:
    stage = Profile(decode=STAGE.decode, prefill=STAGE.prefill, prefill_token_s=1e-8)
    times = RingTimes((stage,) * 3, (LinkFacts(0.01, None),) * 3, ROW)
    # 45 ms without, 63 with chunks of 6 ms, and three times 13 beyond 5000 tokens are too many.
    assert prefill_depth(times, 128, 0, riding=2, count=3) == 8
    assert prefill_depth(times, 128, 10_000, riding=2, count=3) == 0
    decider = MicroBatches(0, 3, times.profiles, ROW)
    decider.set_times(times)
    assert decider.prefills(128, 100, streams=4) == 8
    assert decider.prefills(128, 10_000, streams=4) == 0


@given(
    latency=st.floats(0, 1),
    rate=st.none() | st.floats(1e3, 1e9),
    stages=st.integers(1, 8),
    rows=st.integers(1, 2048),
    riding=st.integers(0, 64),
    count=st.integers(1, 16),
)
def test_they_are_no_more_than_a_ring_can_have(
    latency: float, rate: float | None, stages: int, rows: int, riding: int, count: int
) -> None:
    depth = prefill_depth(ring(latency, rate, stages), rows, 0, riding, count)
    assert 0 <= depth <= MAX_MICRO_BATCHES


@pytest.mark.parametrize("riding", [1, 8, 64])
def test_longer_latency_never_lessens_them(riding: int) -> None:
    depths = [
        prefill_depth(ring(ms / 1000, 12e6), 128, 0, riding, count=3) for ms in range(0, 200, 5)
    ]
    assert depths == sorted(depths)
    assert depths[-1] > depths[0]
