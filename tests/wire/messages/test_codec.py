import contextlib
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.errors import MessageTooLarge, WireError
from molink.wire.messages.base import Coding, Payload
from molink.wire.messages.codec import MAX_PAYLOAD, Codec, DataMessage, control_codec, data_codec
from molink.wire.messages.control_plane import ControlMessage, DoneReply
from molink.wire.messages.data_plane import (
    Channel,
    Frame,
    History,
    RequestSlice,
    RingMessage,
    Volume,
    VolumeFragment,
)
from molink.wire.messages.instructions import Welcome
from molink.wire.messages.serving import Cancel, PromptFragment
from molink.wire.messages.transfer import ReadReply

CODECS: list[tuple[Codec[Any], Any]] = [
    (data_codec(), DataMessage),
    (control_codec(), ControlMessage),
    (Codec(RingMessage), RingMessage),
]


def fitted(message: msgspec.Struct) -> tuple[msgspec.Struct, bytes | None]:
    """The message with a payload header of moderate size, and its payload."""
    body = getattr(message, "body", message)
    payload = getattr(body, "payload", None)
    if payload is None:
        return message, None
    payload = Payload(payload.dtype, tuple(extent % 64 for extent in payload.shape))
    body = msgspec.structs.replace(body, payload=payload)
    whole = msgspec.structs.replace(message, body=body) if hasattr(message, "body") else body
    return whole, bytes(payload.nbytes)


@pytest.mark.parametrize(("codec", "union"), CODECS, ids=["data", "control", "ring"])
def test_every_message_round_trips(messages: Any, codec: Codec[Any], union: Any) -> None:
    for _, strategy in messages(union):

        @settings(max_examples=20, deadline=None)
        @given(strategy)
        def survives(drawn: msgspec.Struct) -> None:
            message, payload = fitted(drawn)
            try:
                frames = codec.encode(message, payload)
            except MessageTooLarge:
                return
            decoded, carried = codec.decode([bytes(frame) for frame in frames])
            assert decoded == message
            assert carried == payload

        survives()


@pytest.mark.parametrize(("codec", "union"), CODECS, ids=["data", "control", "ring"])
def test_arbitrary_bytes_raise_nothing_but_wire_errors(codec: Codec[Any], union: Any) -> None:
    tags = [each.__struct_config__.tag for each in union.__args__]
    lead = st.sampled_from([msgspec.msgpack.encode(tag) for tag in tags])
    tagged = st.tuples(st.integers(0x80, 0x9F), st.just(b"\xa4type"), lead, st.binary()).map(
        lambda t: bytes([t[0]]) + (t[1] if t[0] < 0x90 else b"") + t[2] + t[3]
    )
    frames = st.lists(st.binary(max_size=200) | tagged, max_size=4)

    @settings(max_examples=400, deadline=None)
    @given(frames)
    def holds(parts: list[bytes]) -> None:
        with contextlib.suppress(WireError):
            codec.decode(parts)

    holds()


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x91" * 4000,
        b"\x82\xa4type\xa4done\xa1z" + b"\x91" * 4000,
        b"\x82\xa4type\xa4done\xa3ref\xc3",
        b"\x92\xa6cancel\xa2\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ],
)
def test_hostile_headers(header: bytes) -> None:
    for codec, _ in CODECS:
        with pytest.raises(WireError):
            codec.decode([header])


def test_sizes_are_bounded() -> None:
    codec = data_codec()
    with pytest.raises(MessageTooLarge, match="header"):
        codec.encode(Cancel("k" * 5000))
    with pytest.raises(MessageTooLarge, match="header"):
        codec.decode([bytes(5000)])
    over = MAX_PAYLOAD + 1
    message = PromptFragment("k", 0, Payload("u8", (over,)))
    with pytest.raises(MessageTooLarge, match="payload"):
        codec.encode(message, bytes(over))
    header = msgspec.msgpack.encode(message)
    with pytest.raises(MessageTooLarge, match="payload"):
        codec.decode([header, bytes(over)])


def test_the_payload_is_what_the_header_says() -> None:
    codec = data_codec()
    message = Frame(1, Channel.BULK, 0, Volume(1, True, (), Payload("bf16", (3, 5))))
    frames = codec.encode(message, bytes(30))
    assert len(frames) == 2
    for wrong in (None, bytes(29), bytes(31), b""):
        with pytest.raises(WireError):
            codec.encode(message, wrong)
    huge = PromptFragment("k", 0, Payload("f32", (2**31 - 1, 2**31 - 1)))
    with pytest.raises(WireError):
        codec.decode([msgspec.msgpack.encode(huge), b""])
    with pytest.raises(WireError, match="announce"):
        codec.encode(Cancel("k"), b"x")
    with pytest.raises(WireError, match="one or two frames"):
        codec.decode([b"", b"", b""])


SLICES = (RequestSlice(1, 0, 3, 0),)


def packed(shape: tuple[int, ...], coded: int, coding: Coding = Coding.LOSSLESS) -> Payload:
    return Payload("bf16", shape, coding, coded)


def test_rows_of_volumes_may_be_packed() -> None:
    codec = data_codec()
    payload = packed((3, 5), 29)
    assert (payload.nbytes, payload.wire_bytes) == (30, 29)
    for body in (Volume(1, True, SLICES, payload), VolumeFragment(1, 4, payload)):
        message = Frame(1, Channel.BULK, 0, body)
        frames = [bytes(frame) for frame in codec.encode(message, bytes(29))]
        assert ["bf16", [3, 5], 1, 29] in msgspec.msgpack.decode(frames[0])[4]
        for wrong in (28, 30):
            with pytest.raises(WireError, match="expected 29"):
                codec.encode(message, bytes(wrong))
            with pytest.raises(WireError, match="expected 29"):
                codec.decode([frames[0], bytes(wrong)])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (Volume(1, True, SLICES, packed((3, 5), 30)), "not smaller"),
        (Volume(1, True, SLICES, packed((0, 5), 0)), "not smaller"),
        (VolumeFragment(1, 0, packed((3, 5), 29, Coding.PLAIN)), "not 30|packed"),
        (VolumeFragment(1, 0, packed((3, 5), 30, Coding.PLAIN)), "packed"),
        (VolumeFragment(1, 0, packed((1, MAX_PAYLOAD // 2 + 1), 9)), "unpacks to over"),
        (VolumeFragment(1, 0, packed((2**31 - 1, 2**31 - 1), 9, Coding.INT8)), "unpacks to over"),
        (History(1, 0, 0, Payload("i32", (8,), Coding.LOSSLESS, 9)), "can't be packed"),
    ],
)
def test_nothing_else_may_be_packed(body: Any, why: str) -> None:
    codec = data_codec()
    message = Frame(1, Channel.BULK, 0, body)
    frame = bytes(body.payload.wire_bytes)
    with pytest.raises(WireError, match=why):
        codec.encode(message, frame)
    with pytest.raises(WireError, match=why):
        codec.decode([msgspec.msgpack.encode(message), frame])


def test_a_prompt_is_never_packed() -> None:
    message = PromptFragment("k", 0, Payload("u8", (64,), Coding.LOSSLESS, 9))
    with pytest.raises(WireError, match="can't be packed"):
        data_codec().decode([msgspec.msgpack.encode(message), bytes(9)])


def test_plain_payload_header_stays_small() -> None:
    encoded = msgspec.msgpack.encode(Payload("bf16", (3, 5)))
    assert encoded[1:] == msgspec.msgpack.encode(["bf16", [3, 5]])[1:] + b"\0\0"
    older = msgspec.msgpack.encode(["bf16", [3, 5]])
    assert msgspec.msgpack.decode(older, type=Payload) == Payload("bf16", (3, 5))


def test_a_payload_is_a_view_of_any_buffer() -> None:
    codec = control_codec()
    for data in (b"abcd", bytearray(b"abcd"), memoryview(b"abcd").cast("I")):
        frames = codec.encode(ReadReply(ref=1, payload=Payload("u8", (4,))), data)
        decoded, payload = codec.decode([bytes(frame) for frame in frames])
        assert isinstance(decoded, ReadReply)
        assert payload is not None
        assert bytes(payload) == b"abcd"


def test_not_a_number_stays_out_of_bounded_fields() -> None:
    codec = data_codec()
    header = msgspec.msgpack.encode(
        ["submit", "p", 1, "k", 1, 1, 1, [math.nan, 1.0, 0, 0.0, 0, 1.0, 0.0, 0.0, -1, []], [], 1]
    )
    with pytest.raises(WireError):
        codec.decode([header])


def test_message_unions_are_disjoint() -> None:
    with pytest.raises(WireError):
        data_codec().decode([bytes(control_codec().encode(DoneReply(ref=1))[0])])
    with pytest.raises(WireError):
        data_codec().decode([bytes(control_codec().encode(Welcome(swarm="s", peer="p"))[0])])
