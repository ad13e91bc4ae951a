"""CURVE keys, the identities of peers."""

from dataclasses import dataclass

import zmq


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85 (40 characters each). ``secret`` never leaves its PC."""

    public: str
    secret: str

    @classmethod
    def generate(cls) -> "KeyPair":
        """Generate a new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode("ascii"), secret.decode("ascii"))

    @classmethod
    def from_secret(cls, secret: str) -> "KeyPair":
        """The pair of a secret key."""
        return cls(zmq.curve_public(secret.encode("ascii")).decode("ascii"), secret)

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def is_public_key(text: str) -> bool:
    """Whether ``text`` has the length and alphabet of a public key."""
    try:
        zmq.curve_public(text.encode("ascii"))
    except (ValueError, zmq.ZMQError):
        return False
    return True
