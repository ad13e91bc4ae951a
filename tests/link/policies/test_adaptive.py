import itertools

import pytest

from molink.link.policies.adaptive import AdaptivePolicy
from molink.link.policies.base import (
    ChannelReconnectedEvent,
    DecodeFinishedEvent,
    DecodeStartedEvent,
    LinkEstimatedEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
    RowsProducedEvent,
    SendRowsAction,
    WaitAction,
)
from molink.wire.messages.data_plane import Channel

ROW = 8192
#: The known link's bytes per second and seconds of a round trip.
RATE, ROUND_TRIP_S = 12.5e6, 0.03
#: Rows of a chunk that takes 5 ms on this link.
CHUNK = int(0.005 * RATE) // ROW
BOTH = (Channel.DECODE, Channel.BULK)


def known_link(predict: bool = True) -> AdaptivePolicy:
    policy = AdaptivePolicy(predict)
    policy.handle(LinkEstimatedEvent(ROUND_TRIP_S, ROUND_TRIP_S, RATE), 0.0)
    return policy


def send(policy: AdaptivePolicy, now: float) -> int:
    """Send what may be sent now or a little later; returns how many chunks that was."""
    chunks = 0
    while True:
        match policy.choose_action(now, BOTH):
            case SendRowsAction(_, rows):
                policy.handle(MessageSentEvent(Channel.BULK, rows * ROW), now)
                chunks += 1
            case WaitAction(None):
                return chunks
            case WaitAction(float(until)):
                now = until


def test_decode_goes_first_then_chunks() -> None:
    policy = known_link()
    policy.handle(RowsProducedEvent(0, Channel.BULK, 1000, ROW), 0.0)
    policy.handle(RowsProducedEvent(1, Channel.DECODE, 8, ROW), 0.0)
    assert policy.choose_action(0.0, BOTH) == SendRowsAction(1, 8)
    assert policy.choose_action(0.0, BOTH) == SendRowsAction(0, CHUNK)
    policy.handle(RowsProducedEvent(2, Channel.DECODE, 8, ROW), 0.0)
    assert policy.choose_action(0.0, (Channel.BULK,)) == SendRowsAction(0, CHUNK), (
        "that one can't go yet"
    )
    assert policy.choose_action(0.0, BOTH) == SendRowsAction(2, 8)
    assert policy.choose_action(0.0, (Channel.DECODE,)) == WaitAction()


def test_the_credit_window_bounds_what_is_in_flight() -> None:
    policy = known_link()
    policy.handle(RowsProducedEvent(0, Channel.BULK, 1000, ROW), 0.0)
    in_flight_s = send(policy, 0.0) * CHUNK * ROW / RATE
    assert in_flight_s >= ROUND_TRIP_S, "the link never idles"
    assert in_flight_s <= ROUND_TRIP_S + 0.02, "20 ms in queues at most"
    assert policy.choose_action(0.0, BOTH) == WaitAction(), "an acknowledgement will wake it"
    policy.handle(MessageAcknowledgedEvent(Channel.BULK, CHUNK * ROW, 0.035), 0.035)
    assert isinstance(policy.choose_action(0.035, BOTH), SendRowsAction)


def test_unknown_link_gets_two_chunks() -> None:
    policy = AdaptivePolicy()
    policy.handle(RowsProducedEvent(0, Channel.BULK, 1000, ROW), 0.0)
    first = policy.choose_action(0.0, BOTH)
    assert isinstance(first, SendRowsAction)
    assert first.rows * ROW <= 64 * 1024, "half a second on a link of 1 Mbps"
    policy.handle(MessageSentEvent(Channel.BULK, first.rows * ROW), 0.0)
    assert send(policy, 0.0) == 1, "one more"
    policy.handle(ChannelReconnectedEvent(Channel.BULK), 1.0)
    assert policy.choose_action(1.0, BOTH) == first


def test_chunks_leave_before_expected_decode_rows() -> None:
    policy = known_link()
    policy.handle(RowsProducedEvent(0, Channel.BULK, 1000, ROW), 0.0)
    policy.handle(DecodeStartedEvent(8, 0.020), 0.0)
    now, leaves_at, ahead = 0.0, 0.0, []
    while now < 0.0185:
        match policy.choose_action(now, BOTH):
            case SendRowsAction(_, count):
                policy.handle(MessageSentEvent(Channel.BULK, count * ROW), now)
                leaves_at = max(now, leaves_at) + count * ROW / RATE
                ahead.append((0.020 - now, leaves_at - now))
            case WaitAction(float(until)):
                assert until <= leaves_at + 1e-9, "the link never idles"
                now = until
    assert ahead[0] == (pytest.approx(0.020), pytest.approx(CHUNK * ROW / RATE))
    assert max(under_way for _, under_way in ahead) > 0.010, "half of the time is used at least"
    # Decode rows that come a fifth earlier than predicted still find an idle link.
    assert all(under_way <= max(0.8 * left, 0.002) for left, under_way in ahead)
    policy.handle(DecodeFinishedEvent(8, 0.1), 0.02)
    policy.handle(RowsProducedEvent(1, Channel.DECODE, 8, ROW), 0.02)
    assert policy.choose_action(0.02, BOTH) == SendRowsAction(1, 8)
    assert policy.choose_action(0.02, BOTH) == SendRowsAction(0, CHUNK)


def test_without_prediction_only_the_window_counts() -> None:
    policy = known_link(predict=False)
    policy.handle(RowsProducedEvent(0, Channel.BULK, 1000, ROW), 0.0)
    policy.handle(DecodeStartedEvent(8, 0.013), 0.0)
    idle = known_link(predict=False)
    idle.handle(RowsProducedEvent(0, Channel.BULK, 1000, ROW), 0.0)
    assert send(policy, 0.0) == send(idle, 0.0)


def test_overdue_decode_rows_allow_single_rows() -> None:
    """At 12.5 MB/s a row of 8192 bytes takes 0.655 ms, and a second one would be beyond 1 ms."""
    policy = known_link()
    policy.handle(DecodeFinishedEvent(8, 0.0), 0.0)
    policy.handle(RowsProducedEvent(0, Channel.BULK, 1000, ROW), 0.01)
    assert policy.choose_action(0.01, BOTH) == SendRowsAction(0, 1)
    policy.handle(MessageSentEvent(Channel.BULK, ROW), 0.01)
    held = policy.choose_action(0.01, BOTH)
    assert isinstance(held, WaitAction)
    assert held.until is not None
    assert 0.01 < held.until < 0.01 + ROW / RATE, "before the link would idle"
    assert policy.choose_action(held.until, BOTH) == SendRowsAction(0, 1)


def test_late_timers_extend_the_lead() -> None:
    """If timers are late by 4 ms each time, more bytes must be in flight, or the link idles."""
    policy = known_link()
    policy.handle(RowsProducedEvent(0, Channel.BULK, 100_000, ROW), 0.0)
    now = 1.0
    for _ in range(60):
        policy.handle(DecodeStartedEvent(8, 0.0), now)
        match policy.choose_action(now, BOTH):
            case SendRowsAction(_, rows):
                policy.handle(MessageSentEvent(Channel.BULK, rows * ROW), now)
                policy.handle(MessageAcknowledgedEvent(Channel.BULK, rows * ROW, 0.030), now)
            case WaitAction(float(until)):
                now = until + 0.004
    policy.handle(DecodeStartedEvent(8, 0.0), now)
    decision = policy.choose_action(now, BOTH)
    assert isinstance(decision, SendRowsAction)
    assert 0.003 < decision.rows * ROW / RATE < 0.008, "about as long as a timer is late"


def test_slow_link_gives_chunks_a_tenth_of_the_time() -> None:
    """At 500 kB/s the smallest chunk, of two rows, takes 33 ms."""
    policy = AdaptivePolicy()
    policy.handle(LinkEstimatedEvent(0.03, 0.03, 500e3), 0.0)
    policy.handle(RowsProducedEvent(0, Channel.BULK, 1000, ROW), 0.0)
    sent_at = []
    for seq in range(2000):
        now = seq * 0.001
        policy.handle(DecodeStartedEvent(8, 0.0), now)
        policy.handle(RowsProducedEvent(seq + 1, Channel.DECODE, 1, ROW), now)
        if policy.choose_action(now, BOTH) == SendRowsAction(0, 2):
            sent_at.append(now)
    busy_s = (len(sent_at) - 1) * 2 * ROW / 500e3
    assert busy_s / (sent_at[-1] - sent_at[0]) == pytest.approx(0.1, rel=0.1)


def test_stale_prediction_holds_nothing_back() -> None:
    policy = known_link()
    policy.handle(DecodeFinishedEvent(8, 0.0), 0.0)
    policy.handle(RowsProducedEvent(0, Channel.BULK, 1000, ROW), 0.1)
    assert send(policy, 0.1) > 2


@pytest.mark.parametrize("predict", [True, False])
def test_bulk_is_not_starved_by_endless_decodes(predict: bool) -> None:
    """There is always a decode volume, and a decode step that is overdue."""
    policy = known_link(predict)
    policy.handle(RowsProducedEvent(0, Channel.BULK, 100_000, ROW), 0.0)
    sent_at, volume = [], 0
    for seq in range(2000):
        now = seq * 0.001
        policy.handle(DecodeStartedEvent(8, 0.0), now)
        for _ in range(2):
            volume += 1
            policy.handle(RowsProducedEvent(volume, Channel.DECODE, 8, ROW), now)
            if policy.choose_action(now, BOTH) == SendRowsAction(0, CHUNK):
                sent_at.append(now)
                policy.handle(MessageSentEvent(Channel.BULK, CHUNK * ROW), now)
                policy.handle(MessageAcknowledgedEvent(Channel.BULK, CHUNK * ROW, 0.035), now)
    gaps = [after - before for before, after in itertools.pairwise(sent_at)]
    assert max(sent_at[0], *gaps) < 0.1
    assert len(sent_at) * CHUNK * ROW / RATE < 0.15 * 2.0, "most of the time is left to decode rows"


def test_the_oldest_prefill_goes_first_even_if_it_grows_later() -> None:
    policy = known_link()
    policy.handle(RowsProducedEvent(0, Channel.BULK, 2, ROW), 0.0)
    assert policy.choose_action(0.0, BOTH) == SendRowsAction(0, 2)
    policy.handle(RowsProducedEvent(1, Channel.BULK, 3, ROW), 0.0)
    policy.handle(RowsProducedEvent(0, Channel.BULK, 2, ROW), 0.0)
    assert policy.choose_action(0.0, BOTH) == SendRowsAction(0, 2)
    assert policy.choose_action(0.0, BOTH) == SendRowsAction(1, 3)


def test_single_rows_do_not_reset_starvation() -> None:
    """Intervals that are too short for a chunk don't put off the one that is due."""
    policy = known_link()
    policy.handle(RowsProducedEvent(0, Channel.BULK, 100_000, ROW), 0.0)
    sent = []
    for seq in range(200):
        now = seq * 0.01
        policy.handle(DecodeStartedEvent(8, 0.001), now)
        while isinstance(decision := policy.choose_action(now, BOTH), SendRowsAction):
            sent.append((now, decision.rows))
            policy.handle(MessageSentEvent(Channel.BULK, decision.rows * ROW), now)
            policy.handle(MessageAcknowledgedEvent(Channel.BULK, decision.rows * ROW, 0.035), now)
    assert {rows for _, rows in sent} >= {1, CHUNK}
    chunks_at = [at for at, rows in sent if rows == CHUNK]
    gaps = [after - before for before, after in itertools.pairwise(chunks_at)]
    assert max(gaps) < 0.1
