"""Requests are assembled within bounds; peers get their tokens and rejections."""

from array import array
from typing import Any

import pytest
from msgspec import structs

from molink.checkpoint.vision_towers import parse_vision
from molink.facts import images
from molink.facts.images import FIRST_IMAGE_ID, ImageInput, ImageSpan
from molink.routing.cache_report import CacheReport, span_digests, unpack_report
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.prefix_tree import ROOT
from molink.scheduler.request_state import Emission
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import data_codec
from molink.wire.messages.data_plane import (
    MAX_GRAMMAR_BYTES,
    Admit,
    Heartbeat,
    History,
    PromptImages,
    SamplingParams,
)
from molink.wire.messages.serving import (
    Cancel,
    Credit,
    OutputToken,
    OutputTokens,
    PixelFragment,
    PixelsReceived,
    PooledOutput,
    PromptFragment,
    Rejected,
    Request,
    Submit,
)
from molink.wire.sockets.server import MessageSender
from molinkd.worker import incoming_images, request_receiver
from molinkd.worker.request_receiver import (
    FRAGMENT_TIMEOUT_S,
    MAX_INCOMPLETE_PER_PEER,
    ReceiverModel,
    RequestReceiver,
)

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
def scheduler() -> Scheduler:
    return Scheduler(
        SchedulerConfig(8, 4, 1, max_num_seqs=2, max_queue_len=2, max_model_len=24), epoch=3
    )


@pytest.fixture
def receiver(scheduler: Scheduler, wire: Wire) -> RequestReceiver:
    return RequestReceiver(scheduler, "p1", ReceiverModel(100), wire)


def make_submit(
    key: str = "k",
    tokens: int = 5,
    prompt_tokens: int | None = None,
    *,
    epoch: int = 3,
    max_tokens: int = 4,
    cache_version: int | None = None,
    payload: Payload | None = None,
    **fields: Any,
) -> Submit:
    return Submit(
        "p1",
        epoch,
        key,
        Request("m", (), max_tokens, SamplingParams(), **fields),
        tokens,
        tokens if prompt_tokens is None else prompt_tokens,
        payload=payload,
        cache_version=cache_version,
    )


def send_ids(
    receiver: RequestReceiver,
    first: int,
    ids: list[int],
    key: str = "k",
    sender: MessageSender = HERE,
    now: float = 0.0,
) -> None:
    message = PromptFragment(key, first, Payload("i32", (len(ids),)))
    receiver.handle_message(sender, message, memoryview(array("i", ids).tobytes()), now)


def ask(
    receiver: RequestReceiver, key: str, ids: list[int], sender: MessageSender = HERE, **fields: Any
) -> None:
    receiver.handle_message(sender, make_submit(key, len(ids), **fields), None, 0.0)
    send_ids(receiver, 0, ids, key, sender)


def reasons(wire: Wire) -> list[tuple[str, str]]:
    return [(each.key, each.reason) for _, each in wire.sent if isinstance(each, Rejected)]


def test_request_reaches_the_scheduler(receiver: RequestReceiver, scheduler: Scheduler) -> None:
    ask(receiver, "k", [1, 2, 3])
    assert scheduler.live_requests == [("daemon", "k")]
    receiver.handle_message(HERE, Cancel("k"), None, 0.0)
    assert (scheduler.live_requests, len(receiver)) == ([], 0)


def test_adapters_by_name(scheduler: Scheduler, wire: Wire) -> None:
    receiver = RequestReceiver(scheduler, "p1", ReceiverModel(100, adapters=("one", "two")), wire)
    ask(receiver, "a", [1, 2, 3], adapter="two")
    ask(receiver, "b", [1, 2, 3])
    batch = scheduler.next_batch(0.0)
    assert batch is not None
    admitted = [control.body for control in batch.controls if isinstance(control.body, Admit)]
    assert [body.adapter for body in admitted] == [2, 0]
    ask(receiver, "c", [1, 2, 3], adapter="three")
    assert reasons(wire) == [("c", "invalid")]


def test_oversized_grammar_is_rejected(
    receiver: RequestReceiver, scheduler: Scheduler, wire: Wire
) -> None:
    size = MAX_GRAMMAR_BYTES + 1
    submit = make_submit(tokens=1, payload=Payload("u8", (size,)))
    receiver.handle_message(HERE, submit, memoryview(bytes(size)), 0.0)
    assert reasons(wire) == [("k", "invalid")]


def test_another_epoch_is_rejected(
    receiver: RequestReceiver, scheduler: Scheduler, wire: Wire
) -> None:
    ask(receiver, "old", [1, 2], epoch=2)
    assert reasons(wire) == [("old", "epoch")]
    assert scheduler.live_requests == []


def test_rejections_name_their_reason(receiver: RequestReceiver, wire: Wire) -> None:
    ask(receiver, "long", list(range(30)))
    ask(receiver, "strange id", [1, 100])
    for index in range(5):
        ask(receiver, f"k{index}", [1, 2])
    assert reasons(wire) == [("long", "too_long"), ("strange id", "invalid"), ("k4", "overloaded")]
    assert wire.sent[-1][1].retry_after > 0


def test_request_expires_after_its_queue_time(
    receiver: RequestReceiver, scheduler: Scheduler, wire: Wire
) -> None:
    ask(receiver, "k", [1, 2], client="abc", priority=-2, max_queue_s=3.0, deadline_s=8.0)
    state = scheduler._queues.find_request("daemon", "k")
    assert state is not None
    assert (state.request.client, state.request.priority, state.deadline_s) == ("abc", -2, 8.0)
    receiver.expire_requests(2.9)
    assert reasons(wire) == []
    receiver.expire_requests(3.0)
    assert reasons(wire) == [("k", "overloaded")]
    assert (scheduler.live_requests, len(receiver)) == ([], 0)


def test_same_key_replaces_the_request(
    receiver: RequestReceiver, scheduler: Scheduler, wire: Wire
) -> None:
    again = MessageSender(b"\0new", "daemon")
    ask(receiver, "k", [1, 2])
    ask(receiver, "k", [1, 2, 3], again)
    assert scheduler.live_requests == [("daemon", "k")]
    receiver.deliver_emissions([Emission("daemon", OutputToken(3, "k", 3, 7))], 0.0)
    assert wire.sent == [(again.identity, OutputTokens((OutputToken(3, "k", 3, 7),)))]


def test_cache_update_accompanies_the_first_token(scheduler: Scheduler, wire: Wire) -> None:
    said: list[Any] = []

    def send(identity: bytes, message: Any, payload: Any = None) -> bool:
        data_codec().encode(message, payload)
        said.append((message, payload))
        return True

    receiver, prompt = RequestReceiver(scheduler, "p1", ReceiverModel(100), send), list(range(64))
    scheduler._cache.span_log.add_block(0, ROOT, tuple(prompt))
    for key, version in (("asks", -1), ("knows", 1), ("does not", None)):
        ask(receiver, key, [1, 2], cache_version=version)
        for position in (2, 3):
            receiver.deliver_emissions([Emission("daemon", OutputToken(3, key, position, 7))], 0.0)
    reports = [
        message.cache and unpack_report(message.cache, memoryview(payload))
        for message, payload in said
    ]
    whole = CacheReport(1, True, span_digests(prompt), capacity=32)
    assert reports == [whole, None, CacheReport(1, False, capacity=32), None, None, None]


def test_unreachable_peer_loses_its_requests(
    receiver: RequestReceiver, scheduler: Scheduler, wire: Wire
) -> None:
    other = MessageSender(b"\0other", "other")
    ask(receiver, "a", [1, 2])
    ask(receiver, "b", [1, 2], other)
    wire.gone.add(HERE.identity)
    receiver.sweep_connections(0.0)
    assert scheduler.live_requests == [("other", "b")]
    assert [type(message) for _, message in wire.sent] == [Heartbeat]


def test_incomplete_prompt_is_rejected_after_a_timeout(
    receiver: RequestReceiver, wire: Wire
) -> None:
    receiver.handle_message(HERE, make_submit(), None, 0.0)
    receiver.sweep_connections(FRAGMENT_TIMEOUT_S + 1)
    assert reasons(wire) == [("k", "failed")]
    assert len(receiver) == 0


def test_displaced_request_is_rejected(
    receiver: RequestReceiver, scheduler: Scheduler, wire: Wire
) -> None:
    for index in range(4):
        ask(receiver, f"k{index}", [1, 2])
    ask(receiver, "new", [1, 2], MessageSender(b"\0other", "other"))
    assert reasons(wire) == [("k3", "overloaded")]
    assert ("other", "new") in scheduler.live_requests


def test_undeliverable_token_cancels_the_request(
    receiver: RequestReceiver, scheduler: Scheduler, wire: Wire
) -> None:
    ask(receiver, "a", [1, 2])
    wire.gone.add(HERE.identity)
    receiver.deliver_emissions([Emission("daemon", OutputToken(3, "a", 2, 7))], 0.0)
    assert scheduler.live_requests == []


def test_the_row_of_an_embedding_precedes_its_token(
    receiver: RequestReceiver, scheduler: Scheduler, wire: Wire
) -> None:
    ask(receiver, "a", [1, 2])
    wire.sent.clear()
    token = OutputToken(3, "a", 2, 0, finish_reason="length")
    receiver.deliver_emissions([Emission("daemon", token, bytes(8))], 0.0)
    row, tokens = (message for _, message in wire.sent)
    assert row == PooledOutput(3, "a", Payload("f32", (2,)))
    assert tokens.tokens == (token,)
    frames = data_codec().encode(row, bytes(8))
    assert data_codec().decode(frames)[0] == row


def test_a_lost_row_has_its_peer_resubmit(
    receiver: RequestReceiver, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is congested when the row is sent, but not when the token is."""
    ask(receiver, "a", [1, 2])

    def send(identity: bytes, message: Any, payload: Any = None) -> bool:
        return not isinstance(message, PooledOutput) and wire(identity, message, payload)

    monkeypatch.setattr(receiver, "_send", send)
    token = OutputToken(3, "a", 2, 0, finish_reason="length")
    receiver.deliver_emissions([Emission("daemon", token, bytes(8))], 0.0)
    receiver.sweep_connections(1.0)
    assert reasons(wire) == [("a", "epoch")]


@pytest.mark.parametrize("finish", [None, "stop"])
def test_peer_learns_of_lost_tokens_once_reachable(
    receiver: RequestReceiver, wire: Wire, finish: Any
) -> None:
    ask(receiver, "a", [1, 2])
    wire.gone.add(HERE.identity)
    receiver.deliver_emissions(
        [Emission("daemon", OutputToken(3, "a", 2, 7, finish_reason=finish))], 0.0
    )
    receiver.sweep_connections(1.0)
    assert reasons(wire) == []
    wire.gone.clear()
    receiver.sweep_connections(2.0)
    receiver.sweep_connections(3.0)
    assert reasons(wire) == [("a", "epoch")]


def test_finished_requests_are_dropped(receiver: RequestReceiver, wire: Wire) -> None:
    ask(receiver, "a", [1, 2])
    receiver.deliver_emissions(
        [Emission("daemon", OutputToken(3, "a", 2, 7, finish_reason="stop"))], 0.0
    )
    assert len(receiver) == 0
    receiver.handle_message(HERE, Credit("a", 3), None, 0.0)


def test_close_has_all_peers_resubmit(receiver: RequestReceiver, wire: Wire) -> None:
    ask(receiver, "a", [1, 2])
    ask(receiver, "b", [1, 2], MessageSender(b"\0other", "other"))
    receiver.close()
    assert reasons(wire) == [("a", "epoch"), ("b", "epoch")]


def test_dropped_peer_loses_its_requests(receiver: RequestReceiver, scheduler: Scheduler) -> None:
    ask(receiver, "a", [1, 2])
    receiver.drop_peer("daemon", 0.0)
    assert (scheduler.live_requests, len(receiver)) == ([], 0)


def test_tokens_of_a_connection_are_batched_within_the_header_bound(
    receiver: RequestReceiver, wire: Wire
) -> None:
    top = tuple((150_000, -float(index)) for index in range(20))
    for index in range(4):
        ask(receiver, f"k{index}", [1, 2])
    emissions = [
        Emission("daemon", OutputToken(2**53, f"k{index % 4}", 2**53, 150_000, -1.5, top))
        for index in range(16)
    ]
    receiver.deliver_emissions(emissions, 0.0)
    batches = [message for _, message in wire.sent if isinstance(message, OutputTokens)]
    assert 1 < len(batches) < 16
    assert [token for batch in batches for token in batch.tokens] == [
        each.message for each in emissions
    ]
    for batch in batches:
        data_codec().encode(batch)


def test_fragments_make_a_request(receiver: RequestReceiver, scheduler: Scheduler) -> None:
    receiver.handle_message(HERE, make_submit(prompt_tokens=4), None, 0.0)
    send_ids(receiver, 0, [1, 2])
    assert scheduler.live_requests == []
    send_ids(receiver, 2, [3, 4, 5])
    state = scheduler._queues.find_request("daemon", "k")
    assert state is not None
    assert (state.request.prompt_token_ids, state.tokens) == ((1, 2, 3, 4), [1, 2, 3, 4, 5])
    assert (state.num_output_tokens, state.max_remaining) == (1, 3)


def test_resubmission_counts_elapsed_time(receiver: RequestReceiver, scheduler: Scheduler) -> None:
    submit = make_submit(tokens=1, max_queue_s=3.0, deadline_s=8.0)
    receiver.handle_message(HERE, structs.replace(submit, elapsed_s=2.0), None, 0.0)
    send_ids(receiver, 0, [1])
    state = scheduler._queues.find_request("daemon", "k")
    assert state is not None
    assert (state.max_queue_s, state.deadline_s) == (1.0, 6.0)


@pytest.mark.parametrize(
    "fragments",
    [
        [(1, [2, 3])],
        [(0, [1, 2]), (1, [3])],
        [(0, [1, 2, 3, 4, 5, 6])],
        [(0, [1, 100])],
        [(0, [-1])],
    ],
)
def test_invalid_fragment_drops_the_request(
    receiver: RequestReceiver,
    scheduler: Scheduler,
    wire: Wire,
    fragments: list[tuple[int, list[int]]],
) -> None:
    receiver.handle_message(HERE, make_submit(), None, 0.0)
    for first, ids in fragments:
        send_ids(receiver, first, ids)
    assert reasons(wire) == [("k", "invalid")]
    send_ids(receiver, 0, [1, 2, 3, 4, 5])
    assert scheduler.live_requests == []


def test_long_prompt_is_rejected_before_its_ids_arrive(
    receiver: RequestReceiver, wire: Wire
) -> None:
    receiver.handle_message(HERE, make_submit(tokens=24), None, 0.0)
    assert reasons(wire) == [("k", "too_long")]


def test_prompt_longer_than_the_submission_is_rejected(
    receiver: RequestReceiver, wire: Wire
) -> None:
    receiver.handle_message(HERE, make_submit(tokens=4, prompt_tokens=5), None, 0.0)
    assert reasons(wire) == [("k", "invalid")]


def test_number_of_incomplete_requests_is_bounded(receiver: RequestReceiver, wire: Wire) -> None:
    for index in range(MAX_INCOMPLETE_PER_PEER):
        receiver.handle_message(HERE, make_submit(str(index), 1), None, 0.0)
    receiver.handle_message(HERE, make_submit("more", 1), None, 0.0)
    assert reasons(wire) == [("more", "overloaded")]
    other = MessageSender(b"\0other", "other")
    receiver.handle_message(other, make_submit("more", 1), None, 0.0)
    receiver.drop_peer("daemon", 0.0)
    receiver.handle_message(HERE, make_submit("again", 1), None, 0.0)
    assert reasons(wire) == [("more", "overloaded")]


def test_ids_of_incomplete_requests_are_bounded(receiver: RequestReceiver, wire: Wire) -> None:
    for index in range(4):
        receiver.handle_message(HERE, make_submit(str(index), 20), None, 0.0)
    receiver.handle_message(HERE, make_submit("more", 20), None, 0.0)
    assert reasons(wire) == [("more", "overloaded")]
    receiver.handle_message(HERE, make_submit("2", 20), None, 0.0)
    send_ids(receiver, 0, list(range(20)), "3")
    receiver.handle_message(HERE, make_submit("again", 20), None, 0.0)
    assert reasons(wire) == [("more", "overloaded")]


def test_each_fragment_restarts_the_timeout(
    receiver: RequestReceiver, scheduler: Scheduler, wire: Wire
) -> None:
    for key in "ab":
        receiver.handle_message(HERE, make_submit(key), None, 0.0)
    send_ids(receiver, 0, [1, 2], "a", now=10.0)
    receiver.sweep_connections(FRAGMENT_TIMEOUT_S + 1)
    assert reasons(wire) == [("b", "failed")]
    send_ids(receiver, 2, [3, 4, 5], "a")
    assert scheduler.live_requests == [("daemon", "a")]


def test_peers_do_not_share_keys(receiver: RequestReceiver, scheduler: Scheduler) -> None:
    other = MessageSender(b"\0other", "other")
    receiver.handle_message(HERE, make_submit(), None, 0.0)
    send_ids(receiver, 0, [1, 2, 3, 4, 5], sender=other)
    receiver.handle_message(other, Cancel("k"), None, 0.0)
    assert scheduler.live_requests == []
    send_ids(receiver, 0, [1, 2, 3, 4, 5])
    assert scheduler.live_requests == [("daemon", "k")]


def test_grammar_arrives_with_the_request(receiver: RequestReceiver, scheduler: Scheduler) -> None:
    receiver.handle_message(HERE, make_submit(tokens=1), memoryview(b"start: /a/"), 0.0)
    send_ids(receiver, 0, [1])
    state = scheduler._queues.find_request("daemon", "k")
    assert state is not None
    assert state.request.grammar == b"start: /a/"


# --- images --------------------------------------------------------------------------------------

SIGHT = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "vision_config": {"patch_size": 4, "image_size": 32, "hidden_size": 64},
}
PIXELS = bytes(range(192))
IMAGE = ImageInput(ImageSpan(1, 1, 8, 8), PIXELS)


class Sight:
    """A receiver of a multimodal model, whose images are encoded when the test says so."""

    def __init__(self, scheduler: Scheduler, wire: Wire) -> None:
        self.asked: list[tuple[Any, Any, Any]] = []
        model = ReceiverModel(
            100,
            16,
            vision=parse_vision(SIGHT, "config.json", 16, 1e-6),
            encode_images=lambda *asked: self.asked.append(asked),
        )
        self.scheduler, self.wire = scheduler, wire
        self.receiver = RequestReceiver(scheduler, "p1", model, wire)

    def submit(
        self, *images: ImageInput, ids: list[int] | None = None, key: str = "k", **fields: Any
    ) -> None:
        spans = tuple(image.span for image in images)
        submit = structs.replace(make_submit(key, 4), images=spans)
        submit = structs.replace(submit, request=structs.replace(submit.request, **fields))
        self.receiver.handle_message(HERE, submit, None, 0.0)
        default = [5, *(token for image in images for token in image.row_ids), 6, 7][:4]
        send_ids(self.receiver, 0, default if ids is None else ids, key)

    def send(self, pixels: bytes, first: int = 0, key: str = "k") -> None:
        message = PixelFragment(key, first, Payload("u8", (len(pixels),)))
        self.receiver.handle_message(HERE, message, memoryview(pixels), 0.0)

    @property
    def received(self) -> list[int]:
        return [each.position for _, each in self.wire.sent if isinstance(each, PixelsReceived)]


@pytest.fixture
def sight(scheduler: Scheduler, wire: Wire) -> Sight:
    return Sight(scheduler, wire)


def test_images_are_encoded_before_their_request_is_queued(
    sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming_images, "PIXEL_FRAGMENT", 100)
    sight.submit(IMAGE)
    sight.send(PIXELS[:100])
    assert not sight.asked
    sight.send(PIXELS[100:], 100)
    assert sight.received == [100, 192]
    ((images, is_wanted, done),) = sight.asked
    assert images == (IMAGE,)
    assert is_wanted()
    assert sight.scheduler.live_requests == []
    done(["rows"], 1.0)
    batch = sight.scheduler.next_batch(1.0)
    assert batch is not None
    (told,) = (each for each in batch.controls if isinstance(each.body, PromptImages))
    assert (told.body.spans, told.payload) == ((IMAGE.span,), ["rows"])


def test_rows_of_a_cancelled_request_are_dropped(sight: Sight) -> None:
    sight.submit(IMAGE)
    sight.send(PIXELS)
    sight.receiver.handle_message(HERE, Cancel("k"), None, 0.0)
    _, is_wanted, done = sight.asked[0]
    assert not is_wanted()
    done(["rows"], 1.0)
    assert sight.scheduler.live_requests == []


def test_a_failed_tower_fails_its_request_only(sight: Sight) -> None:
    sight.submit(IMAGE)
    sight.send(PIXELS)
    sight.asked[0][2]("RuntimeError: no memory", 1.0)
    assert reasons(sight.wire) == [("k", "failed")]


@pytest.mark.parametrize(
    "span",
    [
        ImageSpan(1, 1, 8, 12),
        ImageSpan(1, 1, 64, 64),
        ImageSpan(1, 2, 8, 8),
        ImageSpan(3, 2, 8, 16),
    ],
)
def test_images_that_do_not_fit_are_refused(sight: Sight, span: ImageSpan) -> None:
    sight.submit(ImageInput(span, b""), ids=[1, 2, 3, 4])
    assert reasons(sight.wire) == [("k", "invalid")]


def test_ids_must_stand_for_the_pixels(sight: Sight) -> None:
    """Otherwise a peer could put its image into the cache under another image's ids."""
    sight.submit(IMAGE)
    sight.send(bytes(192))
    assert reasons(sight.wire) == [("k", "invalid")]
    assert not sight.asked


def test_unannounced_pixels_are_refused(sight: Sight) -> None:
    sight.submit(IMAGE)
    sight.send(bytes(200))
    sight.submit(IMAGE, key="other")
    sight.send(PIXELS, 10, "other")
    assert reasons(sight.wire) == [("k", "invalid"), ("other", "invalid")]


@pytest.mark.parametrize("size", [0, 1, 191])
def test_a_peer_cannot_trickle_pixels(sight: Sight, size: int) -> None:
    """Each fragment restarts the timeout, so only one that ends an image may be small."""
    sight.submit(IMAGE)
    sight.send(PIXELS[:size])
    assert reasons(sight.wire) == [("k", "invalid")]


def test_a_text_model_refuses_images(scheduler: Scheduler, wire: Wire) -> None:
    receiver = RequestReceiver(scheduler, "p1", ReceiverModel(100), wire)
    submit = structs.replace(make_submit("k", 4), images=(IMAGE.span,))
    receiver.handle_message(HERE, submit, None, 0.0)
    assert reasons(wire) == [("k", "invalid")]


def test_images_of_all_requests_are_bounded(sight: Sight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_receiver, "MAX_IMAGE_BYTES", 300)
    sight.submit(IMAGE, key="a")
    sight.submit(IMAGE, key="b")
    assert reasons(sight.wire) == [("b", "overloaded")]
    sight.receiver.handle_message(HERE, Cancel("a"), None, 0.0)
    sight.submit(IMAGE, key="c")
    assert len(reasons(sight.wire)) == 1


def test_images_count_until_the_encoder_releases_them(
    sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a peer that cancels or resubmits requests could fill the memory."""
    monkeypatch.setattr(request_receiver, "MAX_IMAGE_BYTES", 300)
    sight.submit(IMAGE, key="a")
    sight.send(PIXELS, key="a")
    sight.receiver.handle_message(HERE, Cancel("a"), None, 0.0)
    sight.submit(IMAGE, key="a")
    sight.submit(IMAGE, key="b")
    assert reasons(sight.wire) == [("a", "overloaded"), ("b", "overloaded")]
    sight.asked[0][2]("its request has ended", 1.0)
    sight.submit(IMAGE, key="c")
    assert len(reasons(sight.wire)) == 2


def test_one_peer_leaves_memory_for_the_images_of_others(
    sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_receiver, "MAX_IMAGE_BYTES", 600)
    monkeypatch.setattr(request_receiver, "PEER_SHARE", 1)
    sight.submit(IMAGE, key="a")
    sight.send(PIXELS, key="a")
    sight.submit(IMAGE, key="b")
    assert reasons(sight.wire) == [("b", "overloaded")]
    submit = structs.replace(make_submit("c", 4), images=(IMAGE.span,))
    sight.receiver.handle_message(MessageSender(b"\0other", "other"), submit, None, 0.0)
    assert len(reasons(sight.wire)) == 1


def test_peers_that_collude_leave_memory_for_the_images_of_others(
    sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_receiver, "MAX_IMAGE_BYTES", 10_000)
    monkeypatch.setattr(request_receiver, "MAX_INCOMPLETE_CONTEXTS", 10)
    taken = 0
    for peer in ("one", "two"):
        before = len(reasons(sight.wire))
        while len(reasons(sight.wire)) == before:
            taken += 1
            submit = structs.replace(make_submit(str(taken), 4), images=(IMAGE.span,))
            sight.receiver.handle_message(MessageSender(b"\0", peer), submit, None, 0.0)
    refused = len(reasons(sight.wire))
    assert 0.9 < (taken - refused) * len(PIXELS) / 10_000 < 1
    sight.submit(IMAGE)
    assert len(reasons(sight.wire)) == refused


def test_the_cache_knows_images_by_more_than_their_ids(
    sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two images with the same ids on the wire, as an attacker may search for."""
    monkeypatch.setattr(images, "_derive_ids", lambda digest, count: [FIRST_IMAGE_ID] * count)
    for key, pixels in (("a", PIXELS), ("b", bytes(192))):
        image = ImageInput(IMAGE.span, pixels)
        sight.submit(image, key=key, sampling_params=SamplingParams(presence_penalty=0.5))
        sight.send(pixels, key=key)
    for _, _, done in sight.asked:
        done(["rows"], 1.0)
    batch = sight.scheduler.next_batch(1.0)
    assert batch is not None
    (volume,) = batch.volumes
    one, two = volume.tokens[:4], volume.tokens[4:]
    assert (one[0], one[2:]) == (two[0], two[2:]) == (5, [6, 7])
    assert one[1] != two[1]
    told = [each.payload for each in batch.controls if isinstance(each.body, History)]
    assert [array("i", payload).tolist() for payload in told] == [[5, FIRST_IMAGE_ID, 6, 7]] * 2


@pytest.mark.parametrize("own", [True, False], ids=["the request's bound", "the usual bound"])
def test_the_wait_includes_the_time_that_images_take(wire: Wire, own: bool) -> None:
    usual, asked = (0.0, 10.0) if own else (10.0, 0.0)
    scheduler = Scheduler(SchedulerConfig(8, 4, 1, max_model_len=24, max_queue_s=usual), epoch=3)
    sight = Sight(scheduler, wire)
    sight.submit(IMAGE, max_queue_s=asked)
    sight.send(PIXELS)
    sight.asked[0][2](["rows"], 8.0)
    assert scheduler.expire_requests(9.9) == []
    assert scheduler.expire_requests(10.1) != []


def test_as_many_requests_are_encoded_as_the_scheduler_takes(sight: Sight) -> None:
    most = sight.scheduler.config.max_queue_len + sight.scheduler.config.max_num_seqs
    for number in range(most + 1):
        sight.submit(IMAGE, key=str(number))
        sight.send(PIXELS, key=str(number))
    assert len(sight.asked) == most
    assert reasons(sight.wire) == [(str(most), "overloaded")]
