"""When a ring that serves nobody else has a prompt's first token."""

import pytest

from molink.facts.profile import Profile
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.swarm.placement.ttft import predict_ttft

#: 10 ms per row, from 64 rows on.
STAGE = Profile(decode=((1, 0.01),), prefill=((64, 0.64), (1024, 10.24)))
#: A row of 1000 bytes takes 1 ms, a token 0.064 ms; 50 ms until it is there.
LINK = LinkFacts(0.05, 1e6)


def test_ttft_of_one_stage() -> None:
    times = RingTimes([STAGE], (), 1000)
    assert predict_ttft(times, 64) == pytest.approx(0.64)
    assert predict_ttft(times, 512) == pytest.approx(5.12)
    assert predict_ttft(times, 64, [3.0]) == pytest.approx(3 * 0.64)


def test_ttft_of_one_chunk() -> None:
    times = RingTimes([STAGE, STAGE], (LINK, LINK), 1000)
    assert predict_ttft(times, 64) == pytest.approx(0.64 + 0.064 + 0.05 + 0.64 + 0.050064)


def test_stages_overlap_chunks() -> None:
    times = RingTimes([STAGE, STAGE], (LINK, LINK), 1000)
    assert 5.12 < predict_ttft(times, 512) < 0.75 * 2 * 5.12


def test_slow_link_serializes_chunks() -> None:
    slow = LinkFacts(0.05, 1e4)
    times = RingTimes([STAGE, STAGE], (slow, slow), 1000)
    assert predict_ttft(times, 512) > 51.2


def test_ttft_needs_measured_stages() -> None:
    assert predict_ttft(RingTimes([STAGE, Profile()], (LINK, LINK), 1000), 64) == 0.0
