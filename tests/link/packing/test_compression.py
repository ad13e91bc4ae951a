"""Rows survive the codec; invalid bytes raise errors."""

from itertools import count
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from molink.errors import WireError
from molink.facts.dtypes import DTYPE_SIZES
from molink.link.packing.compression import RowCodec, RowPacker
from molink.link.packing.compressor import Compressor, CompressorLimits
from molink.wire.messages.base import Coding, Payload
from molink.wire.messages.codec import MAX_PAYLOAD

TRAVEL = ["bf16", "f16", "f32"]
FLOATS = {"f16": "<f2", "f32": "<f4"}


@pytest.fixture(scope="module")
def codec() -> RowCodec:
    return RowCodec()


def activations(dtype: str, rows: int = 16, hidden: int = 512, seed: int = 0) -> bytes:
    """Rows like a model's: normally distributed, of several scales."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(rows, hidden)) * np.exp(random.normal(size=(rows, 1)))
    return bits(values.astype(np.float32), dtype)


def bits(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "bf16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype(FLOATS[dtype]).tobytes()


def numbers(data: bytes | memoryview, dtype: str, hidden: int) -> np.ndarray:
    if dtype == "bf16":
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(data, FLOATS[dtype]).astype(np.float32)
    return values.reshape(-1, hidden)


def header(dtype: str, data: bytes, hidden: int) -> Payload:
    return Payload(dtype, (len(data) // hidden // DTYPE_SIZES[dtype], hidden))


def packed(
    codec: RowCodec, dtype: str = "bf16", coding: Coding = Coding.LOSSLESS, hidden: int = 512
) -> tuple[Payload, bytes]:
    data = activations(dtype, hidden=hidden)
    return codec.pack_rows(header(dtype, data, hidden), data, coding)


@pytest.mark.parametrize("dtype", TRAVEL)
def test_every_16_bit_pattern_survives(codec: RowCodec, dtype: str) -> None:
    # Includes NaNs with payloads, infinities, denormals and both zeros.
    words = np.arange(1 << 16, dtype="<u2")
    if dtype == "f32":
        words = words.astype("<u4") << 16 | words[::-1]
    hidden = 256
    for rows in np.split(words, 4):
        # Many equal numbers beside them, so that the rows are packed at all.
        data = rows.tobytes()[: MAX_PAYLOAD // 2] + bytes(rows.nbytes)
        plain = header(dtype, data, hidden)
        coded, frame = codec.pack_rows(plain, data, Coding.LOSSLESS)
        assert coded.coding is Coding.LOSSLESS
        back, out = codec.unpack_rows(coded, frame)
        assert (back, bytes(out)) == (plain, data)


@given(
    dtype=st.sampled_from(TRAVEL),
    hidden=st.integers(1, 40),
    rows=st.lists(st.binary(min_size=4, max_size=4), min_size=1, max_size=80),
    repeat=st.integers(1, 8),
)
def test_any_rows_survive(
    codec: RowCodec, dtype: str, hidden: int, rows: list[bytes], repeat: int
) -> None:
    row = hidden * DTYPE_SIZES[dtype]
    data = b"".join((each * row)[:row] for each in rows) * repeat
    plain = header(dtype, data, hidden)
    coded, frame = codec.pack_rows(plain, data, Coding.LOSSLESS)
    assert memoryview(frame).nbytes == coded.wire_bytes <= plain.nbytes
    assert coded.nbytes == plain.nbytes
    back, out = codec.unpack_rows(coded, frame)
    assert (back, bytes(out)) == (plain, data)


@pytest.mark.parametrize(("dtype", "ratio"), [("bf16", 1.4), ("f16", 1.1), ("f32", 1.15)])
def test_activations_shrink(codec: RowCodec, dtype: str, ratio: float) -> None:
    coded, _ = packed(codec, dtype)
    assert coded.nbytes / coded.coded > ratio


def test_noise_is_sent_plain(codec: RowCodec) -> None:
    data = np.random.default_rng(1).bytes(8192)
    plain = header("bf16", data, 512)
    assert codec.pack_rows(plain, data, Coding.LOSSLESS) == (plain, data)
    assert codec.pack_rows(plain, data, Coding.PLAIN) == (plain, data)
    assert codec.unpack_rows(plain, data) == (plain, data)


@pytest.mark.parametrize(
    "payload",
    [
        Payload("i32", (4, 4)),
        Payload("bf16", (32,)),
        Payload("bf16", (4, 9)),
        Payload("bf16", (4, 8), Coding.LOSSLESS, 50),
    ],
)
def test_only_plain_rows_are_packed(codec: RowCodec, payload: Payload) -> None:
    with pytest.raises(WireError):
        codec.pack_rows(payload, bytes(64), Coding.LOSSLESS)


def test_oversized_rows_are_not_packed(codec: RowCodec) -> None:
    with pytest.raises(WireError, match="over"):
        codec.pack_rows(Payload("bf16", (1, MAX_PAYLOAD)), bytes(2 * MAX_PAYLOAD), Coding.LOSSLESS)


# --- 8 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TRAVEL)
def test_int8_error_is_half_a_step(codec: RowCodec, dtype: str) -> None:
    data = activations(dtype)
    coded, frame = codec.pack_rows(header(dtype, data, 512), data, Coding.INT8)
    assert coded.coded == 16 * (4 + 512)
    before = numbers(data, dtype, 512)
    after = numbers(codec.unpack_rows(coded, frame)[1], dtype, 512)
    scale = np.abs(before).max(axis=1, keepdims=True)
    rounding = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-23}[dtype]
    assert (np.abs(after - before) <= scale / 254 * 1.0001 + np.abs(before) * rounding * 2).all()
    # The largest number of a row is exact.
    np.testing.assert_array_equal(np.abs(after).max(axis=1), scale[:, 0])


@pytest.mark.parametrize("dtype", TRAVEL)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int8_keeps_failed_rows_failed_and_zeros_exact(
    codec: RowCodec, dtype: str, bad: float
) -> None:
    values = np.ones((3, 64), np.float32)
    values[0, 5] = bad
    values[1] = 0
    data = bits(values, dtype)
    after = numbers(
        codec.unpack_rows(*codec.pack_rows(header(dtype, data, 64), data, Coding.INT8))[1],
        dtype,
        64,
    )
    assert np.isnan(after[0]).all()
    np.testing.assert_array_equal(after[1:], values[1:])


@pytest.mark.parametrize("dtype", TRAVEL)
def test_int8_handles_extreme_values(codec: RowCodec, dtype: str) -> None:
    top = np.uint32({"bf16": 0x7F7F0000, "f16": 0x477FE000, "f32": 0x7F7FFFFF}[dtype])
    minimum = np.uint32({"bf16": 0x00010000, "f16": 0x33800000, "f32": 1}[dtype])
    values = np.array([[top] * 8, [minimum] * 8], "<u4").view("<f4")
    data = bits(values, dtype)
    plain = header(dtype, data, 8)
    out = codec.unpack_rows(*codec.pack_rows(plain, data, Coding.INT8))[1]
    np.testing.assert_array_equal(numbers(out, dtype, 8), values)


@given(data=st.binary(min_size=64, max_size=64), dtype=st.sampled_from(TRAVEL))
def test_int8_of_any_bits_is_finite_where_the_row_was(
    codec: RowCodec, data: bytes, dtype: str
) -> None:
    data *= 2
    coded, frame = codec.pack_rows(header(dtype, data, 16), data, Coding.INT8)
    after = numbers(codec.unpack_rows(coded, frame)[1], dtype, 16)
    before = numbers(data, dtype, 16)
    np.testing.assert_array_equal(np.isfinite(before).all(axis=1), np.isfinite(after).all(axis=1))


# --- invalid bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize("coding", [Coding.LOSSLESS, Coding.INT8])
@pytest.mark.parametrize("dtype", TRAVEL)
@given(data=st.data())
def test_any_bytes_decode_or_raise(
    codec: RowCodec, dtype: str, coding: Coding, data: st.DataObject
) -> None:
    coded, frame = packed(codec, dtype, coding, hidden=32)
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(frame)))]
    damaged += data.draw(st.binary(max_size=8))
    shape = data.draw(st.sampled_from([coded.shape, (1, 32), (17, 32), (2**30, 2**30), (1, 1)]))
    told = Payload(dtype, shape, coding, len(damaged))
    try:
        plain, out = codec.unpack_rows(told, bytes(damaged))
    except WireError:
        return
    assert plain == Payload(dtype, shape)
    assert out.nbytes == plain.nbytes <= MAX_PAYLOAD


def frame_of(content: bytes) -> tuple[Payload, bytes]:
    """A frame of 16 x 32 bf16 rows with ``data`` as its zstd part."""
    low = bytes(512)
    return Payload("bf16", (16, 32), Coding.LOSSLESS, 512 + len(content)), low + content


def zstd(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


#: A frame that asks for a window of 2 GB and states no size.
WIDE = b"\x28\xb5\x2f\xfd" + bytes([0x00, 0xA8]) + bytes([0x01, 0x00, 0x00])
#: A single-segment frame that states a size of 2**60 bytes.
HUGE = b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + (2**60).to_bytes(8, "little") + bytes([0x01, 0, 0])


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x28\xb5\x2f\xfd", id="a magic number"),
        pytest.param(bytes(40), id="zeros"),
        pytest.param(zstd(bytes(1 << 24)), id="a bomb"),
        pytest.param(zstd(bytes(511)), id="too little"),
        pytest.param(zstd(bytes(513)), id="too much"),
        pytest.param(zstd(bytes(512), write_content_size=False), id="no size"),
        pytest.param(zstd(bytes(512)) + b"x", id="something after it"),
        pytest.param(zstd(bytes(512)) * 2, id="two frames"),
        pytest.param(zstd(bytes(512))[:-1], id="cut short"),
        pytest.param(WIDE, id="a giant window"),
        pytest.param(HUGE, id="a giant size"),
        pytest.param(b"\x50\x2a\x4d\x18" + (512).to_bytes(4, "little"), id="a frame to be skipped"),
    ],
)
def test_other_frames_are_refused(codec: RowCodec, content: bytes) -> None:
    with pytest.raises(WireError):
        codec.unpack_rows(*frame_of(content))


@pytest.mark.parametrize(
    "payload",
    [
        Payload("i32", (4, 8), Coding.LOSSLESS, 64),
        Payload("u8", (4, 32), Coding.INT8, 64),
        Payload("bf16", (64,), Coding.LOSSLESS, 64),
        Payload("bf16", (8, 4), Coding.LOSSLESS, 64),
        Payload("bf16", (0, 64), Coding.LOSSLESS, 64),
        Payload("bf16", (8, 8), Coding.LOSSLESS, 63),
        Payload("f32", (3, 8), Coding.INT8, 64),
        Payload("f32", (2**31 - 1, 2**31 - 1), Coding.INT8, 64),
        Payload("bf16", (8, 8)),
    ],
)
def test_false_headers_are_rejected(codec: RowCodec, payload: Payload) -> None:
    with pytest.raises(WireError):
        codec.unpack_rows(payload, bytes(64))


ROWS = bytes(range(64)) * 128
PLAIN = Payload("bf16", (16, 256))


def make(setting: str = "lossless", seq: float = 1e-6) -> tuple[RowPacker, Compressor]:
    """A packer whose clock advances by ``seq`` seconds per reading."""
    compressor = Compressor(setting)
    seqs = count()
    return RowPacker(compressor, lambda: next(seqs) * seq), compressor


@pytest.mark.parametrize("bulk", [False, True])
def test_packing_is_measured(bulk: bool) -> None:
    packer, compressor = make()
    header, data = packer.pack_rows(bulk, PLAIN, memoryview(ROWS))
    assert header.coding is Coding.LOSSLESS
    assert header.coded == len(data) < len(ROWS)
    assert bytes(RowCodec().unpack_rows(header, data)[1]) == ROWS
    assert compressor.is_packing(bulk)
    assert compressor.estimate_gain(not bulk) is None
    worth = compressor.estimate_gain(bulk)
    assert worth is not None
    # Packing takes a microsecond, and so does unpacking.
    ratio = len(ROWS) / len(data)
    assert worth.core_share == pytest.approx(ratio * 12.5e6 * 2e-6 / len(ROWS))


def test_slow_packing_sends_plain_rows() -> None:
    packer, compressor = make(seq=1.0)
    for _ in range(CompressorLimits().samples_in_row):
        header, _ = packer.pack_rows(True, PLAIN, memoryview(ROWS))
        assert header.coding is Coding.LOSSLESS
    for _ in range(CompressorLimits().samples_in_row):
        compressor.choose_coding(True, 1e9)
    rows = memoryview(ROWS)
    assert packer.pack_rows(True, PLAIN, rows) == (PLAIN, rows)


def test_it_decides_by_the_rate() -> None:
    packer, compressor = make(seq=1e-6)
    packer.pack_rows(True, PLAIN, memoryview(ROWS))
    assert compressor.is_packing(True)
    packer.set_rate(1e10)
    assert not compressor.is_packing(True)


def test_none_packs_nothing() -> None:
    packer, _ = make("none")
    rows = memoryview(ROWS)
    assert packer.pack_rows(True, PLAIN, rows) == (PLAIN, rows)
