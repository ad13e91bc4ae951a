"""Signatures are valid only for their key, their purpose and their exact bytes."""

import pytest
import zmq
from zmq.utils import z85

from molink.wire.signing import Signer, derive_public_key, is_signed_by
from molink.wire.sockets.key_pair import KeyPair

KEYS = KeyPair.generate()


def test_a_signature_is_valid_for_its_key_purpose_and_data_only() -> None:
    signer, other = KEYS.signer, KeyPair.generate().signer
    made = signer.sign(b"lease", b"data")
    assert is_signed_by(signer.verify_key, b"lease", b"data", made)
    assert not is_signed_by(other.verify_key, b"lease", b"data", made)
    assert not is_signed_by(signer.verify_key, b"membership", b"data", made)
    assert not is_signed_by(signer.verify_key, b"lease", b"datb", made)


def test_a_seed_is_one_identity() -> None:
    again = KeyPair.from_seed(KEYS.seed)
    assert (again, again.signer.verify_key) == (KEYS, KEYS.signer.verify_key)


def test_libzmq_derives_the_same_public_key() -> None:
    assert zmq.curve_public(KEYS.secret.encode()).decode() == KEYS.public
    assert derive_public_key(KEYS.signer.verify_key) == KEYS.public
    assert len(z85.decode(KEYS.signer.verify_key.encode())) == 32


@pytest.mark.parametrize("key", ["", "0" * 40, "#" * 40, "~" * 40, "a" * 39, "é" * 40])
@pytest.mark.parametrize("signature", [b"", b"\0" * 64, b"\xff" * 64, b"a" * 65])
def test_garbage_is_no_signature(key: str, signature: bytes) -> None:
    assert not is_signed_by(key, b"lease", b"data", signature)
    assert not is_signed_by(KEYS.signer.verify_key, b"lease", b"data", signature)


@pytest.mark.parametrize("text", ["", "0" * 40, "#" * 40, "~" * 40, "a" * 39])
def test_garbage_is_no_key(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        derive_public_key(text)


@pytest.mark.parametrize("seed", ["", "~" * 40, "a" * 39])
def test_garbage_is_no_seed(seed: str) -> None:
    with pytest.raises(ValueError, match="not a key"):
        Signer(seed)
