"""What decides which bytes a link sends next: the protocol of transmission policies.

A policy hears of everything that the scheduler of the MoLink paper (§4) and its successors need:
volumes as they are produced, the executor's decode steps with their predicted durations,
acknowledgements and the link's estimate. It answers one question: what next, and if nothing, when
to ask again. It never sees the bytes themselves. Times are seconds of one monotonic clock.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import msgspec

from molink.wire.messages.data_plane import Channel


class RowsProducedEvent(msgspec.Struct, frozen=True):
    """A finished computation has ``rows`` more rows of ``row_bytes`` each to send.

    ``volume`` names it: names rise, so a lower one is older; the same name again means that more of
    its rows are finished. ``channel`` is its kind, even if the policy has one channel for both.
    """

    volume: int
    channel: Channel
    rows: int
    row_bytes: int


class DecodeStartedEvent(msgspec.Struct, frozen=True):
    """The executor began a decode step of ``tokens`` tokens, predicted to take ``predicted`` s."""

    tokens: int
    predicted: float


class DecodeFinishedEvent(msgspec.Struct, frozen=True):
    """The executor finished a decode step.

    ``next_predicted`` is in how many seconds the rows of the next one are expected, counted from
    now: ``t_p + T_o + T_m - now`` of the paper, 0 if they are overdue, ``None`` if unknown or if
    nobody decodes. (``t_p`` is a finish and ``T_o`` has this stage's own step too: so that sum is
    when the next step finishes, which is when its rows need the link.)
    """

    tokens: int
    next_predicted: float | None = None


class MessageSentEvent(msgspec.Struct, frozen=True):
    """A message of ``nbytes`` left, perhaps not for the first time."""

    channel: Channel
    nbytes: int


class MessageAcknowledgedEvent(msgspec.Struct, frozen=True):
    """``nbytes`` arrived; ``elapsed`` seconds since the newest of them was sent."""

    channel: Channel
    nbytes: int
    elapsed: float


class HeartbeatEchoedEvent(msgspec.Struct, frozen=True):
    """A heartbeat, a few bytes on the decode channel, is back ``elapsed`` seconds after it left."""

    elapsed: float


class LinkEstimatedEvent(msgspec.Struct, frozen=True):
    """What is known of the link: seconds there and back, and bytes/s (``None`` = unknown)."""

    rtt: float
    min_rtt: float
    rate: float | None = None


class ChannelReconnectedEvent(msgspec.Struct, frozen=True):
    """A connection was lost and is there again, or has been silent for too long.

    What was under way on it is sent again.
    """

    channel: Channel


LinkEvent = (
    RowsProducedEvent
    | DecodeStartedEvent
    | DecodeFinishedEvent
    | MessageSentEvent
    | MessageAcknowledgedEvent
    | HeartbeatEchoedEvent
    | LinkEstimatedEvent
    | ChannelReconnectedEvent
)


class SendRowsAction(msgspec.Struct, frozen=True):
    """Send the next ``rows`` rows of ``volume``; nothing else on its channel until they have
    left."""

    volume: int
    rows: int


class WaitAction(msgspec.Struct, frozen=True):
    """Send nothing before the next event, or before time ``until``."""

    until: float | None = None


LinkAction = SendRowsAction | WaitAction


class ChannelPolicy(Protocol):
    """Decides what a link sends next."""

    @property
    def name(self) -> str:
        """The name by which it is chosen."""

    @property
    def single_channel(self) -> bool:
        """Whether all volumes travel on the bulk channel, in the order of its decisions.

        If not, decode rows have a connection of their own.
        """

    def handle(self, event: LinkEvent, now: float) -> None:
        """Take note of what happened."""

    def choose_action(self, now: float, ready: Collection[Channel]) -> LinkAction:
        """What to send next, on one of the channels that can take something now.

        Asked only while something waits to be sent.
        """


@dataclass(slots=True)
class PendingRows:
    """Rows of a volume that are finished and have not been sent."""

    volume: int
    rows: int
    row_bytes: int


class RowBacklog:
    """A queue of volumes by age, which is that of their names.

    A volume of which all finished rows were sent leaves; when more are finished it comes back to
    the place of its age: before every younger one. Each operation takes O(log n) of n volumes.
    """

    def __init__(self) -> None:
        self._pending: dict[int, PendingRows] = {}
        #: Names of what is pending, each once.
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add_rows(self, produced: RowsProducedEvent) -> None:
        """A volume, or more rows of one."""
        if produced.rows <= 0:
            return
        there = self._pending.get(produced.volume)
        if there is not None:
            there.rows += produced.rows
            return
        self._pending[produced.volume] = PendingRows(
            produced.volume, produced.rows, produced.row_bytes
        )
        heapq.heappush(self._order, produced.volume)

    @property
    def first(self) -> PendingRows | None:
        """The oldest volume."""
        return self._pending[self._order[0]] if self._order else None

    def take_rows(self, rows: int) -> None:
        """``rows`` rows of the oldest volume are being sent: at least 1 and no more than it has."""
        first = self._pending[self._order[0]]
        assert 0 < rows <= first.rows
        first.rows -= rows
        if first.rows == 0:
            del self._pending[heapq.heappop(self._order)]
