"""Encodes messages as frames: one msgpack header and at most one payload frame.

Input is validated before anything is allocated: the number of frames, both sizes, the type, all
fields, and that the payload has the announced size. Only rows of volumes may be packed. They must
take fewer bytes than plain, and must not exceed a plain message when unpacked.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from molink.errors import MessageTooLarge, WireError
from molink.wire.messages.base import Coding, Payload
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.data_plane import Frame, StageMessage, Volume, VolumeFragment
from molink.wire.messages.serving import ServingMessage

M = TypeVar("M")

#: Maximum bytes of a header; longer data belongs in a payload.
MAX_HEADER = 4096
#: Maximum bytes of a payload; longer messages on a slow link would delay heartbeats beyond their
#: timeout.
MAX_PAYLOAD = 256 * 1024
MAX_FRAMES = 2

#: Types of payloads; ``memoryview(array)`` converts arrays without a copy.
Buffer = bytes | bytearray | memoryview

#: All messages of the data plane: a worker has one socket for stages and daemons.
DataMessage = StageMessage | ServingMessage


class Codec(Generic[M]):
    """Encodes and decodes the messages of one union, such as :data:`DataMessage`."""

    def __init__(self, types: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(types)

    def encode(self, message: M, payload: Buffer | None = None) -> list[Buffer]:
        """Encode ``message`` as a header frame and, if it has one, a payload frame.

        Raises:
            MessageTooLarge: the header exceeds 4 KiB or the payload 256 KiB.
            WireError: ``payload`` doesn't match ``message.payload``.
        """
        header = self._encoder.encode(message)
        name = type(message).__name__
        if len(header) > MAX_HEADER:
            raise MessageTooLarge(f"the header of a {name} is {len(header)} bytes, over 4096")
        _check_payload(message, payload)
        return [header] if payload is None else [header, payload]

    def decode(self, frames: Sequence[Buffer]) -> tuple[M, memoryview | None]:
        """Decode a message and return it with its payload (a view without a copy).

        Raises:
            MessageTooLarge: a frame is too large.
            WireError: the frames are not a message of this codec.
        """
        if not 1 <= len(frames) <= MAX_FRAMES:
            raise WireError(f"a message has one or two frames, not {len(frames)}")
        header = _view(frames[0])
        if header.nbytes > MAX_HEADER:
            raise MessageTooLarge(f"a header of {header.nbytes} bytes is over 4096")
        try:
            message = self._decoder.decode(header)
        except (ValueError, RecursionError) as error:
            raise WireError(f"not a message: {error}") from error
        payload = _view(frames[1]) if len(frames) == MAX_FRAMES else None
        _check_payload(message, payload)
        return message, payload


def data_codec() -> Codec[DataMessage]:
    """The codec of the data plane."""
    return Codec(DataMessage)


def control_codec() -> Codec[ControlMessage]:
    """The codec of the control plane."""
    return Codec(ControlMessage)


def _payload_of(message: object) -> Payload | None:
    return getattr(message, "payload", None)


def _view(frame: Buffer) -> memoryview:
    return memoryview(frame).cast("B")


def _check_payload(message: object, payload: Buffer | None) -> None:
    name, promised = type(message).__name__, _payload_of(message)
    if promised is None or payload is None:
        if promised is None and payload is None:
            return
        which = "lacks its payload" if payload is None else "has an unannounced payload"
        raise WireError(f"a {name} {which}")
    size = memoryview(payload).nbytes
    if size > MAX_PAYLOAD:
        raise MessageTooLarge(f"the payload of a {name} is {size} bytes, over {MAX_PAYLOAD}")
    if size != promised.wire_bytes:
        raise WireError(f"the payload of a {name} is {size} bytes, expected {promised.wire_bytes}")
    if promised.coding is not Coding.PLAIN or promised.coded:
        _check_coding(message, promised)


def _check_coding(message: object, promised: Payload) -> None:
    name = type(message).__name__
    body = message.body if isinstance(message, Frame) else message
    if promised.coding is Coding.PLAIN or not isinstance(body, Volume | VolumeFragment):
        raise WireError(f"the payload of a {name} can't be packed")
    if promised.nbytes > MAX_PAYLOAD:
        raise MessageTooLarge(f"the payload of a {name} unpacks to over {MAX_PAYLOAD} bytes")
    if promised.coded >= promised.nbytes:
        raise WireError(f"the payload of a {name} is not smaller packed")
