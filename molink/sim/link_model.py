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

#: Called for every message with its source stage, whether it has prefill rows, and its begin and
#: end at the bottleneck.
OnTransfer = Callable[[int, bool, float, float], None]


class LinkModel(Protocol):
    """The path between two stages."""

    @property
    def busy_s(self) -> float:
        """Seconds in which the bottleneck transferred this link's messages."""

    @property
    def reply_s(self) -> float:
        """Seconds until a reply sent now arrives."""

    def send_message(self, channel: Channel, nbytes: int, at: float, passed: OnPassed) -> None:
        """Send a message at ``at``; ``passed`` is called once its times are known."""

    def is_ready(self, channel: Channel, now: float) -> bool:
        """Whether a channel accepts more."""

    def call_when_ready(self, channel: Channel, callback: Callback) -> None:
        """Run ``callback`` once when the channel accepts more."""


class IdealLink:
    """An uplink, then ``latency`` seconds.

    Both channels share the uplink, message by message in the order of sending. (Two TCP connections
    would share it segment by segment, so a decode could pass part of the other channel's backlog.)
    A channel is congested with ``queue`` bytes in front of the bottleneck. Nothing is lost; the
    uplink's rate excludes headers.
    """

    def __init__(self, event_queue: EventQueue, uplink: Uplink, latency: float, queue: int) -> None:
        self.reply_s = latency
        self.busy_s = 0.0
        self._event_queue = event_queue
        self._uplink = uplink
        self._latency = latency
        self._queue = queue
        #: By channel: when messages pass the bottleneck, and their sizes.
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
        """Bytes of a channel that have not passed the bottleneck."""
        passing = self._passing[channel]
        while passing and passing[0][0] <= now:
            self._backlog[channel] -= passing.popleft()[1]
        return self._backlog[channel]

    def is_ready(self, channel: Channel, now: float) -> bool:
        return self.backlog_bytes(channel, now) < self._queue

    def call_when_ready(self, channel: Channel, callback: Callback) -> None:
        """Schedule the known time: later messages can't make it earlier."""
        self._event_queue.schedule_at(self.ready_at(channel), callback)

    def ready_at(self, channel: Channel) -> float:
        """When a congested channel will be ready."""
        left = self._backlog[channel]
        for end, nbytes in self._passing[channel]:
            left -= nbytes
            if left < self._queue:
                return end
        return 0.0


class TcpLink:
    """Two TCP connections that share their stage's uplink, then ``latency`` seconds.

    Acknowledgements wait in the next stage's uplink queue, ``back``, but take none of its
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
        #: Bytes yet to be written.
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
