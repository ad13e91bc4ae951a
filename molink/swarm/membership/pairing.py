"""Strangers that ask to be let in, and the short code by which a person tells them apart.

A PC without a token *knocks*. Whoever sits in between could offer keys of its own to both sides, so
both show a code that follows from everything they have said, both public keys included; a person
compares the two. The PC commits to a nonce before it sees the swarm's, and shows it after: nobody
in between can try keys until the codes agree, and each attempt has one chance in 10^8 (a *short
authentication string*, as in ZRTP and in Bluetooth's numeric comparison).

:class:`PairingResponder` is the swarm's side, :class:`PairingInitiator` the PC's. All times are in
seconds.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from molink.errors import WireError
from molink.facts.identity import derive_peer_id
from molink.swarm.membership.sanitize import sanitize_name
from molink.swarm.membership.versions import own_version
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

#: Digits of a code.
CODE_DIGITS = 8
#: Connections at once, in all and of one address.
MAX_VISITORS, MAX_OF_ADDRESS = 32, 4
#: Knocks that wait for a person at once, in all and of one address.
MAX_WAITING, MAX_WAITING_OF_ADDRESS = 8, 3
#: From a connection until its code is known, and from then until nobody has approved it.
TALK_S, WAIT_S = 10.0, 300.0
#: Wrong codes after which those who wait are sent away.
MAX_WRONG_CODES = 3
#: Knocks of one address, and in all: each is a chance of 1 in 10^8 to show another's code.
RATE_OF_ADDRESS, RATE = RateLimit(6, 0.1), RateLimit(16, 0.5)
#: Addresses whose rate is remembered.
_MAX_ADDRESS_BUCKETS = 256


# --- what happens ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinerConnectedEvent:
    """A connection; ``nonce`` are 32 random bytes that nobody has seen."""

    joiner: int
    address: str
    nonce: bytes


@dataclass(frozen=True, slots=True)
class JoinerMessageReceivedEvent:
    """A message of a visitor. ``objection``: why its key can't be let in, where it can't."""

    joiner: int
    message: PairingClientMessage
    objection: PairingOutcome | None = None


@dataclass(frozen=True, slots=True)
class JoinerDisconnectedEvent:
    """A visitor's connection has ended."""

    joiner: int


@dataclass(frozen=True, slots=True)
class PairingDecidedEvent:
    """A member (``approver``) lets the PC that shows ``code`` in, or refuses it."""

    code: str
    approver: str
    refuse: bool = False


@dataclass(frozen=True, slots=True)
class PairingTimePassedEvent:
    """Time has passed."""


PairingEvent = (
    JoinerConnectedEvent
    | JoinerMessageReceivedEvent
    | JoinerDisconnectedEvent
    | PairingDecidedEvent
    | PairingTimePassedEvent
)


# --- what is to be done ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendToJoinerAction:
    """Send a message to a visitor; after a :class:`PairingResult` its connection ends."""

    joiner: int
    message: PairingServerMessage


@dataclass(frozen=True, slots=True)
class DisconnectJoinerAction:
    """End a visitor's connection without a word."""

    joiner: int


@dataclass(frozen=True, slots=True)
class AdmitJoinerAction:
    """Make this key a member on the word of ``approver``, then tell the visitor the verdict."""

    joiner: int
    public_key: str
    name: str
    approver: str


@dataclass(frozen=True, slots=True)
class ConfirmRefusalAction:
    """The PC of that name was refused, as asked for."""

    name: str


@dataclass(frozen=True, slots=True)
class ReportPairingErrorAction:
    """A :class:`PairingDecidedEvent` can't be obeyed; says why, for a person."""

    reason: str


@dataclass(frozen=True, slots=True)
class PublishPendingAction:
    """Those who wait are others than before."""


PairingAction = (
    SendToJoinerAction
    | DisconnectJoinerAction
    | AdmitJoinerAction
    | ConfirmRefusalAction
    | ReportPairingErrorAction
    | PublishPendingAction
)


@dataclass(frozen=True, slots=True)
class PairingRequest:
    """A PC that waits for a person; ``since`` by the clock of the events."""

    name: str
    code: str
    address: str
    since: float


@dataclass(slots=True)
class _Joiner:
    address: str
    nonce: bytes
    #: ``new`` → ``challenged`` → ``waiting``.
    state: Literal["new", "challenged", "waiting"] = "new"
    #: When it is sent away.
    expires_at: float = 0.0
    since: float = 0.0
    commitment: Commitment | None = None
    name: str = ""
    code: str = ""
    wrong_codes: int = field(default=0)


class PairingResponder:
    """Who stands before the door of a swarm."""

    def __init__(self, swarm: str, name: str, public_key: str, now: float) -> None:
        """``swarm`` is its id, ``public_key`` that of its coordinator."""
        self._swarm, self._name, self._key = swarm, name, public_key
        self._joiners: dict[int, _Joiner] = {}
        self._rate = TokenBucket(RATE, now)
        self._rates: dict[str, TokenBucket] = {}

    def handle(self, event: PairingEvent, now: float) -> list[PairingAction]:
        """What follows from an event at ``now``."""
        decisions = self._expire_joiners(now)
        match event:
            case JoinerConnectedEvent():
                decisions += self._on_connected(event, now)
            case JoinerMessageReceivedEvent() if event.joiner in self._joiners:
                decisions += self._on_message(event, now)
            case JoinerDisconnectedEvent() if event.joiner in self._joiners:
                decisions += self._remove_joiner(event.joiner)
            case PairingDecidedEvent():
                decisions += self._on_decision(event)
        return decisions

    @property
    def pending_requests(self) -> list[PairingRequest]:
        """Those who wait for a person, longest first."""
        return [
            PairingRequest(one.name, one.code, one.address, one.since)
            for one in self._joiners.values()
            if one.state == "waiting"
        ]

    def validate(self) -> None:
        """Check the bounds; for tests."""
        assert len(self._joiners) <= MAX_VISITORS
        assert len(self.pending_requests) <= MAX_WAITING
        assert len(self._rates) <= _MAX_ADDRESS_BUCKETS
        for address in {one.address for one in self._joiners.values()}:
            assert len(self._joiners_of(address)) <= MAX_OF_ADDRESS
        for one in self._joiners.values():
            assert bool(one.code) == (one.state == "waiting")
            assert one.wrong_codes < MAX_WRONG_CODES

    # --- visitors ----------------------------------------------------------------------------

    def _on_connected(self, event: JoinerConnectedEvent, now: float) -> list[PairingAction]:
        full = len(self._joiners) >= MAX_VISITORS
        if full or len(self._joiners_of(event.address)) >= MAX_OF_ADDRESS:
            return [DisconnectJoinerAction(event.joiner)]
        self._joiners[event.joiner] = _Joiner(event.address, event.nonce, expires_at=now + TALK_S)
        return []

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
        joiner.state, joiner.commitment = "challenged", message
        joiner.name = sanitize_name(message.name, derive_peer_id(message.public_key))
        return [SendToJoinerAction(number, self._make_challenge(joiner))]

    def _on_reveal(
        self, number: int, joiner: _Joiner, message: Reveal, now: float
    ) -> list[PairingAction]:
        asked = joiner.commitment
        assert asked is not None
        if make_commitment(asked.public_key, message.nonce) != asked.commitment:
            return [*self._remove_joiner(number), DisconnectJoinerAction(number)]
        of_address = [one for one in self._joiners_of(joiner.address) if one.state == "waiting"]
        if len(self.pending_requests) >= MAX_WAITING or len(of_address) >= MAX_WAITING_OF_ADDRESS:
            return self._reject_joiner(number, "busy")
        joiner.state, joiner.since, joiner.expires_at = "waiting", now, now + WAIT_S
        joiner.code = short_code(asked, self._make_challenge(joiner), message.nonce)
        return [PublishPendingAction()]

    def _make_challenge(self, joiner: _Joiner) -> Challenge:
        return Challenge(
            swarm=self._swarm, name=self._name, public_key=self._key, nonce=joiner.nonce
        )

    def _expire_joiners(self, now: float) -> list[PairingAction]:
        decisions: list[PairingAction] = []
        for number, one in list(self._joiners.items()):
            if one.expires_at > now:
                continue
            if one.state == "waiting":
                decisions += self._reject_joiner(number, "expired")
            else:
                decisions += [*self._remove_joiner(number), DisconnectJoinerAction(number)]
        return decisions

    def _reject_joiner(self, number: int, outcome: PairingOutcome) -> list[PairingAction]:
        verdict = PairingResult(outcome=outcome)
        if outcome == "version":
            speaks = own_version()
            verdict = PairingResult(
                outcome=outcome, version=speaks.version, protocol=speaks.protocol
            )
        return [*self._remove_joiner(number), SendToJoinerAction(number, verdict)]

    def _remove_joiner(self, number: int) -> list[PairingAction]:
        return [PublishPendingAction()] if self._joiners.pop(number).state == "waiting" else []

    def _joiners_of(self, address: str) -> list[_Joiner]:
        return [one for one in self._joiners.values() if one.address == address]

    def _check_rate(self, address: str, now: float) -> PairingOutcome | None:
        """Take one knock of what this address, and all, may have."""
        own = self._rates.pop(address, None) or TokenBucket(RATE_OF_ADDRESS, now)
        self._rates[address] = own
        if len(self._rates) > _MAX_ADDRESS_BUCKETS:
            del self._rates[next(iter(self._rates))]
        if own.wait_time(now) or self._rate.wait_time(now):
            return "busy"
        own.take_token()
        self._rate.take_token()
        return None

    # --- a person's word ---------------------------------------------------------------------

    def _on_decision(self, event: PairingDecidedEvent) -> list[PairingAction]:
        code = normalize_code(event.code)
        if code is None:
            return [
                ReportPairingErrorAction(
                    f"a code has {CODE_DIGITS} digits, such as 4827-1931, and this has not"
                )
            ]
        found = [number for number, one in self._joiners.items() if one.code == code]
        if len(found) == 1:
            return self._apply_decision(found[0], event)
        if found:
            # Nobody can tell them apart, and it is no accident.
            sent = [decision for one in found for decision in self._reject_joiner(one, "refused")]
            return [
                *sent,
                ReportPairingErrorAction(
                    f"{len(found)} PCs show {code}: all were refused; join again"
                ),
            ]
        return self._count_wrong_code(code)

    def _apply_decision(self, number: int, event: PairingDecidedEvent) -> list[PairingAction]:
        joiner = self._joiners[number]
        if event.refuse:
            return [*self._reject_joiner(number, "refused"), ConfirmRefusalAction(joiner.name)]
        assert joiner.commitment is not None
        key = joiner.commitment.public_key
        return [
            *self._remove_joiner(number),
            AdmitJoinerAction(number, key, joiner.name, event.approver),
        ]

    def _count_wrong_code(self, code: str) -> list[PairingAction]:
        waiting = [number for number, one in self._joiners.items() if one.state == "waiting"]
        if not waiting:
            return [
                ReportPairingErrorAction(
                    f"no PC that waits shows {code}: it may have waited for too long. Run `molink "
                    "join` there again"
                )
            ]
        decisions: list[PairingAction] = []
        for number in waiting:
            self._joiners[number].wrong_codes += 1
            if self._joiners[number].wrong_codes >= MAX_WRONG_CODES:
                decisions += self._reject_joiner(number, "refused")
        reason = f"no PC that waits shows {code}. Compare it with the code on that PC"
        if decisions:
            reason += f"; after {MAX_WRONG_CODES} wrong codes it has to run `molink join` again"
        return [*decisions, ReportPairingErrorAction(reason)]


class PairingInitiator:
    """The side of the PC that asks."""

    def __init__(self, public_key: str, name: str, version: str, nonce: bytes) -> None:
        """``nonce`` are 32 random bytes that nobody has seen."""
        self._nonce = nonce
        self.commitment = Commitment(
            public_key=public_key,
            name=name[:64],
            version=version[:64],
            commitment=make_commitment(public_key, nonce),
            protocol=PROTOCOL,
        )

    def answer_challenge(self, challenge: Challenge) -> tuple[Reveal, str]:
        """What to say to the swarm's challenge, and the code to show.

        Raises:
            WireError: the swarm shows this PC its own key.
        """
        if challenge.public_key == self.commitment.public_key:
            raise WireError("the other side shows this PC's own key as its own")
        return Reveal(nonce=self._nonce), short_code(self.commitment, challenge, self._nonce)


def make_commitment(public_key: str, nonce: bytes) -> bytes:
    """What binds a PC to a nonce without showing it."""
    data = public_key.encode("ascii") + nonce
    return hashlib.blake2b(data, digest_size=32, person=b"molink-commit").digest()


def short_code(commitment: Commitment, challenge: Challenge, nonce: bytes) -> str:
    """The code of a knock, such as ``4827-1931``: a hash over all that was said."""
    whole = msgspec.msgpack.encode((commitment, challenge, nonce))
    digest = hashlib.blake2b(whole, digest_size=16, person=b"molink-code").digest()
    digits = f"{int.from_bytes(digest, 'big') % 10**CODE_DIGITS:0{CODE_DIGITS}d}"
    return f"{digits[:4]}-{digits[4:]}"


def normalize_code(text: str) -> str | None:
    """A code as a person types it, in the form of :func:`short_code`; ``None`` if it is none."""
    digits = "".join(text.split()).replace("-", "")
    if len(digits) != CODE_DIGITS or not (digits.isascii() and digits.isdigit()):
        return None
    return f"{digits[:4]}-{digits[4:]}"
