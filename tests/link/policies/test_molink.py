"""Algorithm 1 of the MoLink paper, line by line."""

import pytest

from molink.link.policies.base import (
    DecodeFinishedEvent,
    DecodeStartedEvent,
    LinkEstimatedEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
    RowsProducedEvent,
    SendRowsAction,
    WaitAction,
)
from molink.link.policies.molink import FIRST_CHUNK, MAX_WAITING, MoLinkPolicy
from molink.wire.messages.data_plane import Channel

ROW = 8192
RATE = 12.5e6
BULK = (Channel.BULK,)


def known_link() -> MoLinkPolicy:
    policy = MoLinkPolicy()
    policy.handle(LinkEstimatedEvent(0.06, 0.06, RATE), 0.0)
    return policy


def decode(policy: MoLinkPolicy, volume: int, now: float = 0.0) -> None:
    policy.handle(RowsProducedEvent(volume, Channel.DECODE, 2, ROW), now)


def prefill(policy: MoLinkPolicy, volume: int, rows: int, now: float = 0.0) -> None:
    policy.handle(RowsProducedEvent(volume, Channel.BULK, rows, ROW), now)


def test_line_1_volumes_queue_by_kind_in_order() -> None:
    policy = known_link()
    prefill(policy, 0, 3)
    decode(policy, 1)
    decode(policy, 2)
    prefill(policy, 3, 3)
    sends = [policy.choose_action(0.0, BULK) for _ in range(4)]
    assert sends == [
        SendRowsAction(1, 2),
        SendRowsAction(2, 2),
        SendRowsAction(0, 3),
        SendRowsAction(3, 3),
    ]
    assert policy.choose_action(0.0, BULK) == WaitAction()


def test_line_2_the_weight_rises_while_both_wait() -> None:
    policy = known_link()
    decode(policy, 0)
    policy.choose_action(0.0, BULK)
    assert policy.weight == 0
    prefill(policy, 1, 3)
    for volume in (2, 3):
        decode(policy, volume)
        policy.choose_action(0.0, BULK)
    assert policy.weight == 2
    assert policy.choose_action(0.0, ()) == WaitAction()
    assert policy.weight == 2, "no iteration without a transmission"


def test_line_3_decode_goes_first_below_the_most_weight() -> None:
    policy = known_link()
    prefill(policy, 0, 100)
    for volume in range(1, MAX_WAITING):
        decode(policy, volume)
        assert policy.choose_action(0.0, BULK) == SendRowsAction(volume, 2)
    assert policy.weight == MAX_WAITING - 1


def test_the_weight_does_not_rise_while_prefill_waits_alone() -> None:
    policy = known_link()
    policy.handle(DecodeStartedEvent(2, 0.02), 0.0)
    prefill(policy, 0, 1000)
    for volume in range(1, MAX_WAITING):
        decode(policy, volume)
        policy.choose_action(0.0, BULK)
    assert policy.weight == MAX_WAITING - 1
    assert policy.choose_action(0.0, BULK) == SendRowsAction(0, int(0.02 * RATE / ROW)), (
        "not the whole remainder"
    )


def test_line_4_at_the_most_weight_the_whole_remainder_goes() -> None:
    policy = known_link()
    policy.handle(DecodeStartedEvent(2, 0.02), 0.0)
    prefill(policy, 0, 1000)
    chunk = int(0.02 * RATE / ROW)
    assert policy.choose_action(0.0, BULK) == SendRowsAction(0, chunk)
    for volume in range(1, MAX_WAITING + 1):
        decode(policy, volume)
    for volume in range(1, MAX_WAITING):
        assert policy.choose_action(0.0, BULK) == SendRowsAction(volume, 2)
    assert policy.choose_action(0.0, BULK) == SendRowsAction(0, 1000 - chunk)
    assert policy.weight == 0
    assert policy.choose_action(0.0, BULK) == SendRowsAction(MAX_WAITING, 2)


def test_line_4_sends_a_chunk_and_resets_the_weight() -> None:
    policy = known_link()
    policy.handle(DecodeStartedEvent(2, 0.02), 0.0)
    prefill(policy, 0, 1000)
    decode(policy, 1)
    assert policy.choose_action(0.0, BULK) == SendRowsAction(1, 2)
    assert policy.weight == 1
    assert policy.choose_action(0.0, BULK) == SendRowsAction(0, int(0.02 * RATE / ROW))
    assert policy.weight == 0


def test_the_three_cases_of_a_chunk() -> None:
    policy = known_link()
    prefill(policy, 0, 1000)
    policy.handle(DecodeStartedEvent(2, 0.02), 0.0)
    assert policy.choose_action(0.0, BULK) == SendRowsAction(0, int(0.02 * RATE / ROW))  # t_c = t_s
    assert policy.choose_action(0.005, BULK) == SendRowsAction(
        0, int(0.015 * RATE / ROW)
    )  # t_c > t_s
    policy.handle(DecodeFinishedEvent(2, 0.12), 0.02)
    assert policy.choose_action(0.06, BULK) == SendRowsAction(
        0, int(0.08 * RATE / ROW)
    )  # t_c < t_s
    assert policy.choose_action(0.15, BULK) == SendRowsAction(0, 1), "late: a row"
    policy.handle(DecodeFinishedEvent(2), 0.2)
    assert isinstance(policy.choose_action(0.2, BULK), SendRowsAction)
    assert policy.choose_action(0.2, BULK) == WaitAction(), "nobody decodes: all that was left"


def test_a_transmission_blocks_until_it_should_have_left() -> None:
    policy = known_link()
    prefill(policy, 0, 10)
    decode(policy, 1)
    assert policy.choose_action(0.0, BULK) == SendRowsAction(1, 2)
    policy.handle(MessageSentEvent(Channel.BULK, 125_000), 0.0)
    policy.handle(MessageSentEvent(Channel.BULK, 125_000), 0.001)
    decode(policy, 2)
    waits = policy.choose_action(0.001, BULK)
    assert isinstance(waits, WaitAction)
    assert waits.until == pytest.approx(0.02)
    assert policy.choose_action(0.0200001, BULK) == SendRowsAction(2, 2)
    policy.handle(MessageSentEvent(Channel.BULK, 125_000), 0.03)
    policy.handle(MessageAcknowledgedEvent(Channel.BULK, 375_000, 0.001), 0.031)
    assert policy.choose_action(0.031, BULK) == SendRowsAction(0, 10), (
        "all has arrived sooner than predicted"
    )


def test_before_a_rate_is_known_a_chunk_waits_for_its_acknowledgement() -> None:
    policy = MoLinkPolicy()
    policy.handle(DecodeStartedEvent(2, 0.02), 0.0)
    prefill(policy, 0, 100)
    assert policy.choose_action(0.0, BULK) == SendRowsAction(0, FIRST_CHUNK // ROW)
    policy.handle(MessageSentEvent(Channel.BULK, FIRST_CHUNK), 0.0)
    assert policy.choose_action(0.01, BULK) == WaitAction(None)
    policy.handle(MessageAcknowledgedEvent(Channel.BULK, FIRST_CHUNK, 0.03), 0.03)
    assert isinstance(policy.choose_action(0.03, BULK), SendRowsAction)


def test_a_volume_that_grows_keeps_its_place() -> None:
    policy = known_link()
    prefill(policy, 0, 3)
    assert policy.choose_action(0.0, BULK) == SendRowsAction(0, 3)
    prefill(policy, 1, 3)
    prefill(policy, 0, 2)
    assert policy.choose_action(0.0, BULK) == SendRowsAction(0, 2)
    assert policy.choose_action(0.0, BULK) == SendRowsAction(1, 3)
