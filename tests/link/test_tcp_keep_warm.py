import pytest

from molink.link.policies.base import LinkEstimatedEvent
from molink.link.tcp_keep_warm import (
    IDLE_PAUSE,
    MAX_BYTES,
    MAX_PROMPT_GAP,
    MIN_BYTES,
    MIN_RTT,
    SHARE_S,
    TcpKeepWarm,
)

FAST = LinkEstimatedEvent(0.06, 0.06, 12.5e6)


def lately(estimate: LinkEstimatedEvent = FAST, at: float = 0.0) -> TcpKeepWarm:
    warmth = TcpKeepWarm()
    warmth.on_prefill(at)
    warmth.on_sent(at)
    return warmth


def test_a_fortieth_of_the_link_in_pauses() -> None:
    warmth = lately()
    assert warmth.due_bytes(FAST, IDLE_PAUSE - 0.01) == 0
    assert warmth.due_bytes(FAST, IDLE_PAUSE) == 62_500
    assert pytest.approx(1 / 40) == SHARE_S / (IDLE_PAUSE + 0.01)
    warmth.on_sent(IDLE_PAUSE)
    assert warmth.due_bytes(FAST, IDLE_PAUSE + 0.1) == 0
    assert warmth.due_bytes(FAST, 2 * IDLE_PAUSE) == 62_500


def test_not_before_a_prompt_nor_long_after_it() -> None:
    assert TcpKeepWarm().due_bytes(FAST, 100.0) == 0
    warmth = lately()
    for seq in range(100):
        warmth.on_sent(seq / 5)
    assert warmth.due_bytes(FAST, MAX_PROMPT_GAP + 10.1) == 0
    never = TcpKeepWarm()
    never.on_sent(0.0)
    assert never.due_bytes(FAST, 1.0) == 0, "what is sent may be noise"


def test_only_where_it_is_worth_it_and_within_bounds() -> None:
    warmth = lately()
    assert warmth.due_bytes(LinkEstimatedEvent(0.0, 0.06, None), 1.0) == 0
    assert warmth.due_bytes(LinkEstimatedEvent(0.06, 0.06, MIN_BYTES / SHARE_S - 1000), 1.0) == 0
    assert warmth.due_bytes(LinkEstimatedEvent(MIN_RTT / 2, MIN_RTT / 2, 12.5e6), 1.0) == 0
    assert warmth.due_bytes(LinkEstimatedEvent(0.06, 0.06, 125e6), 1.0) == MAX_BYTES
