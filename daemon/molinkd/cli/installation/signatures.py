"""Checks a release's signature, in the format of minisign.

https://jedisct1.github.io/minisign/ describes it: Ed25519 over BLAKE2b-512 of the file, and over
that signature with the trusted comment.
"""

import base64
import binascii
import hashlib
from importlib import resources

from nacl.exceptions import CryptoError
from nacl.signing import VerifyKey

from molink.errors import MolinkError

#: Of a public key, and of a signature of a file's hash.
_KEY_KIND, _HASHED = b"Ed", b"ED"
#: Bytes of the kind, and of the kind and the id of a key.
_KIND, _HEAD = 2, 10


def read_own_key() -> str:
    """The public key that signs this molink's releases; empty if it was built without one."""
    try:
        path = resources.files("molink") / "data" / "release.key"
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def check_signature(data: bytes, signature: str, key: str) -> None:
    """Check a minisign ``signature`` file of ``data`` against a public ``key`` in base64.

    Raises:
        MolinkError: it is no signature by that key.
    """
    try:
        public = base64.b64decode(key, validate=True)
        _, first, comment, second, *_ = signature.splitlines()
        signed = base64.b64decode(first, validate=True)
        outer = base64.b64decode(second, validate=True)
        if public[:_KIND] != _KEY_KIND or signed[:_KIND] != _HASHED:
            raise ValueError("unknown kind")
        if signed[_KIND:_HEAD] != public[_KIND:_HEAD]:
            raise ValueError("another key")
        verifier = VerifyKey(public[_HEAD:])
        verifier.verify(hashlib.blake2b(data).digest(), signed[_HEAD:])
        trusted = comment.removeprefix("trusted comment: ").encode()
        verifier.verify(signed[_HEAD:] + trusted, outer)
    except (ValueError, TypeError, binascii.Error, CryptoError) as error:
        raise MolinkError(
            "the release is not signed by the key that this molink was released with "
            f"({error}): nothing was installed. Don't trust this server"
        ) from error
