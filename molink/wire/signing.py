"""Signatures of peers (Ed25519), made with a key that is derived from their CURVE key.

A signature is bound to a purpose, so that one made for a lease is void for a membership entry.
"""

import hashlib

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

#: Bytes of a signature, and of a verify key.
SIGNATURE_BYTES = 64
VERIFY_KEY_BYTES = 32


class Signer:
    """Signs for the holder of a CURVE secret key."""

    def __init__(self, secret: str) -> None:
        """``secret``: the CURVE key, Z85."""
        seed = hashlib.blake2b(secret.encode("ascii"), digest_size=32, person=b"molink-sign")
        self._key = SigningKey(seed.digest())
        #: The public half, ``u8 [32]``.
        self.verify_key = bytes(self._key.verify_key)

    def sign(self, purpose: bytes, data: bytes) -> bytes:
        """Sign ``data`` for ``purpose``; returns ``u8 [64]``."""
        return self._key.sign(_bind_purpose(purpose, data)).signature


def is_signed_by(verify_key: bytes, purpose: bytes, data: bytes, signature: bytes) -> bool:
    """Whether ``signature`` was made for ``purpose`` by the holder of ``verify_key``.

    A key or a signature of another length is never valid.
    """
    if len(verify_key) != VERIFY_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        VerifyKey(verify_key).verify(_bind_purpose(purpose, data), signature)
    except BadSignatureError:
        return False
    return True


def _bind_purpose(purpose: bytes, data: bytes) -> bytes:
    return b"molink\0" + purpose + b"\0" + data
