"""Pairing frames are bounded, and each direction has its own messages."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.errors import WireError
from molink.wire.messages.pairing import (
    LENGTH_BYTES,
    MAX_FRAME,
    Challenge,
    Commitment,
    PairingClientMessage,
    PairingResult,
    PairingServerMessage,
    Reveal,
    decode_frame,
    encode_frame,
    parse_frame_length,
)

KEY = "\\" * 40
MESSAGES = [
    Commitment(public_key=KEY, name="é" * 64, version="v" * 64, commitment=bytes(32)),
    Reveal(nonce=bytes(32)),
    Challenge(swarm="a" * 64, name="n" * 64, public_key=KEY, nonce=bytes(32)),
    PairingResult(outcome="admitted", port=65535, addresses=("a" * 64,) * 6),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: PairingClientMessage | PairingServerMessage) -> None:
    frame = encode_frame(message)
    body = frame[LENGTH_BYTES:]
    assert parse_frame_length(frame[:LENGTH_BYTES]) == len(body) <= MAX_FRAME
    own, other = PairingClientMessage, PairingServerMessage
    if isinstance(message, PairingServerMessage):
        own, other = other, own
    assert decode_frame(body, own) == message
    with pytest.raises(WireError):
        decode_frame(body, other)


def test_pairing_frames_are_bounded() -> None:
    for length in (0, MAX_FRAME + 1, 0xFFFF):
        with pytest.raises(WireError, match="a frame of"):
            parse_frame_length(length.to_bytes(2, "big"))
    too_many = PairingResult(outcome="admitted", addresses=("a" * 64,) * 20)
    with pytest.raises(WireError, match="over"):
        encode_frame(too_many)


@given(st.binary(max_size=MAX_FRAME))
def test_any_pairing_bytes_decode_or_raise(body: bytes) -> None:
    with contextlib.suppress(WireError):
        decode_frame(body, PairingClientMessage)
