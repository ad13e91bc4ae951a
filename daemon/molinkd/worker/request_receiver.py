"""Where daemons hand requests to the head, and tokens go back to them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from molink.errors import ContextTooLong, MolinkError, Overloaded
from molink.routing.cache_report import pack_report
from molink.scheduler.prompt_assembler import PromptAssembler
from molink.scheduler.request import Emission
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import Buffer, DataMessage
from molink.wire.messages.data_plane import Heartbeat
from molink.wire.messages.serving import (
    Cancel,
    Credit,
    OutputToken,
    OutputTokens,
    PromptFragment,
    Rejected,
    RejectReason,
    Submit,
)
from molink.wire.sockets.server import MessageSender

#: What tokens take of a header of 4 KiB, at most, in bytes.
_BATCH_BYTES = 3840
_TOKEN_BYTES = 48
_TOP_BYTES = 16

#: How long to try to tell a daemon that tokens were lost, in seconds; it may be gone.
LOST_TOKENS_RETRY_S = 20.0

ClientMessage = Submit | PromptFragment | Cancel | Credit


class SendTo(Protocol):
    """``Server.send``: whether the message is on its way to that connection."""

    def __call__(
        self, identity: bytes, message: DataMessage, payload: Buffer | None = None
    ) -> bool: ...


class RequestReceiver:
    """Keeps which connection each request came from. One per epoch, beside its head.

    A request whose daemon can't be reached any more is cancelled: the daemon, once back, resubmits
    what it still wants.
    """

    def __init__(self, scheduler: Scheduler, pipeline: str, vocab_size: int, send: SendTo) -> None:
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._send = send
        self._assembler = PromptAssembler(scheduler.config.max_request_tokens, vocab_size)
        self._connections: dict[tuple[str, str], bytes] = {}
        #: Requests with whose first token their daemons are told of the cache, and since when.
        self._cache_versions: dict[tuple[str, str], int] = {}
        #: Requests whose tokens could not be sent: where to say so, and until when to try.
        self._lost_tokens: dict[tuple[str, str], tuple[bytes, float]] = {}

    def handle_message(
        self, sender: MessageSender, message: ClientMessage, payload: memoryview | None, now: float
    ) -> None:
        """Take a message of a daemon; what can't be served is answered with ``Rejected``."""
        peer, key = sender.peer_id, message.key
        match message:
            case Submit():
                self._cancel_request(peer, key, now)
                self._connections[peer, key] = sender.identity
                self._begin_request(peer, message, payload, now)
            case PromptFragment():
                self._add_prompt(peer, message, payload, now)
            case Cancel():
                self._cancel_request(peer, key, now)
            case Credit():
                self._scheduler.grant_credit(peer, key, message.position)

    def deliver_emissions(self, emissions: Iterable[Emission], now: float) -> None:
        """Send tokens, those of one connection together, and rejections to their daemons."""
        tokens: dict[bytes, list[tuple[str, OutputToken]]] = {}
        for peer, message in ((each.peer, each.message) for each in emissions):
            identity = self._connections.get((peer, message.key))
            if identity is None:
                continue
            if isinstance(message, Rejected):
                del self._connections[peer, message.key]
                self._cache_versions.pop((peer, message.key), None)
                self._send(identity, message)
            else:
                tokens.setdefault(identity, []).append((peer, message))
        for identity, owned in tokens.items():
            first, *others = _split_batches(token for _, token in owned)
            sent = [self._send_first(identity, first, owned)]
            sent += [self._send(identity, batch) for batch in others]
            for peer, token in owned:
                if not all(sent):
                    self._cancel_request(peer, token.key, now)
                    self._lost_tokens[peer, token.key] = identity, now + LOST_TOKENS_RETRY_S
                elif token.finish_reason is not None:
                    del self._connections[peer, token.key]

    def _send_first(
        self, identity: bytes, batch: OutputTokens, owned: Sequence[tuple[str, OutputToken]]
    ) -> bool:
        """Send tokens; with them what has changed in the cache, if one of the requests asks."""
        requested = [self._cache_versions.pop((peer, token.key), None) for peer, token in owned]
        versions = [version for version in requested if version is not None]
        if not versions:
            return self._send(identity, batch)
        news, digests = pack_report(self._scheduler.cache_report(min(versions)))
        payload = Payload("u8", (len(digests),))
        return self._send(identity, OutputTokens(batch.tokens, news, payload), digests)

    def expire_requests(self, now: float) -> None:
        """Refuse those that have waited for their turn for as long as they may."""
        self.deliver_emissions(self._scheduler.expire_requests(now), now)

    def sweep_connections(self, now: float) -> None:
        """Find what will never go on: incomplete requests, and connections that are gone."""
        for peer, key in self._assembler.expire_requests(now):
            self._reject_request(peer, key, "failed", "its prompt did not arrive whole")
        self._notify_lost_tokens(now)
        beat = Heartbeat(self._scheduler.epoch, 0, 0, now)
        for identity in set(self._connections.values()):
            if self._send(identity, beat):
                continue
            gone = [known for known, where in self._connections.items() if where == identity]
            for known in gone:
                self._cancel_request(*known, now)

    def _notify_lost_tokens(self, now: float) -> None:
        """Tell daemons which of their requests lost tokens, so that they resubmit them."""
        why = "tokens were lost on a congested connection"
        for (peer, key), (identity, until) in list(self._lost_tokens.items()):
            message = _make_rejected(self._scheduler.epoch, key, "epoch", why)
            if self._send(identity, message) or now >= until:
                del self._lost_tokens[peer, key]

    def drop_peer(self, peer: str, now: float) -> None:
        """A daemon is no member any more."""
        self._scheduler.cancel_peer(peer, now)
        self._assembler.cancel_peer(peer)
        for known in [known for known in self._connections if known[0] == peer]:
            del self._connections[known]
            self._cache_versions.pop(known, None)

    def close(self) -> None:
        """The epoch is over: tell every daemon, so that it resubmits under the next one."""
        for (_, key), identity in self._connections.items():
            self._send(
                identity,
                _make_rejected(self._scheduler.epoch, key, "epoch", "the ring is re-formed"),
            )
        self._connections.clear()

    def __len__(self) -> int:
        return len(self._connections)

    # --- inside ----------------------------------------------------------------------------------

    def _begin_request(
        self, peer: str, message: Submit, payload: memoryview | None, now: float
    ) -> None:
        if (message.pipeline, message.epoch) != (self._pipeline, self._scheduler.epoch):
            here = f"this is {self._pipeline} in epoch {self._scheduler.epoch}"
            self._reject_request(peer, message.key, "epoch", here)
            return
        try:
            grammar = b"" if payload is None else bytes(payload)
            self._assembler.begin_request(peer, message, now, grammar)
            if message.cache_version is not None:
                self._cache_versions[peer, message.key] = message.cache_version
        except MolinkError as error:
            self._reject_error(peer, message.key, error)

    def _add_prompt(
        self, peer: str, message: PromptFragment, payload: memoryview | None, now: float
    ) -> None:
        try:
            if payload is None or message.payload.dtype != "i32":
                raise MolinkError("a prompt part needs a payload of i32")
            ids = payload.cast("B").cast("i")
            request = self._assembler.add_fragment(peer, message, ids, now)
            if request is not None:
                self.deliver_emissions(self._scheduler.submit_request(request, now), now)
        except MolinkError as error:
            self._reject_error(peer, message.key, error)

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
        self._assembler.cancel_request(peer, key)
        self._scheduler.cancel_request(peer, key, now)
        self._connections.pop((peer, key), None)
        self._cache_versions.pop((peer, key), None)


def _make_rejected(
    epoch: int, key: str, reason: RejectReason, message: str, retry_after: float = 0.0
) -> Rejected:
    return Rejected(epoch, key, reason, message[:1024], retry_after)


def _split_batches(tokens: Iterable[OutputToken]) -> Iterator[OutputTokens]:
    """As few messages as their bound allows."""
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
