"""Receives requests from peers' endpoints and sends them their tokens."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from molink.checkpoint.vision import VisionConfig
from molink.errors import ContextTooLong, MolinkError, Overloaded, RequestError
from molink.facts.dtypes import DTYPE_SIZES
from molink.facts.images import FIRST_IMAGE_ID, ImageInput
from molink.routing.cache_report import pack_report
from molink.scheduler.request_state import Emission, RequestState
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import Buffer, DataMessage
from molink.wire.messages.data_plane import MAX_GRAMMAR_BYTES, Heartbeat
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
    RejectReason,
    Submit,
)
from molink.wire.sockets.server import MessageSender
from molinkd.worker.engine import EncodedImages
from molinkd.worker.incoming_images import IncomingImages

#: Upper bounds, in bytes, of the tokens' share of a header of 4 KiB.
_BATCH_BYTES = 3840
_TOKEN_BYTES = 48
_TOP_BYTES = 16

#: Seconds for which to retry telling a peer that tokens were lost; it may be gone.
LOST_TOKENS_RETRY_S = 20.0
#: Incomplete submissions of one peer, and the context lengths that their ids may fill together.
#: A peer sends one request after another, so it rarely has two.
MAX_INCOMPLETE_PER_PEER = 64
MAX_INCOMPLETE_CONTEXTS = 4
#: Seconds after its last fragment when an incomplete submission is rejected.
FRAGMENT_TIMEOUT_S = 30.0

#: Memory of all requests' images, in bytes.
MAX_IMAGE_BYTES = 512 << 20
#: A peer's images, which it may trickle, take at most this multiple of the memory that is left
#: (dynamic thresholds, Choudhury and Hahne 1998): 384 MiB alone. If others collude, some is left.
PEER_SHARE = 3

ClientMessage = Submit | PromptFragment | PixelFragment | Cancel | Credit
#: Encodes images while the second argument, which may be called on another thread, says that they
#: are wanted; always calls back with the result and the time.
EncodeImages = Callable[
    [Sequence[ImageInput], Callable[[], bool], Callable[[EncodedImages, float], None]], None
]


class SendTo(Protocol):
    """``Server.send``: whether the message was queued for that connection."""

    def __call__(
        self, identity: bytes, message: DataMessage, payload: Buffer | None = None
    ) -> bool: ...


@dataclass(slots=True)
class _IncompleteRequest:
    submit: Submit
    grammar: bytes
    images: IncomingImages
    #: When it was submitted, and when its last fragment arrived.
    began_at: float
    updated_at: float
    ids: "array[int]" = field(default_factory=lambda: array("i"))

    @property
    def is_complete(self) -> bool:
        return len(self.ids) == self.submit.num_tokens and self.images.is_complete


@dataclass(frozen=True, slots=True)
class ReceiverModel:
    """What a receiver knows of its model; adapters in the order of their numbers.

    ``encode_images`` is set if the model has ``vision``; a row of an image has ``row_bytes``.
    """

    vocab_size: int
    row_bytes: int = 0
    adapters: Sequence[str] = ()
    vision: VisionConfig | None = None
    encode_images: EncodeImages | None = None


class RequestReceiver:
    """Assembles requests for a scheduler and delivers its emissions. One per epoch. Sans-IO.

    Memory is bounded: a request beyond the context length, or beyond what a peer may have
    incomplete, is rejected by its ``Submit``, before any of its ids is kept. Ids beyond the
    vocabulary are rejected here, since on a GPU one would fail the whole step.

    A request whose peer is unreachable is cancelled; the peer resubmits it after reconnecting.
    ``now`` is in seconds of any monotonic clock.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: str,
        model: ReceiverModel,
        send: SendTo,
    ) -> None:
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._model = model
        self._send = send
        self._adapters = {name: number for number, name in enumerate(model.adapters, 1)}
        #: Complete submissions whose images are being encoded.
        self._encoding: dict[tuple[str, str], _IncompleteRequest] = {}
        #: Peer and memory of images given to the encoder, even if their requests have ended.
        self._encoding_bytes: dict[int, tuple[str, int]] = {}
        #: Memory of images, of all requests that were not ended when it was counted last.
        self._image_bytes: dict[tuple[str, str], int] = {}
        #: Submissions whose ids have not all arrived, by peer and key.
        self._incomplete: dict[str, dict[str, _IncompleteRequest]] = {}
        self._connections: dict[tuple[str, str], bytes] = {}
        #: Cache version that the peer has, for requests whose first token carries an update.
        self._cache_versions: dict[tuple[str, str], int] = {}
        #: Requests whose tokens could not be sent: connection to notify, and until when to try.
        self._lost_tokens: dict[tuple[str, str], tuple[bytes, float]] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def handle_message(
        self, sender: MessageSender, message: ClientMessage, payload: memoryview | None, now: float
    ) -> None:
        """Handle a message of an endpoint; answers ``Rejected`` if a request can't be served."""
        peer, key = sender.peer_id, message.key
        match message:
            case Submit():
                self._cancel_request(peer, key, now)
                self._connections[peer, key] = sender.identity
                self._begin_request(peer, message, payload, now)
            case PromptFragment() | PixelFragment():
                self._add_fragment(peer, message, payload, now)
            case Cancel():
                self._cancel_request(peer, key, now)
            case Credit():
                self._scheduler.grant_credit(peer, key, message.position)

    def deliver_emissions(self, emissions: Iterable[Emission], now: float) -> None:
        """Send tokens, batched by connection, and rejections to their peers.

        The rows of embeddings precede their tokens.
        """
        tokens: dict[bytes, list[tuple[str, OutputToken]]] = {}
        sent: dict[bytes, list[bool]] = {}
        for emission in emissions:
            peer, message = emission.peer, emission.message
            identity = self._connections.get((peer, message.key))
            if identity is None:
                continue
            if isinstance(message, Rejected):
                del self._connections[peer, message.key]
                self._cache_versions.pop((peer, message.key), None)
                self._send(identity, message)
            else:
                tokens.setdefault(identity, []).append((peer, message))
                if emission.pooled is not None:
                    row = _make_pooled(message, emission.pooled)
                    sent.setdefault(identity, []).append(self._send(identity, row, emission.pooled))
        for identity, owned in tokens.items():
            first, *others = _split_batches(token for _, token in owned)
            reached = sent.setdefault(identity, [])
            reached.append(self._send_first(identity, first, owned))
            reached += [self._send(identity, batch) for batch in others]
            for peer, token in owned:
                if not all(reached):
                    self._cancel_request(peer, token.key, now)
                    self._lost_tokens[peer, token.key] = identity, now + LOST_TOKENS_RETRY_S
                elif token.finish_reason is not None:
                    del self._connections[peer, token.key]

    def _send_first(
        self, identity: bytes, batch: OutputTokens, owned: Sequence[tuple[str, OutputToken]]
    ) -> bool:
        """Send tokens, with a cache update if one of the requests asked for it."""
        requested = [self._cache_versions.pop((peer, token.key), None) for peer, token in owned]
        versions = [version for version in requested if version is not None]
        if not versions:
            return self._send(identity, batch)
        update, digests = pack_report(self._scheduler.cache_report(min(versions)))
        payload = Payload("u8", (len(digests),))
        return self._send(identity, OutputTokens(batch.tokens, update, payload), digests)

    def expire_requests(self, now: float) -> None:
        """Reject requests that have waited for admission as long as they may."""
        self.deliver_emissions(self._scheduler.expire_requests(now), now)

    def sweep_connections(self, now: float) -> None:
        """Reject submissions that stay incomplete; cancel requests of broken connections."""
        for peer, entries in list(self._incomplete.items()):
            for key, entry in list(entries.items()):
                if now - entry.updated_at > FRAGMENT_TIMEOUT_S:
                    self._drop_incomplete(peer, key)
                    self._reject_request(
                        peer, key, "failed", "its prompt did not arrive completely"
                    )
        self._notify_lost_tokens(now)
        heartbeat = Heartbeat(self._scheduler.epoch, 0, 0, now)
        for identity in set(self._connections.values()):
            if self._send(identity, heartbeat):
                continue
            broken = [known for known, other in self._connections.items() if other == identity]
            for known in broken:
                self._cancel_request(*known, now)

    def _notify_lost_tokens(self, now: float) -> None:
        """Have peers resubmit the requests that lost tokens."""
        reason = "tokens were lost on a congested connection"
        for (peer, key), (identity, until) in list(self._lost_tokens.items()):
            message = _make_rejected(self._scheduler.epoch, key, "epoch", reason)
            if self._send(identity, message) or now >= until:
                del self._lost_tokens[peer, key]

    def drop_peer(self, peer: str, now: float) -> None:
        """Cancel everything of a peer that is no longer a member."""
        self._scheduler.cancel_peer(peer, now)
        self._incomplete.pop(peer, None)
        self._encoding = {key: entry for key, entry in self._encoding.items() if key[0] != peer}
        for known in [known for known in self._connections if known[0] == peer]:
            del self._connections[known]
            self._cache_versions.pop(known, None)

    def close(self) -> None:
        """End the epoch: have every peer resubmit under the next one."""
        for (_, key), identity in self._connections.items():
            self._send(
                identity,
                _make_rejected(self._scheduler.epoch, key, "epoch", "the ring is being re-formed"),
            )
        self._connections.clear()
        self._encoding.clear()

    # --- submissions -----------------------------------------------------------------------------

    def _begin_request(
        self, peer: str, submit: Submit, payload: memoryview | None, now: float
    ) -> None:
        if (submit.pipeline, submit.epoch) != (self._pipeline, self._scheduler.epoch):
            here = f"this is {self._pipeline} in epoch {self._scheduler.epoch}"
            self._reject_request(peer, submit.key, "epoch", here)
            return
        grammar = b"" if payload is None else bytes(payload)
        try:
            self._check_submit(submit, grammar)
            images = IncomingImages(submit.images, self._model.vision, submit.num_prompt_tokens)
            self._reserve_images(peer, submit.key, images)
            self._reserve_ids(peer, submit)
        except MolinkError as error:
            self._reject_error(peer, submit.key, error)
            return
        entry = _IncompleteRequest(submit, grammar, images, now, now)
        self._incomplete[peer][submit.key] = entry
        if submit.cache_version is not None:
            self._cache_versions[peer, submit.key] = submit.cache_version

    def _check_submit(self, submit: Submit, grammar: bytes) -> None:
        if submit.num_prompt_tokens > submit.num_tokens:
            raise RequestError(
                f"{submit.num_prompt_tokens} prompt tokens in a request of {submit.num_tokens}",
                "prompt",
            )
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise RequestError(f"a grammar of {len(grammar)} bytes; at most {MAX_GRAMMAR_BYTES}")
        adapter = submit.request.adapter
        if adapter and adapter not in self._adapters:
            raise RequestError(f"this pipeline has no adapter {adapter}", "model")
        longest = self._scheduler.config.max_request_tokens
        if submit.num_tokens >= longest:
            raise ContextTooLong(
                f"a prompt of {submit.num_tokens} tokens leaves no room for an answer: at most"
                f" {longest} tokens fit, prompt and answer together",
                "prompt",
            )

    def _reserve_ids(self, peer: str, submit: Submit) -> None:
        others = self._incomplete.setdefault(peer, {})
        ids = submit.num_tokens + sum(entry.submit.num_tokens for entry in others.values())
        longest = self._scheduler.config.max_request_tokens
        if len(others) >= MAX_INCOMPLETE_PER_PEER or ids > MAX_INCOMPLETE_CONTEXTS * longest:
            raise Overloaded(f"{len(others)} requests of this peer are already incomplete")

    def _reserve_images(self, peer: str, key: str, images: IncomingImages) -> None:
        held = {
            known: size for known, size in self._image_bytes.items() if known in self._connections
        }
        held.pop((peer, key), None)
        size = images.held_bytes(self._model.row_bytes)
        taken = [*self._encoding_bytes.values()]
        taken += [(known[0], count) for known, count in held.items() if known not in self._encoding]
        every = sum(count for _, count in taken)
        own = sum(count for one, count in taken if one == peer)
        if size and own + size > PEER_SHARE * (MAX_IMAGE_BYTES - every - size):
            raise Overloaded("the images of other requests take all memory for images")
        self._image_bytes = held | ({(peer, key): size} if size else {})

    def _add_fragment(
        self,
        peer: str,
        message: PromptFragment | PixelFragment,
        payload: memoryview | None,
        now: float,
    ) -> None:
        """Add ids or pixels; submit the request once complete. Ignores unknown requests."""
        entry = self._incomplete.get(peer, {}).get(message.key)
        if entry is None:
            return
        try:
            dtype = "i32" if isinstance(message, PromptFragment) else "u8"
            if payload is None or message.payload.dtype != dtype:
                raise MolinkError(f"a fragment needs a payload of {dtype}")
            if isinstance(message, PromptFragment):
                self._append_ids(entry, message.first, payload.cast("B").cast("i"))
            else:
                entry.images.add_pixels(message.first, payload.cast("B"))
                self._acknowledge_pixels(peer, message.key, entry.images.num_received)
            entry.updated_at = now
            if entry.is_complete:
                self._drop_incomplete(peer, message.key)
                self._encode_and_submit(peer, entry, now)
        except MolinkError as error:
            self._drop_incomplete(peer, message.key)
            self._reject_error(peer, message.key, error)

    def _acknowledge_pixels(self, peer: str, key: str, position: int) -> None:
        if (identity := self._connections.get((peer, key))) is not None:
            self._send(identity, PixelsReceived(self._scheduler.epoch, key, position))

    def _encode_and_submit(self, peer: str, entry: _IncompleteRequest, now: float) -> None:
        """Submit a complete request, once its images are rows.

        Raises:
            RequestError: its ids don't stand for its images.
            Overloaded: as many requests are encoded as the scheduler takes at all.
        """
        key, encode = entry.submit.key, self._model.encode_images
        images = entry.images.take_images(entry.ids)
        if not images or encode is None:
            self._submit_request(peer, entry, None, now)
            return
        config = self._scheduler.config
        if len(self._encoding_bytes) >= config.max_queue_len + config.max_num_seqs:
            raise Overloaded("the images of too many requests wait for being encoded")

        def is_wanted() -> bool:  # not once it is cancelled, or the epoch has ended
            return self._encoding.get((peer, key)) is entry

        def on_encoded(rows: EncodedImages, now: float) -> None:
            del self._encoding_bytes[id(entry)]
            if not is_wanted():
                return
            del self._encoding[peer, key]
            if isinstance(rows, str):
                text = f"its images can't be encoded: {rows}"
                self._reject_request(peer, key, "failed", text)
                return
            try:
                self._submit_request(peer, entry, rows, now)
            except MolinkError as error:
                self._reject_error(peer, key, error)

        self._encoding[peer, key] = entry
        self._encoding_bytes[id(entry)] = peer, entry.images.held_bytes(self._model.row_bytes)
        encode(images, is_wanted, on_encoded)

    def _submit_request(
        self, peer: str, entry: _IncompleteRequest, rows: Sequence[object] | None, now: float
    ) -> None:
        adapter = self._adapters.get(entry.submit.request.adapter, 0)
        state = _make_state(peer, entry, adapter, rows, now)
        self.deliver_emissions(self._scheduler.submit_request(state, now), now)

    def _append_ids(self, entry: _IncompleteRequest, first: int, ids: Sequence[int]) -> None:
        if first != len(entry.ids) or first + len(ids) > entry.submit.num_tokens:
            raise RequestError(f"prompt fragment at {first} does not follow {len(entry.ids)}")
        vocab_size, sees = self._model.vocab_size, bool(entry.submit.images)
        if not all(0 <= token < vocab_size or (sees and token >= FIRST_IMAGE_ID) for token in ids):
            raise RequestError(f"a token id is not below {vocab_size}", "prompt")
        entry.ids.extend(ids)

    def _drop_incomplete(self, peer: str, key: str) -> None:
        self._incomplete.get(peer, {}).pop(key, None)

    # --- rejections ------------------------------------------------------------------------------

    def _reject_error(self, peer: str, key: str, error: MolinkError) -> None:
        if isinstance(error, Overloaded):
            self._reject_request(peer, key, "overloaded", str(error), error.retry_after)
        elif isinstance(error, ContextTooLong):
            self._reject_request(peer, key, "too_long", str(error))
        else:
            self._reject_request(peer, key, "invalid", str(error))

    def _reject_request(
        self, peer: str, key: str, reason: RejectReason, message: str, retry_after: float = 0.0
    ) -> None:
        identity = self._connections.pop((peer, key), None)
        self._cache_versions.pop((peer, key), None)
        if identity is not None:
            self._send(
                identity, _make_rejected(self._scheduler.epoch, key, reason, message, retry_after)
            )

    def _cancel_request(self, peer: str, key: str, now: float) -> None:
        self._drop_incomplete(peer, key)
        self._encoding.pop((peer, key), None)
        self._scheduler.cancel_request(peer, key, now)
        self._connections.pop((peer, key), None)
        self._cache_versions.pop((peer, key), None)


def _make_state(
    peer: str,
    entry: _IncompleteRequest,
    adapter: int,
    image_rows: Sequence[object] | None,
    now: float,
) -> RequestState:
    submit, ids = entry.submit, entry.images.widen_ids(entry.ids)
    request = msgspec.structs.replace(
        submit.request, prompt_token_ids=ids[: submit.num_prompt_tokens], grammar=entry.grammar
    )
    return RequestState.from_request(
        request,
        peer,
        submit.key,
        ids[submit.num_prompt_tokens :],
        credit_window=submit.credit_window,
        elapsed_s=submit.elapsed_s,
        adapter=adapter,
        image_spans=entry.images.spans,
        image_rows=image_rows,
        encoded_s=0.0 if image_rows is None else now - entry.began_at,
    )


def _make_pooled(token: OutputToken, row: bytes) -> PooledOutput:
    payload = Payload("f32", (len(row) // DTYPE_SIZES["f32"],))
    return PooledOutput(token.epoch, token.key, payload)


def _make_rejected(
    epoch: int, key: str, reason: RejectReason, message: str, retry_after: float = 0.0
) -> Rejected:
    return Rejected(epoch, key, reason, message[:1024], retry_after)


def _split_batches(tokens: Iterable[OutputToken]) -> Iterator[OutputTokens]:
    """Split tokens into the fewest messages whose headers fit."""
    batch: list[OutputToken] = []
    size = 0
    for token in tokens:
        cost = _TOKEN_BYTES + len(token.key) + _TOP_BYTES * len(token.top)
        if batch and size + cost > _BATCH_BYTES:
            yield OutputTokens(tuple(batch))
            batch, size = [], 0
        batch.append(token)
        size += cost
    if batch:
        yield OutputTokens(tuple(batch))
