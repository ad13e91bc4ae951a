"""The interface of channel policies, which decide what a link sends next.

A policy gets all inputs of the MoLink paper's scheduler (§4) and its successors: produced volumes,
the executor's decode steps with predictions, acknowledgements and link estimates. It decides what
to send next, or when to be asked again, and never sees the data. Times are seconds of one monotonic
clock.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import msgspec

from molink.wire.messages.data_plane import Channel


class RowsProducedEvent(msgspec.Struct, frozen=True):
    """A step has produced ``rows`` more rows of ``row_bytes`` each.

    ``volume`` names the volume; lower names are older, and a repeated name adds rows. ``channel``
    is the kind of the rows, even if both kinds share one channel.
    """

    volume: int
    channel: Channel
    rows: int
    row_bytes: int


class DecodeStartedEvent(msgspec.Struct, frozen=True):
    """The executor started a decode step of ``tokens`` tokens, with its predicted seconds."""

    tokens: int
    predicted: float


class DecodeFinishedEvent(msgspec.Struct, frozen=True):
    """The executor finished a decode step.

    ``next_predicted`` is the time until the rows of the next one are expected, in seconds: ``t_p +
    T_o + T_m - now`` of the paper, 0 if overdue, ``None`` if unknown or without decoding. (``t_p``
    is a finish time and ``T_o`` includes this stage's step, so the sum is the next finish, when
    rows need the link.)
    """

    tokens: int
    next_predicted: float | None = None


class MessageSentEvent(msgspec.Struct, frozen=True):
    """A message of ``nbytes`` was sent, possibly again."""

    channel: Channel
    nbytes: int


class MessageAcknowledgedEvent(msgspec.Struct, frozen=True):
    """``nbytes`` have arrived; the newest of them were sent ``elapsed`` seconds ago."""

    channel: Channel
    nbytes: int
    elapsed: float


class HeartbeatEchoedEvent(msgspec.Struct, frozen=True):
    """A heartbeat on the decode channel had a round trip of ``elapsed`` seconds."""

    elapsed: float


class LinkEstimatedEvent(msgspec.Struct, frozen=True):
    """The link's round trips in seconds and rate in bytes/s (``None``: unknown)."""

    rtt: float
    min_rtt: float
    rate: float | None = None


class ChannelReconnectedEvent(msgspec.Struct, frozen=True):
    """A connection was replaced or has stalled; its unacknowledged messages are sent again."""

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
    """Send the next ``rows`` rows of ``volume`` before anything else on its channel."""

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
        """The name that selects it."""

    @property
    def single_channel(self) -> bool:
        """Whether all volumes travel on the bulk channel in the order of decisions.

        Otherwise decode rows have their own connection.
        """

    def handle(self, event: LinkEvent, now: float) -> None:
        """Record an event."""

    def choose_action(self, now: float, ready: Collection[Channel]) -> LinkAction:
        """Choose what to send on one of the ready channels. Called only while rows wait."""


@dataclass(slots=True)
class PendingRows:
    """Produced but unsent rows of a volume."""

    volume: int
    rows: int
    row_bytes: int


class RowBacklog:
    """A queue of volumes by age, the order of their names.

    A volume leaves when its produced rows are sent and returns to its place by age when more are
    produced. Operations take O(log n).
    """

    def __init__(self) -> None:
        self._pending: dict[int, PendingRows] = {}
        #: Names of pending volumes, each once.
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add_rows(self, produced: RowsProducedEvent) -> None:
        """Add rows of a volume."""
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
        """Return the oldest volume."""
        return self._pending[self._order[0]] if self._order else None

    def take_rows(self, rows: int) -> None:
        """Remove ``rows`` rows of the oldest volume, which has at least that many."""
        first = self._pending[self._order[0]]
        assert 0 < rows <= first.rows
        first.rows -= rows
        if first.rows == 0:
            del self._pending[heapq.heappop(self._order)]
