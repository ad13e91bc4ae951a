"""Packs rows of activations for a link: without loss or, on request, in 8 bits per element.

Exponents of activations are similar and compress; mantissas are noise. Each element is rotated left
by one bit, which turns the 8 exponent bits of bf16 and f32 into a separate byte (f16: 5 of exponent
and 3 of mantissa). These bytes are compressed; the others follow unchanged. Only entropy coding
pays off, so zstd is configured not to search for repetitions, which makes frames smaller and
packing faster.

A ``LOSSLESS`` frame of n elements of s bytes has the n·(s-1) other bytes (f32: first the n lower
pairs, then the n bytes between), then one zstd frame of the n top bytes.
"""

from collections.abc import Callable

import zstandard

from molink.errors import WireError
from molink.facts.dtypes import DTYPE_SIZES, WEIGHT_DTYPES
from molink.link.packing.compressor import Compressor, PackedSample
from molink.link.packing.int8_rows import packed_bytes, to_int8, to_rows
from molink.link.packing.planes import BytePlanes
from molink.wire.messages.base import Coding, Payload
from molink.wire.messages.codec import MAX_PAYLOAD, Buffer


class RowCodec:
    """Packs and unpacks rows with reused buffers. Not thread-safe."""

    def __init__(self) -> None:
        self._compressor = entropy_coder()
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_PAYLOAD)
        self._planes = BytePlanes(MAX_PAYLOAD)

    def pack_rows(self, payload: Payload, data: Buffer, coding: Coding) -> tuple[Payload, Buffer]:
        """Pack rows ``[n, hidden]`` and their header; return both unchanged if that doesn't help.

        Raises:
            WireError: ``data`` doesn't fit ``payload`` or exceeds a message.
        """
        view = memoryview(data).cast("B")
        if payload.coding is not Coding.PLAIN or view.nbytes != payload.nbytes:
            raise WireError(f"{view.nbytes} bytes are not rows of {payload}")
        if coding is Coding.PLAIN or not view.nbytes:
            return payload, data
        _check(payload)
        if coding is Coding.LOSSLESS:
            tops, others = self._planes.split_planes(view, DTYPE_SIZES[payload.dtype])
            packed = b"".join((others, self._compressor.compress(tops)))
        else:
            packed = to_int8(view, payload)
        if len(packed) >= payload.nbytes:
            return payload, data
        return Payload(payload.dtype, payload.shape, coding, len(packed)), packed

    def unpack_rows(self, payload: Payload, data: Buffer) -> tuple[Payload, memoryview]:
        """Unpack an untrusted message to its plain header and rows.

        The rows are valid until the next call.

        Their size is checked before anything is allocated, and never exceeds a plain message.

        Raises:
            WireError: invalid bytes.
        """
        view = memoryview(data).cast("B")
        if view.nbytes != payload.wire_bytes:
            raise WireError(f"{view.nbytes} bytes are not the {payload.wire_bytes} of packed rows")
        if payload.coding is Coding.PLAIN:
            return payload, view
        _check(payload)
        if payload.coded >= payload.nbytes:
            raise WireError(f"rows packed from {payload.nbytes} to {payload.coded} bytes")
        if payload.coding is Coding.LOSSLESS:
            rows = self._decompress(view, payload)
        else:
            if payload.coded != packed_bytes(payload):
                raise WireError(
                    f"{payload.coded} bytes are not rows of {payload.shape[1]} elements"
                )
            rows = to_rows(view, payload)
        return Payload(payload.dtype, payload.shape), rows

    def _decompress(self, view: memoryview, payload: Payload) -> memoryview:
        size = DTYPE_SIZES[payload.dtype]
        elements = payload.nbytes // size
        low = elements * (size - 1)
        if view.nbytes <= low:
            raise WireError(f"{view.nbytes} bytes are too few for {elements} elements")
        return self._planes.join_planes(self._inflate(view[low:], elements), view[:low], size)

    def _inflate(self, frame: memoryview, size: int) -> bytes:
        """Decompress ``size`` bytes; zstandard alone would trust the size that the frame claims."""
        try:
            claim = zstandard.get_frame_parameters(frame)
            if claim.content_size != size or claim.window_size > MAX_PAYLOAD:
                raise WireError(f"{claim.content_size} bytes are packed, not {size}")
            data = self._decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise WireError(f"not packed rows: {error}") from error
        if len(data) != size:
            raise WireError(f"{len(data)} bytes were packed, not {size}")
        return data


def entropy_coder() -> zstandard.ZstdCompressor:
    """Reduce zstd to its entropy coder: the smallest hash table, and only long repetitions.

    Shorter repetitions cost more than they save, and searching for them dominates the time.
    """
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        compression_level=1,
        window_log=MAX_PAYLOAD.bit_length() - 1,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def _check(payload: Payload) -> None:
    if payload.dtype not in WEIGHT_DTYPES or len(payload.shape) != 2:
        raise WireError(f"{payload.dtype} {list(payload.shape)} can't be packed as rows")
    if payload.nbytes > MAX_PAYLOAD:
        raise WireError(f"rows of {payload.nbytes} bytes are over {MAX_PAYLOAD}")


class RowPacker:
    """The :class:`molink.link.packing.base.Packer` of a real link; ``clock`` returns seconds."""

    def __init__(self, compressor: Compressor, clock: Callable[[], float]) -> None:
        self._compressor = compressor
        self._codec = RowCodec()
        self._clock = clock
        self._warm_up()

    def set_rate(self, rate: float | None) -> None:
        """As :meth:`Packer.set_rate`."""
        self._compressor.set_rate(rate)

    def pack_rows(self, bulk: bool, payload: Payload, data: memoryview) -> tuple[Payload, Buffer]:
        """As :meth:`Packer.pack_rows`."""
        start = self._clock()
        choice = self._compressor.choose_coding(bulk, start)
        if choice.coding is Coding.PLAIN:
            return payload, data
        header, packed = self._codec.pack_rows(payload, data, choice.coding)
        end = self._clock()
        unpack = None
        if choice.is_sample:
            self._codec.unpack_rows(header, packed)
            unpack = self._clock() - end
        done = PackedSample(payload.nbytes, header.wire_bytes, end - start, unpack)
        self._compressor.on_packed(bulk, done)
        return header, packed

    def _warm_up(self) -> None:
        """Touch the codec's memory, so that the first measurement is representative."""
        largest = Payload("bf16", (1, MAX_PAYLOAD // 2))
        self._codec.unpack_rows(
            *self._codec.pack_rows(largest, bytes(MAX_PAYLOAD), Coding.LOSSLESS)
        )
