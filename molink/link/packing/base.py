"""What a sender asks of whoever packs its rows; nothing heavy is imported for it."""

from typing import Protocol

import msgspec

from molink.wire.messages.base import Payload
from molink.wire.messages.codec import Buffer
from molink.wire.messages.data_plane import Volume, VolumeFragment


class Packer(Protocol):
    """Makes rows smaller where that pays on its link."""

    def set_rate(self, rate: float | None) -> None:
        """The link carries ``rate`` bytes/s, if that is known."""

    def pack_rows(self, bulk: bool, payload: Payload, data: memoryview) -> tuple[Payload, Buffer]:
        """Rows of a volume for the wire, packed or not; ``bulk`` if they are prefill rows."""


class MessagePacker:
    """The packer of a link, if it has one, and what came of it."""

    def __init__(self, packer: Packer | None) -> None:
        self._packer = packer
        #: Rows of volumes that have left, in bytes: as they were, and as they were sent.
        self.plain_bytes = 0
        self.packed_bytes = 0

    def set_rate(self, rate: float | None) -> None:
        """As :meth:`Packer.set_rate`."""
        if self._packer is not None:
            self._packer.set_rate(rate)

    def pack_message(
        self, body: Volume | VolumeFragment, data: memoryview, bulk: bool
    ) -> tuple[Volume | VolumeFragment, Buffer]:
        """A message of rows as it goes on the wire."""
        packed: Buffer = data
        if self._packer is not None:
            header, packed = self._packer.pack_rows(bulk, body.payload, data)
            body = msgspec.structs.replace(body, payload=header)
        self.plain_bytes += data.nbytes
        self.packed_bytes += body.payload.wire_bytes
        return body, packed
