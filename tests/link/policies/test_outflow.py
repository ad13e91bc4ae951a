"""When sent bytes have left, by hand: a link of 1 MB/s and a round trip of 50 ms."""

import pytest

from molink.link.policies.base import (
    ChannelReconnectedEvent,
    LinkEstimatedEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
)
from molink.link.policies.outflow import MAX_CORRECTION, MIN_RATE_SHARE, Outflow
from molink.wire.messages.data_plane import Channel

RTT = 0.05


def known(rate: float = 1e6) -> Outflow:
    outflow = Outflow()
    outflow.handle(LinkEstimatedEvent(RTT, RTT, rate), 0.0)
    return outflow


def sent(outflow: Outflow, nbytes: int, now: float) -> None:
    outflow.handle(MessageSentEvent(Channel.BULK, nbytes), now)


def back(outflow: Outflow, nbytes: int, now: float) -> None:
    outflow.handle(MessageAcknowledgedEvent(Channel.BULK, nbytes, 0.0), now)


def test_messages_leave_in_sequence() -> None:
    outflow = known()
    sent(outflow, 10_000, 1.0)
    sent(outflow, 5_000, 1.002)
    assert outflow.leaves_at == pytest.approx(1.015)
    assert outflow.is_busy(1.014)
    assert not outflow.is_busy(1.016)
    sent(outflow, 1_000, 2.0)
    assert outflow.leaves_at == pytest.approx(2.001)


def test_unacknowledged_data_is_in_flight_without_a_rate() -> None:
    outflow = Outflow()
    sent(outflow, 1000, 0.0)
    assert outflow.is_busy(10.0)
    back(outflow, 1000, 10.0)
    assert not outflow.is_busy(10.0)
    sent(outflow, 1000, 11.0)
    outflow.handle(ChannelReconnectedEvent(Channel.BULK), 11.5)
    assert not outflow.is_busy(11.5)


def test_lateness_carries_over_within_a_stretch() -> None:
    """Four messages of 10 ms each.

    The first is acknowledged 3 ms late, so the others will be, too.
    """
    outflow = known()
    for number in range(4):
        sent(outflow, 10_000, 0.001 * number)
    assert outflow.leaves_at == pytest.approx(0.040)
    back(outflow, 10_000, 0.010 + RTT + 0.003)
    assert outflow.leaves_at == pytest.approx(0.043)
    back(outflow, 10_000, 0.020 + RTT + 0.001)
    assert outflow.leaves_at == pytest.approx(0.041), "the least of late counts"


def test_a_correction_is_bounded() -> None:
    outflow = known()
    for _ in range(2):
        sent(outflow, 10_000, 0.0)
    back(outflow, 10_000, 0.010 + RTT + 0.5)
    assert outflow.leaves_at == pytest.approx(0.020 + MAX_CORRECTION)


def test_corrections_end_with_a_stretch() -> None:
    outflow = known()
    sent(outflow, 10_000, 0.0)
    sent(outflow, 10_000, 1.0)
    back(outflow, 10_000, 1.001)
    assert outflow.leaves_at == pytest.approx(1.010)


def test_rate_share_follows_a_slower_link() -> None:
    """At 900 kB/s a message of 10 000 bytes takes 11.1 ms instead of 10."""
    outflow = known()
    messages = 300
    left = [10_000 / 0.9e6 * (number + 1) for number in range(messages)]
    events = [(0.001 * number, "sent") for number in range(messages)]
    events += [(at + RTT, "back") for at in left]
    for at, what in sorted(events):
        (sent if what == "sent" else back)(outflow, 10_000, at)
    assert MIN_RATE_SHARE < outflow.rate_share < 0.97


def test_rate_share_is_stable_with_a_right_estimate() -> None:
    outflow = known()
    for number in range(100):
        sent(outflow, 10_000, 0.001 * number)
    for number in range(99):
        back(outflow, 10_000, 0.010 * (number + 1) + RTT)
    assert outflow.rate_share == pytest.approx(1.0)
    assert outflow.leaves_at == pytest.approx(1.0)
