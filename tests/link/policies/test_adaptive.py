import itertools

import pytest

from molink.link.policies.adaptive import COMMITTED, EVERY, LEAD, Adaptive
from molink.link.policies.base import (
    Acknowledged,
    DecodeFinished,
    DecodeStarted,
    LinkEstimate,
    Produced,
    Reconnected,
    SendRows,
    Sent,
    Wait,
)
from molink.link.policies.credit import FIRST_CHUNK, TARGET
from molink.wire.messages.data import Lane

ROW = 8192
RATE = 12.5e6
CHUNK = int(0.005 * RATE) // ROW
WINDOW = RATE * (0.03 + TARGET + 0.005)
BOTH = (Lane.DECODE, Lane.BULK)


def known_link(predict: bool = True) -> Adaptive:
    policy = Adaptive(predict)
    policy.handle(LinkEstimate(0.03, 0.03, RATE), 0.0)
    return policy


def send(policy: Adaptive, now: float) -> int:
    """Send what may be sent now or a little later; returns how many chunks that was."""
    chunks = 0
    while True:
        match policy.decide(now, BOTH):
            case SendRows(_, rows):
                policy.handle(Sent(Lane.BULK, rows * ROW), now)
                chunks += 1
            case Wait(None):
                return chunks
            case Wait(float(until)):
                now = until


def test_decode_goes_first_then_chunks() -> None:
    policy = known_link()
    policy.handle(Produced(0, Lane.BULK, 1000, ROW), 0.0)
    policy.handle(Produced(1, Lane.DECODE, 8, ROW), 0.0)
    assert policy.decide(0.0, BOTH) == SendRows(1, 8)
    assert policy.decide(0.0, BOTH) == SendRows(0, CHUNK)
    policy.handle(Produced(2, Lane.DECODE, 8, ROW), 0.0)
    assert policy.decide(0.0, (Lane.BULK,)) == SendRows(0, CHUNK), "that one can't go yet"
    assert policy.decide(0.0, BOTH) == SendRows(2, 8)
    assert policy.decide(0.0, (Lane.DECODE,)) == Wait()


def test_the_credit_window_bounds_what_is_in_flight() -> None:
    policy = known_link()
    policy.handle(Produced(0, Lane.BULK, 1000, ROW), 0.0)
    assert send(policy, 0.0) == int(WINDOW // (CHUNK * ROW))
    assert policy.decide(0.0, BOTH) == Wait(), "an acknowledgement will wake it"
    policy.handle(Acknowledged(Lane.BULK, CHUNK * ROW, 0.035), 0.035)
    assert isinstance(policy.decide(0.035, BOTH), SendRows)


def test_on_an_unknown_link_two_chunks() -> None:
    policy = Adaptive()
    policy.handle(Produced(0, Lane.BULK, 1000, ROW), 0.0)
    assert policy.decide(0.0, BOTH) == SendRows(0, FIRST_CHUNK // ROW)
    policy.handle(Sent(Lane.BULK, FIRST_CHUNK), 0.0)
    assert policy.decide(0.0, BOTH) == SendRows(0, FIRST_CHUNK // ROW)
    policy.handle(Sent(Lane.BULK, FIRST_CHUNK), 0.0)
    assert policy.decide(0.0, BOTH) == Wait()
    policy.handle(Reconnected(Lane.BULK), 1.0)
    assert policy.decide(1.0, BOTH) == SendRows(0, FIRST_CHUNK // ROW)


def test_chunks_leave_well_before_the_decode_rows_are_there() -> None:
    policy = known_link()
    policy.handle(Produced(0, Lane.BULK, 1000, ROW), 0.0)
    policy.handle(DecodeStarted(8, 0.020), 0.0)
    now, leaves_at, ahead = 0.0, 0.0, []
    while now < 0.0185:
        match policy.decide(now, BOTH):
            case SendRows(_, count):
                policy.handle(Sent(Lane.BULK, count * ROW), now)
                leaves_at = max(now, leaves_at) + count * ROW / RATE
                ahead.append((0.020 - now, leaves_at - now))
            case Wait(float(until)):
                assert until <= leaves_at + 1e-9, "the link never idles"
                now = until
    # 20 ms ahead of the decode rows 14 ms' worth may be under way, 2 ms ahead 1.4 ms' worth.
    assert ahead[0] == (pytest.approx(0.020), pytest.approx(CHUNK * ROW / RATE))
    assert max(under_way for _, under_way in ahead) > 0.013
    assert all(under_way <= max(COMMITTED * left, LEAD) + 1e-9 for left, under_way in ahead)
    policy.handle(DecodeFinished(8, 0.1), 0.02)
    policy.handle(Produced(1, Lane.DECODE, 8, ROW), 0.02)
    assert policy.decide(0.02, BOTH) == SendRows(1, 8)
    assert policy.decide(0.02, BOTH) == SendRows(0, CHUNK)


def test_without_prediction_only_the_window_counts() -> None:
    policy = known_link(predict=False)
    policy.handle(Produced(0, Lane.BULK, 1000, ROW), 0.0)
    policy.handle(DecodeStarted(8, 0.013), 0.0)
    assert send(policy, 0.0) == int(WINDOW // (CHUNK * ROW))


def test_while_decode_rows_are_overdue_a_row_at_a_time_is_under_way() -> None:
    """At 12.5 MB/s a row of 8192 bytes takes 0.655 ms, and a second one would be beyond 1 ms."""
    policy = known_link()
    policy.handle(DecodeFinished(8, 0.0), 0.0)
    policy.handle(Produced(0, Lane.BULK, 1000, ROW), 0.01)
    assert policy.decide(0.01, BOTH) == SendRows(0, 1)
    policy.handle(Sent(Lane.BULK, ROW), 0.01)
    held = policy.decide(0.01, BOTH)
    assert isinstance(held, Wait)
    assert held.until is not None
    assert 0.01 < held.until < 0.01 + ROW / RATE, "before the link would idle"
    assert policy.decide(held.until, BOTH) == SendRows(0, 1)


def test_timers_that_are_late_are_allowed_for() -> None:
    """Where a timer is late by 4 ms each time, more has to be under way, or the link idles."""
    policy = known_link()
    policy.handle(Produced(0, Lane.BULK, 100_000, ROW), 0.0)
    now = 1.0
    for _ in range(60):
        policy.handle(DecodeStarted(8, 0.0), now)
        match policy.decide(now, BOTH):
            case SendRows(_, rows):
                policy.handle(Sent(Lane.BULK, rows * ROW), now)
                policy.handle(Acknowledged(Lane.BULK, rows * ROW, 0.030), now)
            case Wait(float(until)):
                now = until + 0.004
    policy.handle(DecodeStarted(8, 0.0), now)
    decision = policy.decide(now, BOTH)
    assert isinstance(decision, SendRows)
    # 1 ms and nearly all of the 4: 5 to 7 rows of 0.655 ms.
    assert decision.rows in (6, 7)


def test_on_a_slow_link_a_chunk_leaves_as_rarely_as_it_takes_a_tenth_of_the_time() -> None:
    """At 500 kB/s the smallest chunk, of two rows, takes 33 ms."""
    policy = Adaptive()
    policy.handle(LinkEstimate(0.03, 0.03, 500e3), 0.0)
    policy.handle(Produced(0, Lane.BULK, 1000, ROW), 0.0)
    sent_at = []
    for tick in range(2000):
        now = tick * 0.001
        policy.handle(DecodeStarted(8, 0.0), now)
        policy.handle(Produced(tick + 1, Lane.DECODE, 1, ROW), now)
        if policy.decide(now, BOTH) == SendRows(0, 2):
            sent_at.append(now)
    gaps = [after - before for before, after in itertools.pairwise(sent_at)]
    assert gaps == pytest.approx([2 * ROW / 500e3 / 0.1] * len(gaps), abs=0.002)
    assert len(gaps) == 5


def test_a_prediction_that_is_far_too_late_holds_nothing_back() -> None:
    policy = known_link()
    policy.handle(DecodeFinished(8, 0.0), 0.0)
    policy.handle(Produced(0, Lane.BULK, 1000, ROW), 0.1)
    assert send(policy, 0.1) > 2


@pytest.mark.parametrize("predict", [True, False])
def test_bulk_gets_a_chunk_every_50_ms_while_decodes_never_stop(predict: bool) -> None:
    """There is always a decode volume, and a decode step that should be over by now."""
    policy = known_link(predict)
    policy.handle(Produced(0, Lane.BULK, 100_000, ROW), 0.0)
    sent_at, volume = [], 0
    for tick in range(2000):
        now = tick * 0.001
        policy.handle(DecodeStarted(8, 0.0), now)
        for _ in range(2):
            volume += 1
            policy.handle(Produced(volume, Lane.DECODE, 8, ROW), now)
            if policy.decide(now, BOTH) == SendRows(0, CHUNK):
                sent_at.append(now)
                policy.handle(Sent(Lane.BULK, CHUNK * ROW), now)
                policy.handle(Acknowledged(Lane.BULK, CHUNK * ROW, 0.035), now)
    gaps = [after - before for before, after in itertools.pairwise(sent_at)]
    assert sent_at[0] <= EVERY + 0.001
    assert max(gaps) <= EVERY + 0.0011
    assert min(gaps) >= EVERY - 1e-9, "and no more than that"


def test_the_oldest_prefill_goes_first_even_if_it_grows_later() -> None:
    policy = known_link()
    policy.handle(Produced(0, Lane.BULK, 2, ROW), 0.0)
    assert policy.decide(0.0, BOTH) == SendRows(0, 2)
    policy.handle(Produced(1, Lane.BULK, 3, ROW), 0.0)
    policy.handle(Produced(0, Lane.BULK, 2, ROW), 0.0)
    assert policy.decide(0.0, BOTH) == SendRows(0, 2)
    assert policy.decide(0.0, BOTH) == SendRows(1, 3)


def test_a_row_now_and_then_is_no_chunk() -> None:
    """Intervals that are too short for a chunk don't put off the one that is due."""
    policy = known_link()
    policy.handle(Produced(0, Lane.BULK, 100_000, ROW), 0.0)
    sent = []
    for tick in range(200):
        now = tick * 0.01
        policy.handle(DecodeStarted(8, 0.001), now)
        while isinstance(decision := policy.decide(now, BOTH), SendRows):
            sent.append((now, decision.rows))
            policy.handle(Sent(Lane.BULK, decision.rows * ROW), now)
            policy.handle(Acknowledged(Lane.BULK, decision.rows * ROW, 0.035), now)
    assert {rows for _, rows in sent} >= {1, CHUNK}
    chunks_at = [at for at, rows in sent if rows == CHUNK]
    gaps = [after - before for before, after in itertools.pairwise(chunks_at)]
    assert max(gaps) <= EVERY + 0.0101
