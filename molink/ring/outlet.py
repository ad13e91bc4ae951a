"""What a ring needs of its outgoing link."""

from typing import Protocol

from molink.link.policies.base import Event
from molink.wire.messages.codec import Buffer
from molink.wire.messages.data import RingBody, Volume


class Outlet(Protocol):
    """Toward the next stage; the tail's leads back to the head.

    :class:`molinkd.worker.outlink.OutLink` is one.
    """

    def control(self, body: RingBody, payload: Buffer | None = None) -> None:
        """Send a control message on the decode lane."""
        ...

    def volume(self, header: Volume, rows: Buffer) -> None:
        """Send a volume whose rows ``header.payload`` describes: all of them, or the first ones."""
        ...

    def more(self, tick: int, rows: Buffer) -> None:
        """Send the next rows of a volume that was begun with its first ones."""
        ...

    def handle(self, event: Event) -> None:
        """Tell the transmission policy what the executor does."""
        ...

    @property
    def full(self) -> bool:
        """Whether so much is unsent that this stage had better wait."""
        ...
