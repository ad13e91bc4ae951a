"""CURVE keys, the identities of peers."""

from dataclasses import dataclass

from molink.wire.signing import Signer, derive_curve_secret, derive_public_key, generate_seed


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85 (40 characters each). ``secret`` and ``seed`` never leave their PC.

    Both keys derive from ``seed``; it is empty for a worker, which signs nothing.
    """

    public: str
    secret: str
    seed: str = ""

    @classmethod
    def generate(cls) -> "KeyPair":
        """Generate a new pair."""
        return cls.from_seed(generate_seed())

    @classmethod
    def from_seed(cls, seed: str) -> "KeyPair":
        """Derive the pair of a seed.

        Raises:
            ValueError: it is not 32 bytes in Z85.
        """
        return cls(derive_public_key(Signer(seed).verify_key), derive_curve_secret(seed), seed)

    @property
    def signer(self) -> Signer:
        """Signs for this identity."""
        return Signer(self.seed)

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def is_public_key(text: str) -> bool:
    """Whether ``text`` has the length and alphabet of a public key."""
    import zmq  # importing zmq is slow, and most commands need no socket

    try:
        zmq.curve_public(text.encode("ascii"))
    except (ValueError, zmq.ZMQError):
        return False
    return True
