"""How long a prompt takes through a ring."""

import pytest

from molink.facts.profile import MAX_CHUNK_ROWS, Profile
from molink.facts.ring_times import LinkFacts, RingTimes

#: A millisecond for each row, 5 ms at least; each token before a row takes a microsecond more.
STAGE = Profile(
    decode=((1, 0.005),), prefill=((5, 0.005), (512, 0.512)), context=0, prefill_token_s=1e-6
)


def test_a_prompt_on_one_stage_takes_what_its_chunks_do() -> None:
    times = RingTimes((STAGE,), (), 1000)
    assert times.prompt_s(1) == pytest.approx(0.005 + 0.5e-6)
    rows = MAX_CHUNK_ROWS + 100
    assert times.prompt_s(rows) == pytest.approx(0.001 * rows + 1e-6 * rows * rows / 2)
    assert times.prompt_s(100, before=50) == pytest.approx(0.1 + 1e-6 * 100 * 100)


def test_where_a_link_is_slowest_it_decides() -> None:
    links = (LinkFacts(0.02, 1e5), LinkFacts(0.03, 1e5))
    times = RingTimes((STAGE, STAGE), links, 1000)  # a row takes 10 ms to the second stage
    turn = 2 * 0.005 + 0.02 + 0.03 + 0.01 + 64 / 1e5
    assert times.round_trip_s(1) == pytest.approx(turn)
    assert times.prompt_s(200) == pytest.approx(turn - 0.01 + 2.0)


def test_of_an_unknown_ring_nothing_is_said() -> None:
    assert RingTimes((), (), 0).prompt_s(1000) == 0.0
