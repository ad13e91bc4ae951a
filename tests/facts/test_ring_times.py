"""The time that a prompt takes through a ring."""

import msgspec
import pytest

from molink.facts.profile import MAX_CHUNK_ROWS, Profile
from molink.facts.ring_times import LinkFacts, RequestCosts, RingTimes

#: A millisecond per row, but at least 5 ms; each earlier token of a row adds a microsecond.
STAGE = Profile(
    decode=((1, 0.005),), prefill=((5, 0.005), (512, 0.512)), context=0, prefill_token_s=1e-6
)


def test_prompt_time_is_the_sum_of_its_chunks() -> None:
    times = RingTimes((STAGE,), (), 1000)
    assert times.prompt_s(1) == pytest.approx(0.005 + 0.5e-6)
    rows = MAX_CHUNK_ROWS + 100
    assert times.prompt_s(rows) == pytest.approx(0.001 * rows + 1e-6 * rows * rows / 2)
    assert times.prompt_s(100, before=50) == pytest.approx(0.1 + 1e-6 * 100 * 100)


def test_slowest_link_determines_prompt_time() -> None:
    links = (LinkFacts(0.02, 1e5), LinkFacts(0.03, 1e5))
    # A row takes 10 ms on the link to the second stage.
    times = RingTimes((STAGE, STAGE), links, 1000)
    round_trip = 2 * 0.005 + 0.02 + 0.03 + 0.01 + 64 / 1e5
    assert times.round_trip_s(1) == pytest.approx(round_trip)
    assert times.prompt_s(200) == pytest.approx(round_trip - 0.01 + 2.0)


def test_unknown_ring_has_no_times() -> None:
    assert RingTimes((), (), 0).prompt_s(1000) == 0.0


def test_costs_are_those_of_the_slowest_stage() -> None:
    decode = tuple((rows, 0.01 + 0.0005 * rows) for rows in (1, 8, 64))
    prefill = tuple((rows, 0.01 + 0.0002 * rows) for rows in (16, 512))
    stage = Profile(decode=decode, prefill=prefill, prefill_token_s=1e-8)
    slow = stage.scale_by(2.0)
    costs = RequestCosts.from_times(RingTimes((stage, slow), (), 0))
    assert costs is not None
    for rows, before in ((1024, 0), (4096, 0), (8192, 0), (2048, 8192)):
        chunks = rows / 512
        expected = 2 * (chunks * (0.01 + 0.0002 * 512) + 1e-8 * rows * (before + rows / 2))
        assert costs.prefill_s(rows, before) == pytest.approx(expected, rel=0.02)
    assert costs.answer_s == pytest.approx(0.001)


def test_unmeasured_ring_has_no_costs() -> None:
    assert RequestCosts.from_times(RingTimes((), (), 0)) is None
    assert RequestCosts.from_times(RingTimes((Profile(),), (), 0)) is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_invalid_costs_are_rejected(wrong: float) -> None:
    with pytest.raises(ValueError, match="not valid times"):
        RequestCosts(0.1, wrong)
    with pytest.raises(ValueError, match=r"not valid times|Expected"):
        msgspec.msgpack.decode(msgspec.msgpack.encode([0.1, 0.0, wrong]), type=RequestCosts)
