"""The way of bytes from one stage to the next: a bottleneck, then a latency."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from molink.sim.congestion.base import CongestionController
from molink.sim.event_queue import Callback, EventQueue
from molink.sim.pc import Uplink
from molink.sim.tcp import OnPassed, TcpConnection
from molink.wire.messages.data_plane import Channel

#: Told of every message on a link: stage it comes from, whether it has prefill rows, begin and end
#: at the bottleneck.
OnTransfer = Callable[[int, bool, float, float], None]


class LinkModel(Protocol):
    """What a hop asks of the way between two stages."""

    @property
    def busy_s(self) -> float:
        """Seconds in which the bottleneck transferred what this hop has sent."""

    @property
    def reply_s(self) -> float:
        """Seconds until what the next stage says now is here."""

    def send_message(self, channel: Channel, nbytes: int, at: float, passed: OnPassed) -> None:
        """A message enters at ``at``; ``passed`` is called as soon as its times are known."""

    def is_ready(self, channel: Channel, now: float) -> bool:
        """Whether a lane takes more."""

    def call_when_ready(self, channel: Channel, action: Callback) -> None:
        """Do it once, when a lane that is not ready takes more."""


class IdealLink:
    """An uplink, then ``latency`` seconds.

    Both lanes feed it, message by message: while both have messages waiting they get on in the
    order in which these were sent. (Two TCP connections would share it segment by segment, so a
    decode of the other lane would pass part of the backlog.) A lane that has ``queue`` bytes in
    front of the bottleneck is not ready for more. Nothing is ever lost; the uplink's rate is what
    is left after headers.
    """

    def __init__(self, event_queue: EventQueue, uplink: Uplink, latency: float, queue: int) -> None:
        self.reply_s = latency
        self.busy_s = 0.0
        self._event_queue = event_queue
        self._uplink = uplink
        self._latency = latency
        self._queue = queue
        #: When the messages of a lane have passed the bottleneck, and their sizes.
        self._passing: dict[Channel, deque[tuple[float, int]]] = {
            channel: deque() for channel in Channel
        }
        self._backlog = dict.fromkeys(Channel, 0)

    def send_message(self, channel: Channel, nbytes: int, at: float, passed: OnPassed) -> None:
        """A message enters; its times are known at once."""
        begin, end = self._uplink.enqueue_bytes(nbytes, at)
        self._passing[channel].append((end, nbytes))
        self._backlog[channel] += nbytes
        self.busy_s += nbytes / self._uplink.rate
        passed(begin, end, end + self._latency)

    def backlog_bytes(self, channel: Channel, now: float) -> int:
        """Bytes of a lane that have not passed the bottleneck."""
        passing = self._passing[channel]
        while passing and passing[0][0] <= now:
            self._backlog[channel] -= passing.popleft()[1]
        return self._backlog[channel]

    def is_ready(self, channel: Channel, now: float) -> bool:
        """Whether a lane takes more."""
        return self.backlog_bytes(channel, now) < self._queue

    def call_when_ready(self, channel: Channel, action: Callback) -> None:
        """Nothing that is sent later makes it any sooner: the time is known."""
        self._event_queue.schedule_at(self.ready_at(channel), action)

    def ready_at(self, channel: Channel) -> float:
        """When a lane that is not ready will be, if nothing more is sent on it."""
        left = self._backlog[channel]
        for end, nbytes in self._passing[channel]:
            left -= nbytes
            if left < self._queue:
                return end
        return 0.0


class TcpLink:
    """Two TCP connections that share the uplink of their stage, then ``latency`` seconds.

    What the next stage answers (acknowledgements of either kind) waits in the queue of its own
    uplink, ``back``, but takes no bandwidth of it. A lane whose socket holds ``queue`` bytes that
    have not left is not ready for more.
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
        #: Bytes that are yet to be written.
        self._unwritten = dict.fromkeys(Channel, 0)
        self._written_at = dict.fromkeys(Channel, 0.0)
        #: What waits for a lane to take more.
        self._callbacks: dict[Channel, Callback] = {}

    @property
    def reply_s(self) -> float:
        """Seconds until what the next stage says now is here."""
        return self._latency + self._return_uplink.queueing_s(self._event_queue.now)

    def send_message(self, channel: Channel, nbytes: int, at: float, passed: OnPassed) -> None:
        """A message enters, after those before it on that lane."""
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
        """Whether a lane takes more."""
        return self._unwritten[channel] + self._connections[channel].unsent < self._queue

    def call_when_ready(self, channel: Channel, action: Callback) -> None:
        """As soon as enough has left."""
        self._callbacks[channel] = action

    def _on_room(self, channel: Channel) -> None:
        if channel in self._callbacks and self.is_ready(channel, self._event_queue.now):
            self._event_queue.schedule_soon(self._callbacks.pop(channel))
