"""Randomly damaged headers of model files: refused in one line or valid, with little memory."""

import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf  # noqa: F401 - so that its import isn't taken for what a file costs
import pytest

from molink.checkpoint.safetensors_header import read_header
from molink.errors import ModelError
from molink.gguf.gguf_file import read_gguf

#: Replacements of sizes, counts, offsets and types.
_ODD = [0, 1, 7, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
#: Inserted pieces that nest, repeat or end early.
_PIECES = [b"[", b"{", b'"', b"]", b"}", b":", b",", b"\x00", b"\xff", b"1e999", b"-0", b"\\ud800"]
#: Bounds of memory: bytes of Python objects per header byte, and a constant.
_PER_BYTE, _ALWAYS = 40, 1 << 16


def _safetensors() -> bytes:
    spans, at = {}, 0
    for index, shape in enumerate([(4, 8), (8,), (), (0, 3), (2, 3, 4)]):
        nbytes = 4 * (shape[0] if shape else 1) * (shape[1] if len(shape) > 1 else 1)
        nbytes *= shape[2] if len(shape) > 2 else 1
        where = [at, at := at + nbytes]
        spans[f"model.layers.{index}.w"] = {"dtype": "F32", "shape": shape, "data_offsets": where}
    raw = json.dumps({"__metadata__": {"format": "pt"}, **spans}).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(at)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _gguf() -> bytes:
    keys = [
        _text("general.alignment") + struct.pack("<II", 4, 32),
        _text("name") + struct.pack("<I", 8) + _text("a model"),
        _text("words") + struct.pack("<IIQ", 9, 8, 3) + _text("a") + _text("b") + _text(""),
        _text("sizes") + struct.pack("<IIQ4f", 9, 6, 4, 1, 2, 3, 4),
    ]
    tensors = [
        _text(f"blk.{index}.w") + struct.pack("<IQQIQ", 2, 32, 2, kind, offset)
        for index, (kind, offset) in enumerate([(8, 0), (2, 96), (0, 160)])
    ]
    raw = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join([*keys, *tensors])
    return raw + bytes(-len(raw) % 32) + bytes(160 + 256)


def _damaged(chance: random.Random, whole: bytes) -> bytes:
    raw = bytearray(whole)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(raw) + 1)
        match chance.randrange(6):
            case 0:
                raw[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                width = chance.choice((4, 8))
                odd = chance.choice(_ODD) % 2 ** (8 * width)
                raw[at : at + width] = odd.to_bytes(width, "little")
            case 2:
                raw[at:at] = chance.choice(_PIECES) * chance.choice((1, 2, 1000))
            case 3:
                del raw[at : at + chance.choice((1, 8, 100))]
            case 4:
                raw[at:at] = raw[chance.randrange(len(raw) + 1) :][:200]
            case _:
                del raw[at:]
        if not raw:
            break
    return bytes(raw)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [1500, pytest.param(200_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("whole", "read"),
    [
        pytest.param(_safetensors(), read_header, id="safetensors"),
        pytest.param(_gguf(), lambda path: read_gguf(path).tensors, id="gguf"),
    ],
)
def test_damaged_headers(
    tmp_path: Path, whole: bytes, read: Callable[[Path], dict[str, object]], count: int
) -> None:
    chance, path = random.Random(count), tmp_path / "x"
    refused = lines = 0
    path.write_bytes(whole)
    assert len(read(path)) > 2
    tracemalloc.start()
    try:
        for _ in range(count):
            raw = _damaged(chance, whole)
            path.write_bytes(raw)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                for span in read(path).values():
                    assert span.offset >= 0  # type: ignore[attr-defined]
                    assert span.offset + span.nbytes <= len(raw), raw  # type: ignore[attr-defined]
            except ModelError as error:
                refused += 1
                lines += str(error).count("\n")
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak <= _PER_BYTE * len(raw) + _ALWAYS, (peak, raw)
    finally:
        tracemalloc.stop()
    assert refused > count / 4
    assert lines == 0
