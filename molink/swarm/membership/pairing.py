"""Pairing: a PC without a token asks to join, and a person compares two short codes.

A man in the middle could offer its own keys to both sides. So both sides show a code derived from
the whole exchange, including both public keys, and a person compares them. The PC commits to a
nonce before it sees the swarm's and reveals it afterwards: nobody can search for keys with equal
codes, and each attempt has a chance of 1 in 10^8 (a *short authentication string*, as in ZRTP and
in Bluetooth's numeric comparison).

:class:`PairingResponder` is the swarm's side, :class:`PairingInitiator` the joining PC's. Sans-IO;
all times are in seconds.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import msgspec

from molink.errors import WireError
from molink.facts.identity import derive_peer_id
from molink.swarm.membership.sanitize import sanitize_name
from molink.swarm.membership.versions import own_version
from molink.util.connection_slots import ConnectionSlots
from molink.util.token_bucket import RateLimit, TokenBucket
from molink.wire.messages.pairing import (
    Challenge,
    Commitment,
    PairingClientMessage,
    PairingOutcome,
    PairingResult,
    PairingServerMessage,
    Reveal,
)
from molink.wire.protocol import PROTOCOL
from molink.wire.signing import derive_public_key

CODE_DIGITS = 8
#: Maximum connections without a request yet, in all and from one address.
MAX_JOINERS = 32
MAX_JOINERS_PER_ADDRESS = 4
#: Maximum requests that await a decision, in all and from one address.
MAX_PENDING = 8
MAX_PENDING_PER_ADDRESS = 3
#: Timeouts from a connection to its code, and from the code to the decision.
HANDSHAKE_TIMEOUT_S = 10.0
DECISION_TIMEOUT_S = 300.0
#: Number of wrong codes after which all pending requests are refused.
MAX_WRONG_CODES = 3
#: Rate limits of attempts from one address, and in all: each attempt shows a given code with a
#: probability of 1 in 10^8.
ADDRESS_RATE_LIMIT = RateLimit(6, 0.1)
OVERALL_RATE_LIMIT = RateLimit(16, 0.5)
#: Maximum addresses whose rate is tracked.
_MAX_ADDRESS_BUCKETS = 256


# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinerConnectedEvent:
    """A PC connected; ``nonce`` is 32 fresh random bytes."""

    joiner: int
    address: str
    nonce: bytes


@dataclass(frozen=True, slots=True)
class JoinerMessageReceivedEvent:
    """A joiner sent a message; ``objection`` says why its key is inadmissible, if it is."""

    joiner: int
    message: PairingClientMessage
    objection: PairingOutcome | None = None


@dataclass(frozen=True, slots=True)
class JoinerDisconnectedEvent:
    """A joiner's connection ended."""

    joiner: int


@dataclass(frozen=True, slots=True)
class PairingDecidedEvent:
    """A member admitted or refused the PC that shows ``code``.

    ``verify_key`` is the key for which the member has signed; without one the member only asks for
    the key.
    """

    code: str
    verify_key: str = ""
    refuse: bool = False


@dataclass(frozen=True, slots=True)
class PairingTimePassedEvent:
    """The periodic timer fired."""


PairingEvent = (
    JoinerConnectedEvent
    | JoinerMessageReceivedEvent
    | JoinerDisconnectedEvent
    | PairingDecidedEvent
    | PairingTimePassedEvent
)


# --- actions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendToJoinerAction:
    """Send a message to a joiner; close the connection after a :class:`PairingResult`."""

    joiner: int
    message: PairingServerMessage


@dataclass(frozen=True, slots=True)
class DisconnectJoinerAction:
    """Close a joiner's connection without a message."""

    joiner: int


@dataclass(frozen=True, slots=True)
class AdmitJoinerAction:
    """Make the PC a member, then send it the result."""

    joiner: int
    name: str


@dataclass(frozen=True, slots=True)
class NameJoinerAction:
    """Tell the member for which key to sign."""

    name: str
    verify_key: str


@dataclass(frozen=True, slots=True)
class ConfirmRefusalAction:
    """Confirm that the PC with this name was refused."""

    name: str


@dataclass(frozen=True, slots=True)
class ReportPairingErrorAction:
    """Report why a decision was not applied; ``reason`` is for a person."""

    reason: str


@dataclass(frozen=True, slots=True)
class PublishPendingAction:
    """Publish the changed list of pending requests."""


PairingAction = (
    SendToJoinerAction
    | DisconnectJoinerAction
    | AdmitJoinerAction
    | NameJoinerAction
    | ConfirmRefusalAction
    | ReportPairingErrorAction
    | PublishPendingAction
)


@dataclass(frozen=True, slots=True)
class PairingRequest:
    """A PC that has awaited a decision since the time ``since`` of the responder's clock."""

    name: str
    code: str
    address: str
    since: float


@dataclass(slots=True)
class _Joiner:
    address: str
    nonce: bytes
    expires_at: float
    #: ``new`` → ``challenged`` → ``pending``.
    state: Literal["new", "challenged", "pending"] = "new"
    commitment: Commitment | None = None
    name: str = ""
    code: str = ""
    wrong_codes: int = 0


class PairingResponder:
    """The swarm's side."""

    def __init__(self, swarm: str, name: str, public_key: str, now: float) -> None:
        """``swarm`` is the swarm's id, ``public_key`` its coordinator's key."""
        self._swarm, self._name, self._key = swarm, name, public_key
        self._joiners: dict[int, _Joiner] = {}
        #: Joiners that are not pending yet.
        self._handshakes = ConnectionSlots[int](MAX_JOINERS, MAX_JOINERS_PER_ADDRESS)
        self._bucket = TokenBucket(OVERALL_RATE_LIMIT, now)
        self._address_buckets: dict[str, TokenBucket] = {}

    def handle(self, event: PairingEvent, now: float) -> list[PairingAction]:
        """Handle an event; return the resulting actions."""
        actions = self._expire_joiners(now)
        match event:
            case JoinerConnectedEvent():
                actions += self._on_connected(event, now)
            case JoinerMessageReceivedEvent() if event.joiner in self._joiners:
                actions += self._on_message(event, now)
            case JoinerDisconnectedEvent() if event.joiner in self._joiners:
                actions += self._remove_joiner(event.joiner)
            case PairingDecidedEvent():
                actions += self._on_decision(event)
        return actions

    @property
    def pending_requests(self) -> list[PairingRequest]:
        """Requests that await a decision, oldest first."""
        return [
            PairingRequest(one.name, one.code, one.address, one.expires_at - DECISION_TIMEOUT_S)
            for one in self._joiners.values()
            if one.state == "pending"
        ]

    def validate(self) -> None:
        """Check the bounds; for tests."""
        self._handshakes.validate()
        assert len(self._joiners) == len(self._handshakes) + len(self.pending_requests)
        assert len(self.pending_requests) <= MAX_PENDING
        assert len(self._address_buckets) <= _MAX_ADDRESS_BUCKETS
        for address in {one.address for one in self._joiners.values()}:
            assert len(self._pending_of(address)) <= MAX_PENDING_PER_ADDRESS
        for one in self._joiners.values():
            assert bool(one.code) == (one.state == "pending")
            assert one.wrong_codes < MAX_WRONG_CODES

    # --- joiners -----------------------------------------------------------------------------

    def _on_connected(self, event: JoinerConnectedEvent, now: float) -> list[PairingAction]:
        expires_at = now + HANDSHAKE_TIMEOUT_S
        self._joiners[event.joiner] = _Joiner(event.address, event.nonce, expires_at)
        replaced = self._handshakes.admit(event.joiner, event.address)
        if replaced is None:
            return []
        return [*self._remove_joiner(replaced), DisconnectJoinerAction(replaced)]

    def _on_message(self, event: JoinerMessageReceivedEvent, now: float) -> list[PairingAction]:
        joiner, message = self._joiners[event.joiner], event.message
        if joiner.state == "new" and isinstance(message, Commitment):
            return self._on_commitment(event.joiner, joiner, message, event.objection, now)
        if joiner.state == "challenged" and isinstance(message, Reveal):
            return self._on_reveal(event.joiner, joiner, message, now)
        return [*self._remove_joiner(event.joiner), DisconnectJoinerAction(event.joiner)]

    def _on_commitment(
        self,
        number: int,
        joiner: _Joiner,
        message: Commitment,
        objection: PairingOutcome | None,
        now: float,
    ) -> list[PairingAction]:
        outcome = objection or self._check_rate(joiner.address, now)
        if outcome is not None:
            return self._reject_joiner(number, outcome)
        if not _is_own_key(message):
            return [*self._remove_joiner(number), DisconnectJoinerAction(number)]
        joiner.state, joiner.commitment = "challenged", message
        joiner.name = sanitize_name(message.name, derive_peer_id(message.public_key))
        return [SendToJoinerAction(number, self._make_challenge(joiner))]

    def _on_reveal(
        self, number: int, joiner: _Joiner, message: Reveal, now: float
    ) -> list[PairingAction]:
        committed = joiner.commitment
        assert committed is not None
        if make_commitment(committed.public_key, message.nonce) != committed.commitment:
            return [*self._remove_joiner(number), DisconnectJoinerAction(number)]
        full = len(self.pending_requests) >= MAX_PENDING
        if full or len(self._pending_of(joiner.address)) >= MAX_PENDING_PER_ADDRESS:
            return self._reject_joiner(number, "busy")
        self._handshakes.release(number)
        joiner.state, joiner.expires_at = "pending", now + DECISION_TIMEOUT_S
        joiner.code = short_code(committed, self._make_challenge(joiner), message.nonce)
        return [PublishPendingAction()]

    def _make_challenge(self, joiner: _Joiner) -> Challenge:
        return Challenge(
            swarm=self._swarm, name=self._name, public_key=self._key, nonce=joiner.nonce
        )

    def _expire_joiners(self, now: float) -> list[PairingAction]:
        actions: list[PairingAction] = []
        for number, one in list(self._joiners.items()):
            if one.expires_at > now:
                continue
            if one.state == "pending":
                actions += self._reject_joiner(number, "expired")
            else:
                actions += [*self._remove_joiner(number), DisconnectJoinerAction(number)]
        return actions

    def _reject_joiner(self, number: int, outcome: PairingOutcome) -> list[PairingAction]:
        result = PairingResult(outcome=outcome)
        if outcome == "version":
            own = own_version()
            result = PairingResult(outcome=outcome, version=own.version, protocol=own.protocol)
        return [*self._remove_joiner(number), SendToJoinerAction(number, result)]

    def _remove_joiner(self, number: int) -> list[PairingAction]:
        self._handshakes.release(number)
        return [PublishPendingAction()] if self._joiners.pop(number).state == "pending" else []

    def _pending_of(self, address: str) -> list[_Joiner]:
        joiners = self._joiners.values()
        return [one for one in joiners if one.address == address and one.state == "pending"]

    def _check_rate(self, address: str, now: float) -> PairingOutcome | None:
        """Count an attempt; ``"busy"`` if the address, or all together, made too many."""
        own = self._address_buckets.pop(address, None) or TokenBucket(ADDRESS_RATE_LIMIT, now)
        self._address_buckets[address] = own
        if len(self._address_buckets) > _MAX_ADDRESS_BUCKETS:
            del self._address_buckets[next(iter(self._address_buckets))]
        if own.wait_time(now) or self._bucket.wait_time(now):
            return "busy"
        own.take_token()
        self._bucket.take_token()
        return None

    # --- decisions ---------------------------------------------------------------------------

    def _on_decision(self, event: PairingDecidedEvent) -> list[PairingAction]:
        code = normalize_code(event.code)
        if code is None:
            text = f"a code has {CODE_DIGITS} digits, for example 4827-1931"
            return [ReportPairingErrorAction(text)]
        found = [number for number, one in self._joiners.items() if one.code == code]
        if len(found) == 1:
            return self._apply_decision(found[0], event)
        if found:
            # The two are indistinguishable, which can't be an accident.
            actions = [action for one in found for action in self._reject_joiner(one, "refused")]
            text = f"{len(found)} PCs show {code}; all were refused. Run `molink join` again"
            return [*actions, ReportPairingErrorAction(text)]
        return self._count_wrong_code(code)

    def _apply_decision(self, number: int, event: PairingDecidedEvent) -> list[PairingAction]:
        joiner = self._joiners[number]
        if event.refuse:
            return [*self._reject_joiner(number, "refused"), ConfirmRefusalAction(joiner.name)]
        assert joiner.commitment is not None
        key = joiner.commitment.verify_key
        if event.verify_key != key:
            return [NameJoinerAction(joiner.name, key)]
        return [*self._remove_joiner(number), AdmitJoinerAction(number, joiner.name)]

    def _count_wrong_code(self, code: str) -> list[PairingAction]:
        pending = [number for number, one in self._joiners.items() if one.state == "pending"]
        if not pending:
            text = f"no waiting PC has code {code}; its request may have expired. "
            return [ReportPairingErrorAction(f"{text}Run `molink join` there again")]
        actions: list[PairingAction] = []
        for number in pending:
            self._joiners[number].wrong_codes += 1
            if self._joiners[number].wrong_codes >= MAX_WRONG_CODES:
                actions += self._reject_joiner(number, "refused")
        text = f"no waiting PC has code {code}. Compare it with the code on that PC"
        if actions:
            text += f"; after {MAX_WRONG_CODES} wrong codes it has to run `molink join` again"
        return [*actions, ReportPairingErrorAction(text)]


class PairingInitiator:
    """The joining PC's side."""

    def __init__(self, verify_key: str, name: str, version: str, nonce: bytes) -> None:
        """``nonce`` is 32 fresh random bytes."""
        self._nonce = nonce
        public_key = derive_public_key(verify_key)
        self.commitment = Commitment(
            public_key=public_key,
            verify_key=verify_key,
            name=name[:64],
            version=version[:64],
            commitment=make_commitment(public_key, nonce),
            protocol=PROTOCOL,
        )

    def answer_challenge(self, challenge: Challenge) -> tuple[Reveal, str]:
        """Return the answer to the swarm's challenge, and the code to show.

        Raises:
            WireError: the swarm presents this PC's own key.
        """
        if challenge.public_key == self.commitment.public_key:
            raise WireError("the other side presents this PC's own key")
        return Reveal(nonce=self._nonce), short_code(self.commitment, challenge, self._nonce)


def _is_own_key(message: Commitment) -> bool:
    """Whether a PC's verify key belongs to the public key that it shows."""
    try:
        return derive_public_key(message.verify_key) == message.public_key
    except ValueError:
        return False


def make_commitment(public_key: str, nonce: bytes) -> bytes:
    """Return a hash that binds a PC to a nonce without revealing it."""
    data = public_key.encode("ascii") + nonce
    return hashlib.blake2b(data, digest_size=32, person=b"molink-commit").digest()


def short_code(commitment: Commitment, challenge: Challenge, nonce: bytes) -> str:
    """Return the code of an exchange, such as ``4827-1931``: a hash over all its messages."""
    exchange = msgspec.msgpack.encode((commitment, challenge, nonce))
    digest = hashlib.blake2b(exchange, digest_size=16, person=b"molink-code").digest()
    return _format_code(f"{int.from_bytes(digest, 'big') % 10**CODE_DIGITS:0{CODE_DIGITS}d}")


def normalize_code(text: str) -> str | None:
    """Convert a typed code to the form of :func:`short_code`; ``None`` if it is invalid."""
    digits = "".join(text.split()).replace("-", "")
    if len(digits) != CODE_DIGITS or not (digits.isascii() and digits.isdigit()):
        return None
    return _format_code(digits)


def _format_code(digits: str) -> str:
    return f"{digits[:4]}-{digits[4:]}"
