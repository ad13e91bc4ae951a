"""What daemons are told: tokens, rejections, and what happens when they are gone."""

from array import array
from typing import Any

import pytest

from molink.routing.cache_report import CacheReport, span_digests, unpack_report
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.prefix_tree import ROOT
from molink.scheduler.prompt_assembler import PART_TIMEOUT_S
from molink.scheduler.request import Emission
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import data_codec
from molink.wire.messages.data_plane import MAX_GRAMMAR_BYTES, Heartbeat, SamplingParams
from molink.wire.messages.serving import (
    Cancel,
    Credit,
    OutputToken,
    OutputTokens,
    PromptFragment,
    Rejected,
    Submit,
)
from molink.wire.sockets.server import MessageSender
from molinkd.worker.request_receiver import RequestReceiver

HERE = MessageSender(b"\0conn", "daemon")


class Wire:
    """Records what is sent; connections in ``gone`` can't be reached."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.gone: set[bytes] = set()

    def __call__(self, identity: bytes, message: Any, payload: Any = None) -> bool:
        if identity in self.gone:
            return False
        self.sent.append((identity, message))
        return True


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def head() -> Scheduler:
    return Scheduler(
        SchedulerConfig(8, 4, 1, max_num_seqs=2, max_queue_len=2, max_model_len=24), epoch=3
    )


@pytest.fixture
def desk(head: Scheduler, wire: Wire) -> RequestReceiver:
    return RequestReceiver(head, "p1", 100, wire)


def ask(
    desk: RequestReceiver,
    key: str,
    ids: list[int],
    sender: MessageSender = HERE,
    epoch: int = 3,
    **fields: str | float,
) -> None:
    count = len(ids)
    submit = Submit("p1", epoch, key, count, count, 4, SamplingParams(), **fields)
    desk.handle_message(sender, submit, None, 0.0)
    payload = memoryview(array("i", ids).tobytes())
    desk.handle_message(sender, PromptFragment(key, 0, Payload("i32", (count,))), payload, 0.0)


def reasons(wire: Wire) -> list[tuple[str, str]]:
    return [(each.key, each.reason) for _, each in wire.sent if isinstance(each, Rejected)]


def test_a_request_reaches_the_head(desk: RequestReceiver, head: Scheduler) -> None:
    ask(desk, "k", [1, 2, 3])
    assert head.live_requests == [("daemon", "k")]
    desk.handle_message(HERE, Cancel("k"), None, 0.0)
    assert (head.live_requests, len(desk)) == ([], 0)


def test_a_grammar_that_is_too_long_is_rejected(
    desk: RequestReceiver, head: Scheduler, wire: Wire
) -> None:
    size = MAX_GRAMMAR_BYTES + 1
    submit = Submit("p1", 3, "k", 1, 1, 4, SamplingParams(), payload=Payload("u8", (size,)))
    desk.handle_message(HERE, submit, memoryview(bytes(size)), 0.0)
    assert reasons(wire) == [("k", "invalid")]


def test_another_epoch_is_rejected(desk: RequestReceiver, head: Scheduler, wire: Wire) -> None:
    ask(desk, "old", [1, 2], epoch=2)
    assert reasons(wire) == [("old", "epoch")]
    assert head.live_requests == []


def test_rejections_name_their_reason(desk: RequestReceiver, wire: Wire) -> None:
    ask(desk, "long", list(range(30)))
    ask(desk, "strange id", [1, 100])
    for index in range(5):
        ask(desk, f"k{index}", [1, 2])
    assert reasons(wire) == [("long", "too_long"), ("strange id", "invalid"), ("k4", "overloaded")]
    assert wire.sent[-1][1].retry_after > 0


def test_it_is_told_whose_turn_it_is_and_until_when(
    desk: RequestReceiver, head: Scheduler, wire: Wire
) -> None:
    ask(desk, "k", [1, 2], client="abc", priority=-2, max_queue_s=3.0, deadline_s=8.0)
    job = head._queues.find_request("daemon", "k")
    assert job is not None
    assert (job.request.client, job.request.priority, job.request.deadline_s) == ("abc", -2, 8.0)
    desk.expire_requests(2.9)
    assert reasons(wire) == []
    desk.expire_requests(3.0)
    assert reasons(wire) == [("k", "overloaded")]
    assert (head.live_requests, len(desk)) == ([], 0)


def test_the_same_key_again_replaces_the_request(
    desk: RequestReceiver, head: Scheduler, wire: Wire
) -> None:
    again = MessageSender(b"\0new", "daemon")
    ask(desk, "k", [1, 2])
    ask(desk, "k", [1, 2, 3], again)
    assert head.live_requests == [("daemon", "k")]
    desk.deliver_emissions([Emission("daemon", OutputToken(3, "k", 3, 7))], 0.0)
    assert wire.sent == [(again.identity, OutputTokens((OutputToken(3, "k", 3, 7),)))]


def test_who_asks_is_told_of_the_cache_with_the_first_token(head: Scheduler, wire: Wire) -> None:
    said: list[Any] = []

    def send(identity: bytes, message: Any, payload: Any = None) -> bool:
        data_codec().encode(message, payload)
        said.append((message, payload))
        return True

    desk, prompt = RequestReceiver(head, "p1", 100, send), list(range(64))
    head._cache.span_log.add_block(0, ROOT, tuple(prompt))
    for key, version in (("asks", -1), ("knows", 1), ("does not", None)):
        submit = Submit("p1", 3, key, 2, 2, 4, SamplingParams(), cache_version=version)
        desk.handle_message(HERE, submit, None, 0.0)
        payload = memoryview(array("i", [1, 2]).tobytes())
        desk.handle_message(HERE, PromptFragment(key, 0, Payload("i32", (2,))), payload, 0.0)
        for position in (2, 3):
            desk.deliver_emissions([Emission("daemon", OutputToken(3, key, position, 7))], 0.0)
    reports = [
        message.cache and unpack_report(message.cache, memoryview(payload))
        for message, payload in said
    ]
    whole = CacheReport(1, True, span_digests(prompt), capacity=32)
    assert reports == [whole, None, CacheReport(1, False, capacity=32), None, None, None]


def test_a_daemon_that_is_gone_loses_its_requests(
    desk: RequestReceiver, head: Scheduler, wire: Wire
) -> None:
    other = MessageSender(b"\0other", "other")
    ask(desk, "a", [1, 2])
    ask(desk, "b", [1, 2], other)
    wire.gone.add(HERE.identity)
    desk.sweep_connections(0.0)
    assert head.live_requests == [("other", "b")]
    assert [type(message) for _, message in wire.sent] == [Heartbeat]


def test_a_prompt_that_does_not_arrive_whole_is_rejected(desk: RequestReceiver, wire: Wire) -> None:
    desk.handle_message(HERE, Submit("p1", 3, "k", 5, 5, 4, SamplingParams()), None, 0.0)
    desk.sweep_connections(PART_TIMEOUT_S + 1)
    assert reasons(wire) == [("k", "failed")]
    assert len(desk) == 0


def test_who_has_to_make_place_is_told(desk: RequestReceiver, head: Scheduler, wire: Wire) -> None:
    for index in range(4):
        ask(desk, f"k{index}", [1, 2])
    ask(desk, "new", [1, 2], MessageSender(b"\0other", "other"))
    assert reasons(wire) == [("k3", "overloaded")]
    assert ("other", "new") in head.live_requests


def test_an_undeliverable_token_cancels(desk: RequestReceiver, head: Scheduler, wire: Wire) -> None:
    ask(desk, "a", [1, 2])
    wire.gone.add(HERE.identity)
    desk.deliver_emissions([Emission("daemon", OutputToken(3, "a", 2, 7))], 0.0)
    assert head.live_requests == []


@pytest.mark.parametrize("finish", [None, "stop"])
def test_a_daemon_is_told_once_it_can_be_that_tokens_were_lost(
    desk: RequestReceiver, wire: Wire, finish: Any
) -> None:
    ask(desk, "a", [1, 2])
    wire.gone.add(HERE.identity)
    desk.deliver_emissions(
        [Emission("daemon", OutputToken(3, "a", 2, 7, finish_reason=finish))], 0.0
    )
    desk.sweep_connections(1.0)
    assert reasons(wire) == []
    wire.gone.clear()
    desk.sweep_connections(2.0)
    desk.sweep_connections(3.0)
    assert reasons(wire) == [("a", "epoch")]


def test_finished_requests_are_forgotten(desk: RequestReceiver, wire: Wire) -> None:
    ask(desk, "a", [1, 2])
    desk.deliver_emissions(
        [Emission("daemon", OutputToken(3, "a", 2, 7, finish_reason="stop"))], 0.0
    )
    assert len(desk) == 0
    desk.handle_message(HERE, Credit("a", 3), None, 0.0)


def test_close_sends_everyone_to_the_next_epoch(desk: RequestReceiver, wire: Wire) -> None:
    ask(desk, "a", [1, 2])
    ask(desk, "b", [1, 2], MessageSender(b"\0other", "other"))
    desk.close()
    assert reasons(wire) == [("a", "epoch"), ("b", "epoch")]


def test_a_revoked_member_is_forgotten(desk: RequestReceiver, head: Scheduler) -> None:
    ask(desk, "a", [1, 2])
    desk.drop_peer("daemon", 0.0)
    assert (head.live_requests, len(desk)) == ([], 0)


def test_tokens_of_a_connection_travel_together_within_the_bound(
    desk: RequestReceiver, wire: Wire
) -> None:
    top = tuple((150_000, -float(index)) for index in range(20))
    for index in range(4):
        ask(desk, f"k{index}", [1, 2])
    emissions = [
        Emission("daemon", OutputToken(2**53, f"k{index % 4}", 2**53, 150_000, -1.5, top))
        for index in range(16)
    ]
    desk.deliver_emissions(emissions, 0.0)
    batches = [message for _, message in wire.sent if isinstance(message, OutputTokens)]
    assert 1 < len(batches) < 16
    assert [token for batch in batches for token in batch.tokens] == [
        each.message for each in emissions
    ]
    for batch in batches:
        data_codec().encode(batch)
