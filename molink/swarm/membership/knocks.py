"""Strangers that ask to be let in, and the short code by which a person tells them apart.

A PC without a token *knocks*. Whoever sits in between could offer keys of its own to both sides, so
both show a code that follows from everything they have said, both public keys included; a person
compares the two. The PC commits to a nonce before it sees the swarm's, and shows it after: nobody
in between can try keys until the codes agree, and each attempt has one chance in 10^8 (a *short
authentication string*, as in ZRTP and in Bluetooth's numeric comparison).

:class:`Knocks` is the swarm's side, :class:`Knocker` the PC's. All times are in seconds.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from molink.errors import WireError
from molink.facts.identity import peer_id
from molink.swarm.membership.hygiene import clean_name
from molink.swarm.membership.join_rate import Rate, TokenBucket
from molink.swarm.membership.versions import ours
from molink.wire.messages.porch import (
    Challenge,
    Commitment,
    FromStranger,
    FromSwarm,
    Outcome,
    Reveal,
    Verdict,
)
from molink.wire.protocol import PROTOCOL

#: Digits of a code.
DIGITS = 8
#: Connections at once, in all and of one address.
MAX_VISITORS, MAX_OF_ADDRESS = 32, 4
#: Knocks that wait for a person at once, in all and of one address.
MAX_WAITING, MAX_WAITING_OF_ADDRESS = 8, 3
#: From a connection until its code is known, and from then until nobody has approved it.
TALK_S, WAIT_S = 10.0, 300.0
#: Wrong codes after which those who wait are sent away.
WRONG_CODES = 3
#: Knocks of one address, and in all: each is a chance of 1 in 10^8 to show another's code.
RATE_OF_ADDRESS, RATE = Rate(6, 0.1), Rate(16, 0.5)
#: Addresses whose rate is remembered.
_ADDRESSES = 256


# --- what happens ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """A connection; ``nonce`` are 32 random bytes that nobody has seen."""

    visitor: int
    address: str
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Said:
    """A message of a visitor. ``objection``: why its key can't be let in, where it can't."""

    visitor: int
    message: FromStranger
    objection: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """A visitor's connection has ended."""

    visitor: int


@dataclass(frozen=True, slots=True)
class Judge:
    """A member (``by``) lets the PC that shows ``code`` in, or refuses it."""

    code: str
    by: str
    refuse: bool = False


@dataclass(frozen=True, slots=True)
class Passed:
    """Time has passed."""


Event = Arrived | Said | Gone | Judge | Passed


# --- what is to be done ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to a visitor; after a :class:`Verdict` its connection ends."""

    visitor: int
    message: FromSwarm


@dataclass(frozen=True, slots=True)
class HangUp:
    """End a visitor's connection without a word."""

    visitor: int


@dataclass(frozen=True, slots=True)
class LetIn:
    """Make this key a member on the word of ``by``, then tell the visitor the verdict."""

    visitor: int
    public_key: str
    name: str
    by: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The PC of that name was refused, as asked for."""

    name: str


@dataclass(frozen=True, slots=True)
class Denied:
    """A :class:`Judge` can't be obeyed; says why, for a person."""

    reason: str


@dataclass(frozen=True, slots=True)
class Changed:
    """Those who wait are others than before."""


Decision = Tell | HangUp | LetIn | Refused | Denied | Changed


@dataclass(frozen=True, slots=True)
class Waiting:
    """A PC that waits for a person; ``since`` by the clock of the events."""

    name: str
    code: str
    address: str
    since: float


@dataclass(slots=True)
class _Visitor:
    address: str
    nonce: bytes
    #: ``new`` → ``challenged`` → ``waiting``.
    state: Literal["new", "challenged", "waiting"] = "new"
    #: When it is sent away.
    until: float = 0.0
    since: float = 0.0
    asked: Commitment | None = None
    name: str = ""
    code: str = ""
    wrong: int = field(default=0)


class Knocks:
    """Who stands before the door of a swarm."""

    def __init__(self, swarm: str, name: str, public_key: str, now: float) -> None:
        """``swarm`` is its id, ``public_key`` that of its coordinator."""
        self._swarm, self._name, self._key = swarm, name, public_key
        self._visitors: dict[int, _Visitor] = {}
        self._rate = TokenBucket(RATE, now)
        self._rates: dict[str, TokenBucket] = {}

    def handle(self, event: Event, now: float) -> list[Decision]:
        """What follows from an event at ``now``."""
        decisions = self._overdue(now)
        match event:
            case Arrived():
                decisions += self._arrived(event, now)
            case Said() if event.visitor in self._visitors:
                decisions += self._said(event, now)
            case Gone() if event.visitor in self._visitors:
                decisions += self._forget(event.visitor)
            case Judge():
                decisions += self._judge(event)
        return decisions

    @property
    def waiting(self) -> list[Waiting]:
        """Those who wait for a person, longest first."""
        return [
            Waiting(one.name, one.code, one.address, one.since)
            for one in self._visitors.values()
            if one.state == "waiting"
        ]

    def validate(self) -> None:
        """Check the bounds; for tests."""
        assert len(self._visitors) <= MAX_VISITORS
        assert len(self.waiting) <= MAX_WAITING
        assert len(self._rates) <= _ADDRESSES
        for address in {one.address for one in self._visitors.values()}:
            assert len(self._of(address)) <= MAX_OF_ADDRESS
        for one in self._visitors.values():
            assert bool(one.code) == (one.state == "waiting")
            assert one.wrong < WRONG_CODES

    # --- visitors ----------------------------------------------------------------------------

    def _arrived(self, event: Arrived, now: float) -> list[Decision]:
        full = len(self._visitors) >= MAX_VISITORS
        if full or len(self._of(event.address)) >= MAX_OF_ADDRESS:
            return [HangUp(event.visitor)]
        self._visitors[event.visitor] = _Visitor(event.address, event.nonce, until=now + TALK_S)
        return []

    def _said(self, event: Said, now: float) -> list[Decision]:
        visitor, message = self._visitors[event.visitor], event.message
        if visitor.state == "new" and isinstance(message, Commitment):
            return self._asked(event.visitor, visitor, message, event.objection, now)
        if visitor.state == "challenged" and isinstance(message, Reveal):
            return self._revealed(event.visitor, visitor, message, now)
        return [*self._forget(event.visitor), HangUp(event.visitor)]

    def _asked(
        self,
        number: int,
        visitor: _Visitor,
        message: Commitment,
        objection: Outcome | None,
        now: float,
    ) -> list[Decision]:
        outcome = objection or self._too_many(visitor.address, now)
        if outcome is not None:
            return self._dismiss(number, outcome)
        visitor.state, visitor.asked = "challenged", message
        visitor.name = clean_name(message.name, peer_id(message.public_key))
        return [Tell(number, self._challenge(visitor))]

    def _revealed(
        self, number: int, visitor: _Visitor, message: Reveal, now: float
    ) -> list[Decision]:
        asked = visitor.asked
        assert asked is not None
        if commitment(asked.public_key, message.nonce) != asked.commitment:
            return [*self._forget(number), HangUp(number)]
        of_address = [one for one in self._of(visitor.address) if one.state == "waiting"]
        if len(self.waiting) >= MAX_WAITING or len(of_address) >= MAX_WAITING_OF_ADDRESS:
            return self._dismiss(number, "busy")
        visitor.state, visitor.since, visitor.until = "waiting", now, now + WAIT_S
        visitor.code = short_code(asked, self._challenge(visitor), message.nonce)
        return [Changed()]

    def _challenge(self, visitor: _Visitor) -> Challenge:
        return Challenge(
            swarm=self._swarm, name=self._name, public_key=self._key, nonce=visitor.nonce
        )

    def _overdue(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for number, one in list(self._visitors.items()):
            if one.until > now:
                continue
            if one.state == "waiting":
                decisions += self._dismiss(number, "expired")
            else:
                decisions += [*self._forget(number), HangUp(number)]
        return decisions

    def _dismiss(self, number: int, outcome: Outcome) -> list[Decision]:
        verdict = Verdict(outcome=outcome)
        if outcome == "version":
            speaks = ours()
            verdict = Verdict(outcome=outcome, version=speaks.version, protocol=speaks.protocol)
        return [*self._forget(number), Tell(number, verdict)]

    def _forget(self, number: int) -> list[Decision]:
        return [Changed()] if self._visitors.pop(number).state == "waiting" else []

    def _of(self, address: str) -> list[_Visitor]:
        return [one for one in self._visitors.values() if one.address == address]

    def _too_many(self, address: str, now: float) -> Outcome | None:
        """Take one knock of what this address, and all, may have."""
        own = self._rates.pop(address, None) or TokenBucket(RATE_OF_ADDRESS, now)
        self._rates[address] = own
        if len(self._rates) > _ADDRESSES:
            del self._rates[next(iter(self._rates))]
        if own.wait(now) or self._rate.wait(now):
            return "busy"
        own.take()
        self._rate.take()
        return None

    # --- a person's word ---------------------------------------------------------------------

    def _judge(self, event: Judge) -> list[Decision]:
        code = normal_code(event.code)
        if code is None:
            return [Denied(f"a code has {DIGITS} digits, such as 4827-1931, and this has not")]
        found = [number for number, one in self._visitors.items() if one.code == code]
        if len(found) == 1:
            return self._judged(found[0], event)
        if found:
            # Nobody can tell them apart, and it is no accident.
            sent = [decision for one in found for decision in self._dismiss(one, "refused")]
            return [*sent, Denied(f"{len(found)} PCs show {code}: all were refused; join again")]
        return self._wrong(code)

    def _judged(self, number: int, event: Judge) -> list[Decision]:
        visitor = self._visitors[number]
        if event.refuse:
            return [*self._dismiss(number, "refused"), Refused(visitor.name)]
        assert visitor.asked is not None
        key = visitor.asked.public_key
        return [*self._forget(number), LetIn(number, key, visitor.name, event.by)]

    def _wrong(self, code: str) -> list[Decision]:
        waiting = [number for number, one in self._visitors.items() if one.state == "waiting"]
        if not waiting:
            return [
                Denied(
                    f"no PC that waits shows {code}: it may have waited for too long. Run `molink "
                    "join` there again"
                )
            ]
        decisions: list[Decision] = []
        for number in waiting:
            self._visitors[number].wrong += 1
            if self._visitors[number].wrong >= WRONG_CODES:
                decisions += self._dismiss(number, "refused")
        told = f"no PC that waits shows {code}. Compare it with the code on that PC"
        if decisions:
            told += f"; after {WRONG_CODES} wrong codes it has to run `molink join` again"
        return [*decisions, Denied(told)]


class Knocker:
    """The side of the PC that asks."""

    def __init__(self, public_key: str, name: str, version: str, nonce: bytes) -> None:
        """``nonce`` are 32 random bytes that nobody has seen."""
        self._nonce = nonce
        self.asked = Commitment(
            public_key=public_key,
            name=name[:64],
            version=version[:64],
            commitment=commitment(public_key, nonce),
            protocol=PROTOCOL,
        )

    def answer(self, challenge: Challenge) -> tuple[Reveal, str]:
        """What to say to the swarm's challenge, and the code to show.

        Raises:
            WireError: the swarm shows this PC its own key.
        """
        if challenge.public_key == self.asked.public_key:
            raise WireError("the other side shows this PC's own key as its own")
        return Reveal(nonce=self._nonce), short_code(self.asked, challenge, self._nonce)


def commitment(public_key: str, nonce: bytes) -> bytes:
    """What binds a PC to a nonce without showing it."""
    data = public_key.encode("ascii") + nonce
    return hashlib.blake2b(data, digest_size=32, person=b"molink-commit").digest()


def short_code(asked: Commitment, challenge: Challenge, nonce: bytes) -> str:
    """The code of a knock, such as ``4827-1931``: a hash over all that was said."""
    whole = msgspec.msgpack.encode((asked, challenge, nonce))
    digest = hashlib.blake2b(whole, digest_size=16, person=b"molink-code").digest()
    digits = f"{int.from_bytes(digest, 'big') % 10**DIGITS:0{DIGITS}d}"
    return f"{digits[:4]}-{digits[4:]}"


def normal_code(text: str) -> str | None:
    """A code as a person types it, in the form of :func:`short_code`; ``None`` if it is none."""
    digits = "".join(text.split()).replace("-", "")
    if len(digits) != DIGITS or not (digits.isascii() and digits.isdigit()):
        return None
    return f"{digits[:4]}-{digits[4:]}"
