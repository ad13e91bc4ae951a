"""Entries of the membership log: signed statements about members.

Times are unix time in seconds, keys Z85 text. ``docs/decisions/0030-hostile-members.md`` explains
who may sign which statements.
"""

import hashlib
from functools import lru_cache
from typing import Annotated

import msgspec

from molink.errors import StateError
from molink.facts.identity import derive_peer_id
from molink.facts.scalars import Count
from molink.wire.messages.base import PublicKey
from molink.wire.signing import Signer, derive_public_key, is_signed_by

#: Maximum entries of a log.
MAX_ENTRIES = 1024
#: Maximum PCs that one invitation can admit.
MAX_USES = 255
#: Prefix of an invitation's id.
INVITATION_PREFIX = "invite:"
#: Hexadecimal digits of a swarm's id.
SWARM_ID_DIGITS = 16
_MAX_BODY = 8192
_PURPOSE = b"membership:"

Hash = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
PeerId = Annotated[str, msgspec.Meta(min_length=16, max_length=16)]
Name = Annotated[str, msgspec.Meta(max_length=64)]


class Founder(msgspec.Struct, frozen=True, array_like=True):
    """One of the first owners, by its verify key."""

    verify_key: PublicKey
    name: Name


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A statement by the holder of the verify key ``signer``."""

    signer: PublicKey


class FoundingEntry(msgspec.Struct, frozen=True, array_like=True, tag="founding"):
    """The first entry. It needs no signature, since the swarm's id is its hash."""

    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    founders: Annotated[tuple[Founder, ...], msgspec.Meta(min_length=1, max_length=8)]


class InvitationEntry(Entry, frozen=True, array_like=True, tag="invitation"):
    """The holder of the seed of ``verify_key`` may join; ``expires_at`` 0: forever."""

    verify_key: PublicKey
    created_at: float
    expires_at: Count
    max_uses: Annotated[int, msgspec.Meta(ge=1, le=MAX_USES)]


class JoinEntry(Entry, frozen=True, array_like=True, tag="join"):
    """A PC joins by the invitation whose key signs this entry."""

    verify_key: PublicKey
    name: Name
    at: float


class AdmissionEntry(Entry, frozen=True, array_like=True, tag="admission"):
    """A member admits a PC whose code it has compared, or an owner adopts one."""

    verify_key: PublicKey
    name: Name
    at: float


class NameEntry(Entry, frozen=True, array_like=True, tag="name"):
    """A PC changes its name."""

    name: Name
    at: float


class DepartureEntry(Entry, frozen=True, array_like=True, tag="departure"):
    """A PC leaves: its join or admission of that hash has ended."""

    of: Hash


class RevocationEntry(Entry, frozen=True, array_like=True, tag="revocation"):
    """An owner shuts out a peer, and all peers that it admitted, directly or indirectly."""

    peer: PeerId
    at: float


class ReadmissionEntry(Entry, frozen=True, array_like=True, tag="readmission"):
    """An owner ends the revocation of that hash."""

    of: Hash


class InvitationEndEntry(Entry, frozen=True, array_like=True, tag="invitation-end"):
    """An invitation's creator, or an owner, ends it; of its peers, ``kept`` stay."""

    of: Hash
    kept: Annotated[tuple[PeerId, ...], msgspec.Meta(max_length=MAX_USES)]


class OwnershipEntry(Entry, frozen=True, array_like=True, tag="ownership"):
    """An owner makes another member an owner."""

    peer: PeerId


Statement = (
    InvitationEntry
    | JoinEntry
    | AdmissionEntry
    | NameEntry
    | DepartureEntry
    | RevocationEntry
    | ReadmissionEntry
    | InvitationEndEntry
    | OwnershipEntry
)


class SignedEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry as it is stored and sent: its msgpack and the signature, ``u8 [0]`` or ``[64]``."""

    body: Annotated[bytes, msgspec.Meta(max_length=_MAX_BODY)]
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]

    @property
    def hash(self) -> str:
        """Identifies the entry: 32 hexadecimal digits."""
        return hashlib.blake2b(self.body, digest_size=16).hexdigest()

    @property
    def size(self) -> int:
        """Bytes when encoded."""
        return len(self.body) + len(self.signature) + 8

    def decode(self) -> FoundingEntry | Statement:
        """Decode the entry without checking its signer.

        Raises:
            StateError: it is no entry.
        """
        try:
            return msgspec.msgpack.decode(self.body, type=FoundingEntry | Statement)
        except (msgspec.MsgspecError, ValueError) as error:
            raise StateError(f"not an entry of a membership log: {error}") from None


Entries = Annotated[tuple[SignedEntry, ...], msgspec.Meta(max_length=MAX_ENTRIES)]


@lru_cache(maxsize=4096)
def peer_of_key(verify_key: str) -> str:
    """Return the id of the peer that signs with this key.

    Raises:
        ValueError: it is not a valid key.
    """
    return derive_peer_id(derive_public_key(verify_key))


def sign_entry(swarm: str, signer: Signer, entry: Statement) -> SignedEntry:
    """Sign an entry for the swarm with this id."""
    assert entry.signer == signer.verify_key
    body = msgspec.msgpack.encode(entry)
    return SignedEntry(body, signer.sign(_PURPOSE + swarm.encode("ascii"), body))


def check_signature(swarm: str, signed: SignedEntry) -> None:
    """Check that an entry belongs to the swarm with this id and was made by its signer.

    Raises:
        StateError: it doesn't, or it names an invalid key.
    """
    entry = signed.decode()
    if isinstance(entry, FoundingEntry):
        if signed.hash[:SWARM_ID_DIGITS] != swarm:
            raise StateError("this is the founding of another swarm")
        keys = [one.verify_key for one in entry.founders]
    else:
        keys = [entry.signer, getattr(entry, "verify_key", entry.signer)]
        purpose = _PURPOSE + swarm.encode("ascii")
        if not is_signed_by(entry.signer, purpose, signed.body, signed.signature):
            raise StateError(f"the signature of a {type(entry).__name__} is false")
    try:
        for key in keys:
            peer_of_key(key)
    except ValueError as error:
        raise StateError(f"a {type(entry).__name__} names an invalid key") from error
