"""Algorithm 1 of the MoLink paper, line by line."""

import pytest

from molink.link.policies.base import (
    Acknowledged,
    DecodeFinished,
    DecodeStarted,
    LinkEstimate,
    Produced,
    SendRows,
    Sent,
    Wait,
)
from molink.link.policies.molink import FIRST_CHUNK, MAX_WAITING, MoLink
from molink.wire.messages.data import Lane

ROW = 8192
RATE = 12.5e6
BULK = (Lane.BULK,)


def known_link() -> MoLink:
    policy = MoLink()
    policy.handle(LinkEstimate(0.06, 0.06, RATE), 0.0)
    return policy


def decode(policy: MoLink, volume: int, now: float = 0.0) -> None:
    policy.handle(Produced(volume, Lane.DECODE, 2, ROW), now)


def prefill(policy: MoLink, volume: int, rows: int, now: float = 0.0) -> None:
    policy.handle(Produced(volume, Lane.BULK, rows, ROW), now)


def test_line_1_volumes_queue_by_kind_in_order() -> None:
    policy = known_link()
    prefill(policy, 0, 3)
    decode(policy, 1)
    decode(policy, 2)
    prefill(policy, 3, 3)
    sends = [policy.decide(0.0, BULK) for _ in range(4)]
    assert sends == [SendRows(1, 2), SendRows(2, 2), SendRows(0, 3), SendRows(3, 3)]
    assert policy.decide(0.0, BULK) == Wait()


def test_line_2_the_weight_rises_while_both_wait() -> None:
    policy = known_link()
    decode(policy, 0)
    policy.decide(0.0, BULK)
    assert policy.weight == 0
    prefill(policy, 1, 3)
    for volume in (2, 3):
        decode(policy, volume)
        policy.decide(0.0, BULK)
    assert policy.weight == 2
    assert policy.decide(0.0, ()) == Wait()
    assert policy.weight == 2, "no iteration without a transmission"


def test_line_3_decode_goes_first_below_the_most_weight() -> None:
    policy = known_link()
    prefill(policy, 0, 100)
    for volume in range(1, MAX_WAITING):
        decode(policy, volume)
        assert policy.decide(0.0, BULK) == SendRows(volume, 2)
    assert policy.weight == MAX_WAITING - 1


def test_the_weight_does_not_rise_while_prefill_waits_alone() -> None:
    policy = known_link()
    policy.handle(DecodeStarted(2, 0.02), 0.0)
    prefill(policy, 0, 1000)
    for volume in range(1, MAX_WAITING):
        decode(policy, volume)
        policy.decide(0.0, BULK)
    assert policy.weight == MAX_WAITING - 1
    assert policy.decide(0.0, BULK) == SendRows(0, int(0.02 * RATE / ROW)), (
        "not the whole remainder"
    )


def test_line_4_at_the_most_weight_the_whole_remainder_goes() -> None:
    policy = known_link()
    policy.handle(DecodeStarted(2, 0.02), 0.0)
    prefill(policy, 0, 1000)
    chunk = int(0.02 * RATE / ROW)
    assert policy.decide(0.0, BULK) == SendRows(0, chunk)
    for volume in range(1, MAX_WAITING + 1):
        decode(policy, volume)
    for volume in range(1, MAX_WAITING):
        assert policy.decide(0.0, BULK) == SendRows(volume, 2)
    assert policy.decide(0.0, BULK) == SendRows(0, 1000 - chunk)
    assert policy.weight == 0
    assert policy.decide(0.0, BULK) == SendRows(MAX_WAITING, 2)


def test_line_4_otherwise_a_chunk_and_the_weight_is_reset() -> None:
    policy = known_link()
    policy.handle(DecodeStarted(2, 0.02), 0.0)
    prefill(policy, 0, 1000)
    decode(policy, 1)
    assert policy.decide(0.0, BULK) == SendRows(1, 2)
    assert policy.weight == 1
    assert policy.decide(0.0, BULK) == SendRows(0, int(0.02 * RATE / ROW))
    assert policy.weight == 0


def test_the_three_cases_of_a_chunk() -> None:
    policy = known_link()
    prefill(policy, 0, 1000)
    policy.handle(DecodeStarted(2, 0.02), 0.0)
    assert policy.decide(0.0, BULK) == SendRows(0, int(0.02 * RATE / ROW))  # t_c = t_s
    assert policy.decide(0.005, BULK) == SendRows(0, int(0.015 * RATE / ROW))  # t_c > t_s
    policy.handle(DecodeFinished(2, 0.12), 0.02)
    assert policy.decide(0.06, BULK) == SendRows(0, int(0.08 * RATE / ROW))  # t_c < t_s
    assert policy.decide(0.15, BULK) == SendRows(0, 1), "late: a row"
    policy.handle(DecodeFinished(2), 0.2)
    assert isinstance(policy.decide(0.2, BULK), SendRows)
    assert policy.decide(0.2, BULK) == Wait(), "nobody decodes: all that was left"


def test_a_transmission_blocks_until_it_should_have_left() -> None:
    policy = known_link()
    prefill(policy, 0, 10)
    decode(policy, 1)
    assert policy.decide(0.0, BULK) == SendRows(1, 2)
    policy.handle(Sent(Lane.BULK, 125_000), 0.0)
    policy.handle(Sent(Lane.BULK, 125_000), 0.001)
    decode(policy, 2)
    waits = policy.decide(0.001, BULK)
    assert isinstance(waits, Wait)
    assert waits.until == pytest.approx(0.02)
    assert policy.decide(0.0200001, BULK) == SendRows(2, 2)
    policy.handle(Sent(Lane.BULK, 125_000), 0.03)
    policy.handle(Acknowledged(Lane.BULK, 375_000, 0.001), 0.031)
    assert policy.decide(0.031, BULK) == SendRows(0, 10), "all has arrived sooner than predicted"


def test_before_a_rate_is_known_a_chunk_waits_for_its_acknowledgement() -> None:
    policy = MoLink()
    policy.handle(DecodeStarted(2, 0.02), 0.0)
    prefill(policy, 0, 100)
    assert policy.decide(0.0, BULK) == SendRows(0, FIRST_CHUNK // ROW)
    policy.handle(Sent(Lane.BULK, FIRST_CHUNK), 0.0)
    assert policy.decide(0.01, BULK) == Wait(None)
    policy.handle(Acknowledged(Lane.BULK, FIRST_CHUNK, 0.03), 0.03)
    assert isinstance(policy.decide(0.03, BULK), SendRows)


def test_a_volume_that_grows_keeps_its_place() -> None:
    policy = known_link()
    prefill(policy, 0, 3)
    assert policy.decide(0.0, BULK) == SendRows(0, 3)
    prefill(policy, 1, 3)
    prefill(policy, 0, 2)
    assert policy.decide(0.0, BULK) == SendRows(0, 2)
    assert policy.decide(0.0, BULK) == SendRows(1, 3)
