"""The join token: one word to paste, with everything a PC needs to become a member.

It holds the coordinator's addresses and public key, the secret key of an invitation, which lets a
PC send a single message to the coordinator, a few contact points that know where the coordinator
runs by then, and the rendezvous at which all of them can be called. Text form: ``molink-`` and
base64url of a checksum, a version byte and a msgpack array.
"""

import base64
import binascii
import hashlib
import re
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from molink.errors import TokenError
from molink.facts.scalars import Addresses, Count, Text
from molink.wire.messages.base import PublicKey
from molink.wire.messages.rendezvous import RendezvousAddress, is_place
from molink.wire.signing import Signer

TOKEN_PREFIX = "molink-"
_VERSION = 2
#: Bytes of the checksum, which detects incomplete copies.
_CHECKSUM_BYTES = 4
#: Maximum characters, several times the longest valid token.
_MAX_LENGTH = 2048
_ALPHABET = re.compile(r"[A-Za-z0-9_-]*\Z")


class ContactPoint(msgspec.Struct, frozen=True, array_like=True):
    """The control socket of a member, which knows where the coordinator runs."""

    public_key: PublicKey
    addresses: Annotated[Addresses, msgspec.Meta(min_length=1)]


class JoinToken(msgspec.Struct, frozen=True, array_like=True, repr_omit_defaults=True):
    """A parsed join token. ``addresses`` are ``host:port``; ``expires`` is unix time, 0 = never.

    ``secret_key`` is the seed of the invitation's keys. ``leader`` is the peer to call at the
    rendezvous.
    """

    swarm: Text
    addresses: Annotated[Addresses, msgspec.Meta(min_length=1)]
    coordinator_key: PublicKey
    secret_key: PublicKey
    expires: Count = 0
    contact_points: Annotated[tuple[ContactPoint, ...], msgspec.Meta(max_length=4)] = ()
    rendezvous: Text = ""
    leader: Text = ""

    def __str__(self) -> str:
        body = bytes([_VERSION]) + msgspec.msgpack.encode(self)
        raw = _checksum(body) + body
        return TOKEN_PREFIX + base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")

    def __repr__(self) -> str:
        return f"JoinToken(swarm={self.swarm!r}, addresses={self.addresses!r})"

    @classmethod
    def parse(cls, text: str, now: float) -> "JoinToken":
        """Parse a pasted token; white space inside is ignored.

        Raises:
            TokenError: it is malformed or, at unix time ``now``, expired; the message says which.
        """
        token = _decode(_unpack("".join(text.split())))
        if token.expires and token.expires <= now:
            raise TokenError(
                f"this join token expired on {_format_expiry(token.expires)}. `molink invite` on "
                "a PC of the swarm prints another. If this PC has joined before, run `molink "
                "join` without a token"
            )
        return token


def _unpack(text: str) -> bytes:
    if not text.startswith(TOKEN_PREFIX):
        raise _malformed_token(f"it doesn't begin with `{TOKEN_PREFIX}`")
    if len(text) > _MAX_LENGTH:
        raise _malformed_token("it is too long")
    encoded = text.removeprefix(TOKEN_PREFIX)
    if not _ALPHABET.match(encoded):
        raise _malformed_token("a character in it doesn't belong there")
    try:
        # A missing character may leave a length that is invalid in base64.
        return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    except binascii.Error:
        raise _malformed_token("a character is missing") from None


def _decode(raw: bytes) -> JoinToken:
    body = raw[_CHECKSUM_BYTES:]
    if not body or raw[:_CHECKSUM_BYTES] != _checksum(body):
        raise _malformed_token("it was cut off or mistyped (its checksum is wrong)")
    if body[0] != _VERSION:
        raise _malformed_token(f"it is of version {body[0]}, this molink knows version {_VERSION}")
    try:
        token = msgspec.msgpack.decode(body[1:], type=JoinToken)
        Signer(token.secret_key)
        if token.rendezvous:
            RendezvousAddress.parse(token.rendezvous)
        points = [one for point in token.contact_points for one in point.addresses]
        if not all(map(is_place, (*token.addresses, *points))):
            raise ValueError("an address in it is not HOST:PORT")
    except ValueError as error:  # also msgspec's, of invalid UTF-8, and of a seed that is no key
        raise _malformed_token(str(error)) from None
    return token


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()


def _malformed_token(why: str) -> TokenError:
    return TokenError(f"this is not a valid join token: {why}. Copy it again, whole")


def _format_expiry(expires: int) -> str:
    try:
        return datetime.fromtimestamp(expires, UTC).strftime("%Y-%m-%d at %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return f"unix time {expires}"
