"""Whole volumes in the order in which they were produced, as Helix sends them."""

from collections import deque
from collections.abc import Collection

from molink.link.policies.base import (
    LinkAction,
    LinkEvent,
    RowsProducedEvent,
    SendRowsAction,
    WaitAction,
)
from molink.wire.messages.data_plane import Channel


class FifoPolicy:
    """First produced, first sent, whatever the channel: a decode waits for the prefill before
    it."""

    name = "fifo"
    single_channel = True

    def __init__(self) -> None:
        self._waiting: deque[RowsProducedEvent] = deque()

    def handle(self, event: LinkEvent, now: float) -> None:
        """Only what was produced matters here."""
        if isinstance(event, RowsProducedEvent):
            self._waiting.append(event)

    def choose_action(self, now: float, ready: Collection[Channel]) -> LinkAction:
        """The oldest volume, or nothing while the channel of all can't take it."""
        if not self._waiting or Channel.BULK not in ready:
            return WaitAction()
        first = self._waiting.popleft()
        return SendRowsAction(first.volume, first.rows)
