"""Where daemons hand requests to the head, and tokens go back to them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from molink.errors import ContextTooLong, MolinkError, Overloaded
from molink.routing.report import pack_report
from molink.scheduler.head import Head
from molink.scheduler.intake import Intake
from molink.scheduler.request import Emission
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import Buffer, DataMessage
from molink.wire.messages.data import Beat
from molink.wire.messages.serving import (
    Cancel,
    Credit,
    Prompt,
    Rejected,
    RejectReason,
    Submit,
    Token,
    Tokens,
)
from molink.wire.sockets.server import Sender

#: What tokens take of a header of 4 KiB, at most, in bytes.
_BATCH_BYTES = 3840
_TOKEN_BYTES = 48
_TOP_BYTES = 16

#: How long to try to tell a daemon that tokens were lost, in seconds; it may be gone.
OWED_S = 20.0

DeskMessage = Submit | Prompt | Cancel | Credit


class SendTo(Protocol):
    """``Server.send``: whether the message is on its way to that connection."""

    def __call__(
        self, identity: bytes, message: DataMessage, payload: Buffer | None = None
    ) -> bool: ...


class Desk:
    """Keeps which connection each request came from. One per epoch, beside its head.

    A request whose daemon can't be reached any more is cancelled: the daemon, once back, resubmits
    what it still wants.
    """

    def __init__(self, head: Head, pipeline: str, vocabulary: int, send: SendTo) -> None:
        self._head = head
        self._pipeline = pipeline
        self._send = send
        self._intake = Intake(head.limits.longest, vocabulary)
        self._connections: dict[tuple[str, str], bytes] = {}
        #: Requests with whose first token their daemons are told of the cache, and since when.
        self._asked: dict[tuple[str, str], int] = {}
        #: Requests whose tokens could not be sent: where to say so, and until when to try.
        self._owed: dict[tuple[str, str], tuple[bytes, float]] = {}

    def handle(
        self, sender: Sender, message: DeskMessage, payload: memoryview | None, now: float
    ) -> None:
        """Take a message of a daemon; what can't be served is answered with ``Rejected``."""
        owner, key = sender.user_id, message.key
        match message:
            case Submit():
                self._cancel(owner, key, now)
                self._connections[owner, key] = sender.identity
                self._begin(owner, message, payload, now)
            case Prompt():
                self._prompt(owner, message, payload, now)
            case Cancel():
                self._cancel(owner, key, now)
            case Credit():
                self._head.credit(owner, key, message.position)

    def deliver(self, emissions: Iterable[Emission], now: float) -> None:
        """Send tokens, those of one connection together, and rejections to their daemons."""
        tokens: dict[bytes, list[tuple[str, Token]]] = {}
        for owner, message in ((each.owner, each.message) for each in emissions):
            identity = self._connections.get((owner, message.key))
            if identity is None:
                continue
            if isinstance(message, Rejected):
                del self._connections[owner, message.key]
                self._asked.pop((owner, message.key), None)
                self._send(identity, message)
            else:
                tokens.setdefault(identity, []).append((owner, message))
        for identity, owned in tokens.items():
            first, *others = _batches(token for _, token in owned)
            sent = [self._send_first(identity, first, owned)]
            sent += [self._send(identity, batch) for batch in others]
            for owner, token in owned:
                if not all(sent):
                    self._cancel(owner, token.key, now)
                    self._owed[owner, token.key] = identity, now + OWED_S
                elif token.finish is not None:
                    del self._connections[owner, token.key]

    def _send_first(
        self, identity: bytes, batch: Tokens, owned: Sequence[tuple[str, Token]]
    ) -> bool:
        """Send tokens; with them what has changed in the cache, if one of the requests asks."""
        asked = [self._asked.pop((owner, token.key), None) for owner, token in owned]
        versions = [version for version in asked if version is not None]
        if not versions:
            return self._send(identity, batch)
        news, digests = pack_report(self._head.cache_report(min(versions)))
        payload = Payload("u8", (len(digests),))
        return self._send(identity, Tokens(batch.tokens, news, payload), digests)

    def expire(self, now: float) -> None:
        """Refuse those that have waited for their turn for as long as they may."""
        self.deliver(self._head.expire(now), now)

    def sweep(self, now: float) -> None:
        """Find what will never go on: incomplete requests, and connections that are gone."""
        for owner, key in self._intake.expire(now):
            self._reject(owner, key, "failed", "its prompt did not arrive whole")
        self._settle(now)
        beat = Beat(self._head.epoch, 0, 0, now)
        for identity in set(self._connections.values()):
            if self._send(identity, beat):
                continue
            gone = [known for known, where in self._connections.items() if where == identity]
            for known in gone:
                self._cancel(*known, now)

    def _settle(self, now: float) -> None:
        """Tell daemons which of their requests lost tokens, so that they resubmit them."""
        why = "tokens were lost on a congested connection"
        for (owner, key), (identity, until) in list(self._owed.items()):
            message = _rejected(self._head.epoch, key, "epoch", why)
            if self._send(identity, message) or now >= until:
                del self._owed[owner, key]

    def forget_owner(self, owner: str, now: float) -> None:
        """A daemon is no member any more."""
        self._head.cancel_owner(owner, now)
        self._intake.cancel_owner(owner)
        for known in [known for known in self._connections if known[0] == owner]:
            del self._connections[known]
            self._asked.pop(known, None)

    def close(self) -> None:
        """The epoch is over: tell every daemon, so that it resubmits under the next one."""
        for (_, key), identity in self._connections.items():
            self._send(identity, _rejected(self._head.epoch, key, "epoch", "the ring is re-formed"))
        self._connections.clear()

    def __len__(self) -> int:
        return len(self._connections)

    # --- inside ----------------------------------------------------------------------------------

    def _begin(self, owner: str, message: Submit, payload: memoryview | None, now: float) -> None:
        if (message.pipeline, message.epoch) != (self._pipeline, self._head.epoch):
            here = f"this is {self._pipeline} in epoch {self._head.epoch}"
            self._reject(owner, message.key, "epoch", here)
            return
        try:
            grammar = b"" if payload is None else bytes(payload)
            self._intake.submit(owner, message, now, grammar)
            if message.cache is not None:
                self._asked[owner, message.key] = message.cache
        except MolinkError as error:
            self._refuse(owner, message.key, error)

    def _prompt(self, owner: str, message: Prompt, payload: memoryview | None, now: float) -> None:
        try:
            if payload is None or message.payload.dtype != "i32":
                raise MolinkError("a prompt part needs a payload of i32")
            ids = payload.cast("B").cast("i")
            request = self._intake.prompt(owner, message, ids, now)
            if request is not None:
                self.deliver(self._head.submit(request, now), now)
        except MolinkError as error:
            self._refuse(owner, message.key, error)

    def _refuse(self, owner: str, key: str, error: MolinkError) -> None:
        if isinstance(error, Overloaded):
            self._reject(owner, key, "overloaded", str(error), error.retry_after)
        elif isinstance(error, ContextTooLong):
            self._reject(owner, key, "too_long", str(error))
        else:
            self._reject(owner, key, "invalid", str(error))

    def _reject(
        self, owner: str, key: str, reason: RejectReason, message: str, retry_after: float = 0.0
    ) -> None:
        identity = self._connections.pop((owner, key), None)
        self._asked.pop((owner, key), None)
        if identity is not None:
            self._send(identity, _rejected(self._head.epoch, key, reason, message, retry_after))

    def _cancel(self, owner: str, key: str, now: float) -> None:
        self._intake.cancel(owner, key)
        self._head.cancel(owner, key, now)
        self._connections.pop((owner, key), None)
        self._asked.pop((owner, key), None)


def _rejected(
    epoch: int, key: str, reason: RejectReason, message: str, retry_after: float = 0.0
) -> Rejected:
    return Rejected(epoch, key, reason, message[:1024], retry_after)


def _batches(tokens: Iterable[Token]) -> Iterator[Tokens]:
    """As few messages as their bound allows."""
    batch: list[Token] = []
    size = 0
    for token in tokens:
        cost = _TOKEN_BYTES + len(token.key) + _TOP_BYTES * len(token.top)
        if batch and size + cost > _BATCH_BYTES:
            yield Tokens(tuple(batch))
            batch, size = [], 0
        batch.append(token)
        size += cost
    if batch:
        yield Tokens(tuple(batch))
