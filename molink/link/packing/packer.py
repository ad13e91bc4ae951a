"""Packs the messages of a link as its compressor decides, and takes the time."""

from collections.abc import Callable

from molink.link.packing.compression import RowCodec
from molink.link.packing.compressor import Compressor, PackedSample
from molink.wire.messages.base import Coding, Payload
from molink.wire.messages.codec import MAX_PAYLOAD, Buffer


class RowPacker:
    """The :class:`molink.link.packing.base.Packer` of a real link; ``clock`` gives seconds."""

    def __init__(self, compressor: Compressor, clock: Callable[[], float]) -> None:
        self._compressor = compressor
        self._codec = RowCodec()
        self._clock = clock
        self._warm_up()

    def set_rate(self, rate: float | None) -> None:
        """The link carries ``rate`` bytes/s, if that is known."""
        self._compressor.set_rate(rate)

    def pack_rows(self, bulk: bool, payload: Payload, data: memoryview) -> tuple[Payload, Buffer]:
        """Rows of a volume for the wire, packed or not; ``bulk`` if they are prefill rows."""
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
        """Touch the memory of the codec, so that the first measurement is one of many."""
        largest = Payload("bf16", (1, MAX_PAYLOAD // 2))
        self._codec.unpack_rows(
            *self._codec.pack_rows(largest, bytes(MAX_PAYLOAD), Coding.LOSSLESS)
        )
