import base64

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from molink.errors import TokenError
from molink.swarm.membership import join_token as token_module
from molink.swarm.membership.join_token import JoinToken
from molink.wire.sockets.key_pair import KeyPair

MEET = "c2VjcmV0IG9mIDE2IGJ5dA@meet.example:5464"
SERVER, INVITATION = KeyPair.generate(), KeyPair.generate()


def token(expires: int = 0) -> JoinToken:
    return JoinToken(
        "0123456789abcdef",
        ("192.168.1.10:5466", "10.0.0.2:5466"),
        SERVER.public,
        INVITATION.seed,
        expires,
    )


def test_token_round_trips() -> None:
    text = str(token(expires=2_000))
    assert JoinToken.parse(text, now=1_999.5) == token(expires=2_000)
    assert JoinToken.parse(f"  {text[:30]}\n {text[30:]}\r\n", now=0) == token(expires=2_000)
    assert len(text) < 250


def test_repr_hides_the_secret() -> None:
    met = msgspec.structs.replace(token(), rendezvous=MEET)
    assert INVITATION.seed not in repr(met)
    assert MEET not in repr(met)


def test_a_rendezvous_is_checked() -> None:
    met = msgspec.structs.replace(token(), rendezvous=MEET, leader="0123456789abcdef")
    assert JoinToken.parse(str(met), now=0) == met
    for wrong in ("meet.example:5464", "x@y", MEET + "\n", MEET + ":5464"):
        text = str(msgspec.structs.replace(met, rendezvous=wrong))
        with pytest.raises(TokenError, match="not a valid join token"):
            JoinToken.parse(text, now=0)


def test_expired_token_says_when() -> None:
    with pytest.raises(TokenError, match=r"expired on 2001-09-09 at 01:46 UTC") as caught:
        JoinToken.parse(str(token(expires=1_000_000_000)), now=1_000_000_000)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "doesn't begin"),
        ("hello", "doesn't begin"),
        ("molink-", "cut off"),
        ("molink-!!!", "belong"),
        ("molink-" + "A" * 5000, "too long"),
        ("molink-/wAA", "belong"),
        ("molink-" + "A" * 41, "missing"),
        ("molink-_wAAAAAA", "mistyped"),
    ],
)
def test_malformed_token_says_why(text: str, why: str) -> None:
    with pytest.raises(TokenError, match=why) as caught:
        JoinToken.parse(text, now=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", ["#" * 40, '"' * 40])
def test_token_without_a_key_is_malformed(seed: str) -> None:
    """A token made by hand, whose checksum is right."""
    text = str(msgspec.structs.replace(token(), secret_key=seed))
    with pytest.raises(TokenError, match="not a valid join token"):
        JoinToken.parse(text, now=0)


@pytest.mark.parametrize("address", ["x", "*:*", "a.lan:99999", "a.lan:0", "a b:1", "fe80::1"])
def test_token_with_an_impossible_address_is_malformed(address: str) -> None:
    text = str(msgspec.structs.replace(token(), addresses=("a.lan:5466", address)))
    with pytest.raises(TokenError, match="an address in it is not HOST:PORT") as caught:
        JoinToken.parse(text, now=0)
    assert "\n" not in str(caught.value)


@given(st.data())
def test_any_typo_is_detected(data: st.DataObject) -> None:
    text = str(token())
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(text[at].__ne__))
    try:
        parsed = JoinToken.parse(text[:at] + other + text[at + 1 :], now=0)
    except TokenError:
        return
    # The last base64 character has unused bits.
    assert at == len(text) - 1
    assert parsed == token()


@given(st.integers(0, 400))
def test_any_truncation_is_detected(length: int) -> None:
    text = str(token())
    if length < len(text):
        with pytest.raises(TokenError):
            JoinToken.parse(text[:length], now=0)


@given(st.binary(max_size=300), st.sampled_from([1, 2]))
@example(b"\x94\xa7\0\0\0\0\0\0\x80", 2)
def test_hostile_bodies_raise_token_errors(body: bytes, version: int) -> None:
    raw = token_module._checksum(bytes([version]) + body) + bytes([version]) + body
    text = "molink-" + base64.urlsafe_b64encode(raw).decode().rstrip("=")
    with pytest.raises(TokenError, match="version 1" if version == 1 else "not a valid"):
        JoinToken.parse(text, now=0)
