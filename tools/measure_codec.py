"""Time to encode and to decode the header of a 64-row decode volume, by two libraries.

``msgspec`` as molink uses it, against ``msgpack`` with the fields checked and the dataclasses built
by hand. ``msgpack`` is no dependency of molink: ``pip install msgpack`` first.
"""

import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from molink.wire.messages.base import Payload
from molink.wire.messages.codec import DataMessage
from molink.wire.messages.data_plane import Channel, Frame, RequestSlice, Volume

ROWS = 64
LOOPS = 2000
REPEATS = 7


@dataclass(frozen=True, slots=True)
class PlainPayload:
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlainRows:
    request: int
    start: int
    count: int
    after: int
    blocks: tuple[int, ...]
    sample: bool


@dataclass(frozen=True, slots=True)
class PlainVolume:
    tick: int
    prefill: bool
    rows: tuple[PlainRows, ...]
    payload: PlainPayload


@dataclass(frozen=True, slots=True)
class PlainFrame:
    epoch: int
    lane: int
    seq: int
    body: PlainVolume


def index(value: object, limit: int = 2**31) -> int:
    """The value, if it is an integer in range."""
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r} is out of range")
    return value


def flag(value: object) -> bool:
    """The value, if it is a bool."""
    if type(value) is not bool:
        raise ValueError(f"{value!r} is no bool")
    return value


def build(data: Any) -> PlainFrame:
    """Check what ``msgpack`` decoded and make it a frame; the same checks as ``msgspec``'s."""
    kind, epoch, lane, seq, (inner, tick, prefill, rows, (dtype, shape)) = data
    if kind != "frame" or inner != "volume" or lane not in (0, 1) or not 1 <= len(rows) <= 128:
        raise ValueError("not a volume")
    if dtype not in ("u8", "i32", "f32", "f16", "bf16") or not 1 <= len(shape) <= 2:
        raise ValueError("not a payload")
    groups = tuple(
        PlainRows(
            index(request),
            index(start, 2**53),
            index(count, 65537),
            index(after, 2**53),
            tuple(index(block) for block in blocks),
            flag(sample),
        )
        for request, start, count, after, blocks, sample in rows
    )
    payload = PlainPayload(dtype, tuple(index(extent) for extent in shape))
    body = PlainVolume(index(tick, 2**53), flag(prefill), groups, payload)
    return PlainFrame(index(epoch, 2**53), lane, index(seq, 2**53), body)


def flatten(frame: PlainFrame) -> list[Any]:
    """The frame as ``msgpack`` takes it."""
    body = frame.body
    rows = [[r.request, r.start, r.count, r.after, r.blocks, r.sample] for r in body.rows]
    payload = [body.payload.dtype, body.payload.shape]
    volume = ["volume", body.tick, body.prefill, rows, payload]
    return ["frame", frame.epoch, frame.lane, frame.seq, volume]


def microseconds(work: Callable[[], object]) -> float:
    """Median time of one call."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(LOOPS):
            work()
        times.append((time.perf_counter() - start) / LOOPS)
    return round(statistics.median(times) * 1e6, 1)


def main() -> None:
    msgpack = importlib.import_module("msgpack")
    rows = tuple(
        RequestSlice(
            request=i, start=900 + i, count=1, after_seq=70_000 + i, blocks=(), sample=True
        )
        for i in range(ROWS)
    )
    payload = Payload("bf16", (ROWS, 4096))
    frame = Frame(3, Channel.DECODE, 123_456, Volume(70_100, False, rows, payload))
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(DataMessage)
    header = encoder.encode(frame)

    plain = build(msgspec.msgpack.decode(header))
    body = msgpack.packb(flatten(plain))
    assert build(msgpack.unpackb(body)) == plain
    result = {
        "header_bytes": len(header),
        "msgspec_encode_us": microseconds(lambda: encoder.encode(frame)),
        "msgspec_decode_us": microseconds(lambda: decoder.decode(header)),
        "msgpack_encode_us": microseconds(lambda: msgpack.packb(flatten(plain))),
        "msgpack_decode_us": microseconds(lambda: build(msgpack.unpackb(body))),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
