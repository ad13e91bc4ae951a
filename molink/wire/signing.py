"""Peers' Ed25519 signatures, and the CURVE keys that belong to their keys.

A peer's identity is one random seed. Its Ed25519 key signs; its CURVE key is the same point in
Montgomery form (RFC 7748, section 4.1). So the public key with which a peer connects can be derived
from the key that verifies its signatures. Keys and seeds are text in Z85 (40 characters).

A signature is bound to a purpose, so that a lease's signature is invalid for a membership entry.
"""

import base64
from functools import lru_cache

from nacl.exceptions import CryptoError
from nacl.signing import SigningKey, VerifyKey

#: Bytes of a signature.
SIGNATURE_BYTES = 64

_RFC_1924 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_TO_Z85 = str.maketrans(_RFC_1924, _Z85)
_FROM_Z85 = str.maketrans(_Z85, _RFC_1924)


class Signer:
    """Signs for the holder of a seed."""

    def __init__(self, seed: str) -> None:
        """Raises ValueError if ``seed`` is not 32 bytes in Z85."""
        self._key = SigningKey(_decode_key(seed))
        #: The public half, in Z85.
        self.verify_key = _encode_key(bytes(self._key.verify_key))

    def sign(self, purpose: bytes, data: bytes) -> bytes:
        """Sign ``data`` for ``purpose``; returns ``u8 [64]``."""
        return self._key.sign(_bind_purpose(purpose, data)).signature


def is_signed_by(verify_key: str, purpose: bytes, data: bytes, signature: bytes) -> bool:
    """Whether ``signature`` was made for ``purpose`` by the holder of ``verify_key``.

    False for an invalid key, and for a signature of another length.
    """
    if len(signature) != SIGNATURE_BYTES:
        return False
    try:
        VerifyKey(_decode_key(verify_key)).verify(_bind_purpose(purpose, data), signature)
    except (CryptoError, ValueError):
        return False
    return True


def generate_seed() -> str:
    """Return a new random seed."""
    return _encode_key(bytes(SigningKey.generate()))


def derive_curve_secret(seed: str) -> str:
    """Derive the CURVE secret key of a seed.

    Raises:
        ValueError: it is not 32 bytes in Z85.
    """
    return _encode_key(bytes(SigningKey(_decode_key(seed)).to_curve25519_private_key()))


@lru_cache(maxsize=4096)
def derive_public_key(verify_key: str) -> str:
    """Derive the CURVE public key that belongs to a verify key.

    Raises:
        ValueError: it is not a valid key.
    """
    try:
        return _encode_key(bytes(VerifyKey(_decode_key(verify_key)).to_curve25519_public_key()))
    except (CryptoError, RuntimeError) as error:
        raise ValueError("not an Ed25519 key") from error


def _bind_purpose(purpose: bytes, data: bytes) -> bytes:
    return b"molink\0" + purpose + b"\0" + data


def _encode_key(raw: bytes) -> str:
    return base64.b85encode(raw).decode("ascii").translate(_TO_Z85)


def _decode_key(text: str) -> bytes:
    # Characters outside this alphabet must not pass through unchanged.
    if len(text) != 40 or not set(text) <= set(_Z85):
        raise ValueError("not a key of 32 bytes in Z85")
    return base64.b85decode(text.translate(_FROM_Z85))
