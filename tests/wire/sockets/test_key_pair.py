import pytest

from molink.wire.sockets.key_pair import KeyPair, is_public_key


@pytest.mark.parametrize("key", ["", "short", '"' * 40, "#" * 40, "ü" * 40])
def test_public_keys_are_recognized(key: str) -> None:
    assert is_public_key(KeyPair.generate().public)
    assert not is_public_key(key)
