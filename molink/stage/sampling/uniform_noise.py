"""The randomness of sampling: a pure function of (seed, position), the same on every device."""

import struct
from hashlib import blake2b

_KEY = struct.Struct("<QQ")
_BITS = 52


def uniform_noise(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at ``position`` of a request with ``seed``.

    It has 52 bits, so that its product with a sum of probabilities stays below that sum.
    """
    digest = blake2b(_KEY.pack(seed, position), digest_size=8, person=b"molink-noise").digest()
    return (int.from_bytes(digest, "little") >> (64 - _BITS)) / float(1 << _BITS)
