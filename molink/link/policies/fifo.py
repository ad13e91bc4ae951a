"""Whole volumes in the order in which they were produced, as Helix sends them."""

from collections import deque
from collections.abc import Collection

from molink.link.policies.base import Decision, Event, Produced, SendRows, Wait
from molink.wire.messages.data import Lane


class Fifo:
    """First produced, first sent, whatever the lane: a decode waits for the prefill before it."""

    name = "fifo"
    one_lane = True

    def __init__(self) -> None:
        self._waiting: deque[Produced] = deque()

    def handle(self, event: Event, now: float) -> None:
        """Only what was produced matters here."""
        if isinstance(event, Produced):
            self._waiting.append(event)

    def decide(self, now: float, ready: Collection[Lane]) -> Decision:
        """The oldest volume, or nothing while the lane of all can't take it."""
        if not self._waiting or Lane.BULK not in ready:
            return Wait()
        first = self._waiting.popleft()
        return SendRows(first.volume, first.rows)
