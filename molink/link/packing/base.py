"""The interface of row packers; imports nothing heavy."""

from typing import Protocol

import msgspec

from molink.wire.messages.base import Payload
from molink.wire.messages.codec import Buffer
from molink.wire.messages.data_plane import Volume, VolumeFragment


class Packer(Protocol):
    """Packs rows if that pays off on its link."""

    def set_rate(self, rate: float | None) -> None:
        """Set the link's rate in bytes/s (``None``: unknown)."""

    def pack_rows(self, bulk: bool, payload: Payload, data: memoryview) -> tuple[Payload, Buffer]:
        """Return a volume's rows for the wire, packed or not; ``bulk`` marks prefill rows."""


class MessagePacker:
    """Applies a link's packer, if it has one, and counts bytes."""

    def __init__(self, packer: Packer | None) -> None:
        self._packer = packer
        #: Bytes of volume rows before and after packing.
        self.plain_bytes = 0
        self.packed_bytes = 0

    def set_rate(self, rate: float | None) -> None:
        """As :meth:`Packer.set_rate`."""
        if self._packer is not None:
            self._packer.set_rate(rate)

    def pack_message(
        self, body: Volume | VolumeFragment, data: memoryview, bulk: bool
    ) -> tuple[Volume | VolumeFragment, Buffer]:
        """Return a message of rows in the form to send."""
        packed: Buffer = data
        if self._packer is not None:
            header, packed = self._packer.pack_rows(bulk, body.payload, data)
            body = msgspec.structs.replace(body, payload=header)
        self.plain_bytes += data.nbytes
        self.packed_bytes += body.payload.wire_bytes
        return body, packed
