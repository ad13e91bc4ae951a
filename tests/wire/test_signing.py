"""Signatures: whose they are, for what, and of which bytes."""

import pytest

from molink.wire.signing import Signer, is_signed_by
from molink.wire.sockets.key_pair import KeyPair

KEYS = KeyPair.generate()


def test_a_signature_is_valid_for_its_key_purpose_and_data_only() -> None:
    signer, other = Signer(KEYS.secret), Signer(KeyPair.generate().secret)
    made = signer.sign(b"lease", b"data")
    assert is_signed_by(signer.verify_key, b"lease", b"data", made)
    assert not is_signed_by(other.verify_key, b"lease", b"data", made)
    assert not is_signed_by(signer.verify_key, b"membership", b"data", made)
    assert not is_signed_by(signer.verify_key, b"lease", b"datb", made)


def test_the_key_is_the_same_after_a_restart() -> None:
    assert Signer(KEYS.secret).verify_key == Signer(KEYS.secret).verify_key


@pytest.mark.parametrize("key", [b"", b"\0" * 32, b"\xff" * 32, b"a" * 31])
@pytest.mark.parametrize("signature", [b"", b"\0" * 64, b"\xff" * 64, b"a" * 65])
def test_garbage_is_no_signature(key: bytes, signature: bytes) -> None:
    assert not is_signed_by(key, b"lease", b"data", signature)
    assert not is_signed_by(Signer(KEYS.secret).verify_key, b"lease", b"data", signature)
