"""Packs the messages of a link as its compressor decides, and takes the time."""

from collections.abc import Callable

from molink.link.packing.compression import RowCodec
from molink.link.packing.compressor import Compressor, Packed
from molink.wire.messages.base import Coding, Payload
from molink.wire.messages.codec import MAX_PAYLOAD, Buffer


class RowPacker:
    """The :class:`molink.link.packing.packing.Packer` of a real link; ``clock`` gives seconds."""

    def __init__(self, compressor: Compressor, clock: Callable[[], float]) -> None:
        self._compressor = compressor
        self._codec = RowCodec()
        self._clock = clock
        self._warm_up()

    def measured(self, rate: float | None) -> None:
        """The link carries ``rate`` bytes/s, if that is known."""
        self._compressor.measured(rate)

    def pack(self, bulk: bool, payload: Payload, data: memoryview) -> tuple[Payload, Buffer]:
        """Rows of a volume for the wire, packed or not; ``bulk`` if they are prefill rows."""
        start = self._clock()
        choice = self._compressor.choose(bulk, start)
        if choice.coding is Coding.PLAIN:
            return payload, data
        header, packed = self._codec.pack(payload, data, choice.coding)
        end = self._clock()
        unpack = None
        if choice.sample:
            self._codec.unpack(header, packed)
            unpack = self._clock() - end
        done = Packed(payload.nbytes, header.wire_bytes, end - start, unpack)
        self._compressor.packed(bulk, done)
        return header, packed

    def _warm_up(self) -> None:
        """Touch the memory of the codec, so that the first measurement is one of many."""
        largest = Payload("bf16", (1, MAX_PAYLOAD // 2))
        self._codec.unpack(*self._codec.pack(largest, bytes(MAX_PAYLOAD), Coding.LOSSLESS))
