"""CURVE keys: a peer's identity."""

import hashlib
from dataclasses import dataclass

import zmq


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85 (40 characters each). ``secret`` never leaves its PC."""

    public: str
    secret: str

    @classmethod
    def generate(cls) -> "KeyPair":
        """A fresh pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode("ascii"), secret.decode("ascii"))

    @classmethod
    def from_secret(cls, secret: str) -> "KeyPair":
        """The pair that belongs to a secret key."""
        return cls(zmq.curve_public(secret.encode("ascii")).decode("ascii"), secret)

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def peer_id(public_key: str) -> str:
    """A peer's id: 16 hexadecimal digits derived from its public key."""
    return hashlib.blake2b(public_key.encode("ascii"), digest_size=8).hexdigest()
