"""A rendezvous: a small public server at which peers behind routers meet.

Peers use the same protocol as with a relay (:mod:`molink.wire.messages.relay`): the rendezvous
sends a nonce, and they prove that they know its secret. A peer *registers* under its own id, which
it proves with a signature by its key, and keeps one connection waiting. When another peer *calls*
it, the rendezvous joins the two connections. Then the caller sends a byte that selects one of the
peer's sockets, and CURVE runs from end to end. Any two peers may also use it as a relay, with an id
and a second secret from the coordinator.
"""

import base64
import hashlib
import re
import secrets
from typing import NamedTuple

from molink.facts.identity import derive_peer_id
from molink.wire.messages.relay import PROOF_BYTES, Claim, compute_proof, is_valid_proof
from molink.wire.signing import SIGNATURE_BYTES, Signer, derive_public_key, is_signed_by

DEFAULT_PORT = 5464
_SECRET_BYTES = 16
#: Number of characters of a verify key.
_KEY_LENGTH = 40
#: Bytes after the proof of a peer that registers: its verify key and its signature.
REGISTRATION_BYTES = _KEY_LENGTH + SIGNATURE_BYTES
#: Connections that a peer may have waiting there, for many callers at once.
MAX_WAITING = 8
#: Answers to a caller: joined with the peer, or no peer is registered under that id.
JOINED, NOBODY = b"\x01", b"\x00"
#: The sockets that a caller may select.
COORDINATOR, CONTROL = b"\x01", b"\x02"

_PURPOSE = b"rendezvous:"
_PEER_ID = re.compile(r"[0-9a-f]{16}")
_SECRET = re.compile(r"[A-Za-z0-9_-]{22}")
_PLACE = re.compile(
    r"(?P<host>[A-Za-z0-9._-]{1,200}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>\d{1,5}))?"
)


class RendezvousAddress(NamedTuple):
    """The address of a rendezvous and the secret that its users share: ``SECRET@HOST:PORT``."""

    secret: bytes
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "RendezvousAddress":
        """Parse ``SECRET@HOST`` or ``SECRET@HOST:PORT``, with an IPv6 address in brackets.

        Raises:
            ValueError: the text has neither form.
        """
        secret, _, place = text.partition("@")
        match = _PLACE.fullmatch(place)
        port = DEFAULT_PORT if match is None else int(match["port"] or DEFAULT_PORT)
        if match is None or not 0 < port < 65536 or _SECRET.fullmatch(secret) is None:
            raise ValueError("a rendezvous is SECRET@HOST:PORT, as `molink rendezvous` prints it")
        return cls(decode_secret(secret), match["host"].strip("[]"), port)

    def __str__(self) -> str:
        return f"{encode_secret(self.secret)}@{self.place}"

    def __repr__(self) -> str:
        return f"RendezvousAddress({self.place!r})"

    @property
    def place(self) -> str:
        """``HOST:PORT``, without the secret."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_place(text: str) -> bool:
    """Whether ``text`` is ``HOST:PORT``, as of a rendezvous."""
    match = _PLACE.fullmatch(text)
    return match is not None and 0 < int(match["port"] or 0) < 65536


def generate_secret() -> bytes:
    """Generate a secret for a new rendezvous."""
    return secrets.token_bytes(_SECRET_BYTES)


def encode_secret(secret: bytes) -> str:
    """Encode a secret as text."""
    return base64.urlsafe_b64encode(secret).rstrip(b"=").decode("ascii")


def decode_secret(text: str) -> bytes:
    """Decode the text from :func:`encode_secret`.

    Raises:
        ValueError: the text is not an encoded secret.
    """
    if _SECRET.fullmatch(text) is None:
        raise ValueError("it holds no secret")
    return base64.urlsafe_b64decode(text + "==")


def derive_session_secret(secret: bytes, claim: Claim, id: int) -> bytes:
    """Derive a session's secret, ``u8 [32]``; its ends prove its knowledge to the rendezvous."""
    kind = b"peer" if claim in ("registers", "calls") else b"route"
    return hashlib.blake2b(
        kind + id.to_bytes(8, "big"), digest_size=32, key=secret, person=b"molink-rdv"
    ).digest()


def session_of_peer(peer: str) -> int:
    """Return the session id of a peer: the peer's id as a number.

    Raises:
        ValueError: ``peer`` is not a peer's id.
    """
    if _PEER_ID.fullmatch(peer) is None:
        raise ValueError(f"{peer!r} is not a peer's id")
    return int(peer, 16)


def compute_registration(signer: Signer, peer: str, secret: bytes, nonce: bytes) -> bytes:
    """Return the answer by which a peer registers; ``secret`` is the rendezvous's."""
    id = session_of_peer(peer)
    shared = derive_session_secret(secret, "registers", id)
    proof = compute_proof(id, "registers", shared, nonce)
    # The signature covers the secret. Otherwise, another rendezvous could forward our nonce to a
    # peer and register that peer here.
    return proof + signer.verify_key.encode("ascii") + signer.sign(_PURPOSE, nonce + shared)


def is_valid_registration(answer: bytes, secret: bytes, nonce: bytes) -> bool:
    """Whether an answer proves knowledge of the rendezvous's secret and of its peer's key."""
    id, body = int.from_bytes(answer[:8], "big"), answer[PROOF_BYTES:]
    shared = derive_session_secret(secret, "registers", id)
    if not is_valid_proof(answer[:PROOF_BYTES], id, "registers", shared, nonce):
        return False
    try:
        verify_key = body[:_KEY_LENGTH].decode("ascii")
        peer = derive_peer_id(derive_public_key(verify_key))
    except ValueError:
        return False
    return session_of_peer(peer) == id and is_signed_by(
        verify_key, _PURPOSE, nonce + shared, body[_KEY_LENGTH:]
    )
