"""Packing rows in virtual time: the product's compressor, on rows that have no content."""

from collections.abc import Callable

from molink.link.packing.compressor import Compressor, PackedSample
from molink.wire.messages.base import Coding, Payload
from molink.wire.messages.codec import Buffer

#: Bytes/s at which one core packs bf16 rows, and unpacks them.
PACKING_RATE = 700e6


class SimPacker:
    """The :class:`molink.link.packing.base.Packer` of a simulated link.

    Packed rows have ``1 / ratio`` of their bytes; that takes :data:`PACKING_RATE`. ``clock`` gives
    virtual seconds.
    """

    def __init__(self, ratio: float, clock: Callable[[], float]) -> None:
        self._compressor = Compressor("lossless")
        self._ratio = ratio
        self._clock = clock

    def set_rate(self, rate: float | None) -> None:
        """The link carries ``rate`` bytes/s, if that is known."""
        self._compressor.set_rate(rate)

    def pack_rows(self, bulk: bool, payload: Payload, data: memoryview) -> tuple[Payload, Buffer]:
        """Rows of a volume for the wire: fewer of the same bytes."""
        choice = self._compressor.choose_coding(bulk, self._clock())
        plain = payload.nbytes
        coded = int(plain / self._ratio)
        if choice.coding is Coding.PLAIN or coded >= plain:
            return payload, data
        if choice.is_sample:  # all others would measure the same
            seconds = packing_s(plain)
            self._compressor.on_packed(bulk, PackedSample(plain, coded, seconds, seconds))
        return Payload(payload.dtype, payload.shape, choice.coding, coded), data[:coded]


def packing_s(plain: int) -> float:
    """Seconds to pack ``plain`` bytes, or to unpack them."""
    return plain / PACKING_RATE
