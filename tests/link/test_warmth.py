import pytest

from molink.link.policies.base import LinkEstimate
from molink.link.warmth import FAR, LEAST, MOST, OFTEN, PAUSE, SHARE_S, Warmth

FAST = LinkEstimate(0.06, 0.06, 12.5e6)


def lately(estimate: LinkEstimate = FAST, at: float = 0.0) -> Warmth:
    warmth = Warmth()
    warmth.prefill(at)
    warmth.sent(at)
    return warmth


def test_a_fortieth_of_the_link_in_pauses() -> None:
    warmth = lately()
    assert warmth.due(FAST, PAUSE - 0.01) == 0
    assert warmth.due(FAST, PAUSE) == 62_500
    assert pytest.approx(1 / 40) == SHARE_S / (PAUSE + 0.01)
    warmth.sent(PAUSE)
    assert warmth.due(FAST, PAUSE + 0.1) == 0
    assert warmth.due(FAST, 2 * PAUSE) == 62_500


def test_not_before_a_prompt_nor_long_after_it() -> None:
    assert Warmth().due(FAST, 100.0) == 0
    warmth = lately()
    for tick in range(100):
        warmth.sent(tick / 5)
    assert warmth.due(FAST, OFTEN + 10.1) == 0
    never = Warmth()
    never.sent(0.0)
    assert never.due(FAST, 1.0) == 0, "what is sent may be noise"


def test_only_where_it_is_worth_it_and_within_bounds() -> None:
    warmth = lately()
    assert warmth.due(LinkEstimate(0.0, 0.06, None), 1.0) == 0
    assert warmth.due(LinkEstimate(0.06, 0.06, LEAST / SHARE_S - 1000), 1.0) == 0
    assert warmth.due(LinkEstimate(FAR / 2, FAR / 2, 12.5e6), 1.0) == 0
    assert warmth.due(LinkEstimate(0.06, 0.06, 125e6), 1.0) == MOST
