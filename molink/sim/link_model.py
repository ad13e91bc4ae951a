"""Models of the path between two stages: a bottleneck, then a latency."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from molink.sim.congestion.base import CongestionController
from molink.sim.event_queue import Callback, EventQueue
from molink.sim.pc import Uplink
from molink.sim.tcp import OnPassed, TcpConnection
from molink.wire.messages.data_plane import Channel

#: Called for every message with its source stage, whether it has prefill rows, and the times when
#: it begins and ends to pass the bottleneck.
OnTransfer = Callable[[int, bool, float, float], None]


class LinkModel(Protocol):
    """The path between two stages."""

    @property
    def busy_s(self) -> float:
        """Seconds in which the bottleneck transferred this link's messages."""

    @property
    def reply_s(self) -> float:
        """Seconds until a reply that is sent now arrives."""

    def send_message(self, channel: Channel, nbytes: int, at: float, passed: OnPassed) -> None:
        """Send a message at ``at`` seconds; call ``passed`` once its times are known."""

    def is_ready(self, channel: Channel, now: float) -> bool:
        """Whether a channel accepts another message."""

    def call_when_ready(self, channel: Channel, callback: Callback) -> None:
        """Run ``callback`` once, as soon as the channel accepts another message."""


class IdealLink:
    """An uplink followed by ``latency`` seconds, without TCP.

    Messages of both channels pass the uplink one after another, in the order of sending. (Two TCP
    connections would share it segment by segment, so a decode message could overtake part of the
    other channel's backlog.) A channel is congested with ``queue`` bytes in front of the
    bottleneck. Nothing is lost; the uplink's rate excludes headers.
    """

    def __init__(self, event_queue: EventQueue, uplink: Uplink, latency: float, queue: int) -> None:
        self.reply_s = latency
        self.busy_s = 0.0
        self._event_queue = event_queue
        self._uplink = uplink
        self._latency = latency
        self._queue = queue
        #: By channel: when each message will have passed the bottleneck, and its bytes.
        self._passing: dict[Channel, deque[tuple[float, int]]] = {
            channel: deque() for channel in Channel
        }
        self._backlog = dict.fromkeys(Channel, 0)

    def send_message(self, channel: Channel, nbytes: int, at: float, passed: OnPassed) -> None:
        begin, end = self._uplink.enqueue_bytes(nbytes, at)
        self._passing[channel].append((end, nbytes))
        self._backlog[channel] += nbytes
        self.busy_s += nbytes / self._uplink.rate
        passed(begin, end, end + self._latency)

    def backlog_bytes(self, channel: Channel, now: float) -> int:
        """Return the bytes of a channel that have not passed the bottleneck at ``now`` seconds."""
        passing = self._passing[channel]
        while passing and passing[0][0] <= now:
            self._backlog[channel] -= passing.popleft()[1]
        return self._backlog[channel]

    def is_ready(self, channel: Channel, now: float) -> bool:
        return self.backlog_bytes(channel, now) < self._queue

    def call_when_ready(self, channel: Channel, callback: Callback) -> None:
        """Schedule ``callback`` at the known time, which later messages can't change."""
        self._event_queue.schedule_at(self.ready_at(channel), callback)

    def ready_at(self, channel: Channel) -> float:
        """Return when a congested channel will be ready, in seconds."""
        left = self._backlog[channel]
        for end, nbytes in self._passing[channel]:
            left -= nbytes
            if left < self._queue:
                return end
        return 0.0


class TcpLink:
    """Two TCP connections that share their stage's uplink, followed by ``latency`` seconds.

    Acknowledgements wait in ``back``, the next stage's uplink queue, but take none of its
    bandwidth. A channel is congested while its socket holds ``queue`` unsent bytes.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        uplink: Uplink,
        back: Uplink,
        latency: float,
        queue: int,
        make_controller: Callable[[Channel], CongestionController],
    ) -> None:
        self.busy_s = 0.0
        self._event_queue = event_queue
        self._uplink = uplink
        self._return_uplink = back
        self._latency = latency
        self._queue = queue
        self._connections = {
            channel: TcpConnection(
                event_queue,
                uplink,
                latency,
                make_controller(channel),
                lambda: self.reply_s,
                partial(self._on_room, channel),
            )
            for channel in Channel
        }
        #: Bytes of messages whose time of sending has not come.
        self._unwritten = dict.fromkeys(Channel, 0)
        self._written_at = dict.fromkeys(Channel, 0.0)
        #: Callbacks for congested channels.
        self._callbacks: dict[Channel, Callback] = {}

    @property
    def reply_s(self) -> float:
        return self._latency + self._return_uplink.queueing_s(self._event_queue.now)

    def send_message(self, channel: Channel, nbytes: int, at: float, passed: OnPassed) -> None:
        self.busy_s += nbytes / self._uplink.rate
        is_first = not self._unwritten[channel]
        self._unwritten[channel] += nbytes
        at = self._written_at[channel] = max(at, self._written_at[channel])
        if is_first and at <= self._event_queue.now:
            self._write(channel, nbytes, passed)
        else:
            self._event_queue.schedule_at(at, self._write, channel, nbytes, passed)

    def _write(self, channel: Channel, nbytes: int, passed: OnPassed) -> None:
        self._unwritten[channel] -= nbytes
        self._connections[channel].write_message(nbytes, passed)

    def is_ready(self, channel: Channel, now: float) -> bool:
        return self._unwritten[channel] + self._connections[channel].unsent < self._queue

    def call_when_ready(self, channel: Channel, callback: Callback) -> None:
        self._callbacks[channel] = callback

    def _on_room(self, channel: Channel) -> None:
        if channel in self._callbacks and self.is_ready(channel, self._event_queue.now):
            self._event_queue.schedule_soon(self._callbacks.pop(channel))
