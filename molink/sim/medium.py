"""The way of bytes from one stage to the next: a bottleneck, then a latency."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from molink.sim.agenda import Action, Agenda
from molink.sim.congestion.base import Controller
from molink.sim.tcp import Passed, TcpConnection
from molink.sim.uplink import Uplink
from molink.wire.messages.data import Lane

#: Told of every message on a link: stage it comes from, whether it has prefill rows, begin and end
#: at the bottleneck.
OnTransfer = Callable[[int, bool, float, float], None]


class Medium(Protocol):
    """What a hop asks of the way between two stages."""

    @property
    def busy_s(self) -> float:
        """Seconds in which the bottleneck transferred what this hop has sent."""

    @property
    def reply_s(self) -> float:
        """Seconds until what the next stage says now is here."""

    def send(self, lane: Lane, nbytes: int, at: float, passed: Passed) -> None:
        """A message enters at ``at``; ``passed`` is called as soon as its times are known."""

    def is_ready(self, lane: Lane, now: float) -> bool:
        """Whether a lane takes more."""

    def when_ready(self, lane: Lane, action: Action) -> None:
        """Do it once, when a lane that is not ready takes more."""


class IdealMedium:
    """An uplink, then ``latency`` seconds.

    Both lanes feed it, message by message: while both have messages waiting they get on in the
    order in which these were sent. (Two TCP connections would share it segment by segment, so a
    decode of the other lane would pass part of the backlog.) A lane that has ``queue`` bytes in
    front of the bottleneck is not ready for more. Nothing is ever lost; the uplink's rate is what
    is left after headers.
    """

    def __init__(self, agenda: Agenda, uplink: Uplink, latency: float, queue: int) -> None:
        self.reply_s = latency
        self.busy_s = 0.0
        self._agenda = agenda
        self._uplink = uplink
        self._latency = latency
        self._queue = queue
        #: When the messages of a lane have passed the bottleneck, and their sizes.
        self._passing: dict[Lane, deque[tuple[float, int]]] = {lane: deque() for lane in Lane}
        self._backlog = dict.fromkeys(Lane, 0)

    def send(self, lane: Lane, nbytes: int, at: float, passed: Passed) -> None:
        """A message enters; its times are known at once."""
        begin, end = self._uplink.queue(nbytes, at)
        self._passing[lane].append((end, nbytes))
        self._backlog[lane] += nbytes
        self.busy_s += nbytes / self._uplink.rate
        passed(begin, end, end + self._latency)

    def backlog(self, lane: Lane, now: float) -> int:
        """Bytes of a lane that have not passed the bottleneck."""
        passing = self._passing[lane]
        while passing and passing[0][0] <= now:
            self._backlog[lane] -= passing.popleft()[1]
        return self._backlog[lane]

    def is_ready(self, lane: Lane, now: float) -> bool:
        """Whether a lane takes more."""
        return self.backlog(lane, now) < self._queue

    def when_ready(self, lane: Lane, action: Action) -> None:
        """Nothing that is sent later makes it any sooner: the time is known."""
        self._agenda.at(self.ready_at(lane), action)

    def ready_at(self, lane: Lane) -> float:
        """When a lane that is not ready will be, if nothing more is sent on it."""
        left = self._backlog[lane]
        for end, nbytes in self._passing[lane]:
            left -= nbytes
            if left < self._queue:
                return end
        return 0.0


class TcpMedium:
    """Two TCP connections that share the uplink of their stage, then ``latency`` seconds.

    What the next stage answers (acknowledgements of either kind) waits in the queue of its own
    uplink, ``back``, but takes no bandwidth of it. A lane whose socket holds ``queue`` bytes that
    have not left is not ready for more.
    """

    def __init__(
        self,
        agenda: Agenda,
        uplink: Uplink,
        back: Uplink,
        latency: float,
        queue: int,
        make_controller: Callable[[Lane], Controller],
    ) -> None:
        self.busy_s = 0.0
        self._agenda = agenda
        self._uplink = uplink
        self._back = back
        self._latency = latency
        self._queue = queue
        self._lanes = {
            lane: TcpConnection(
                agenda,
                uplink,
                latency,
                make_controller(lane),
                lambda: self.reply_s,
                partial(self._left, lane),
            )
            for lane in Lane
        }
        #: Bytes that are yet to be written.
        self._coming = dict.fromkeys(Lane, 0)
        self._written_at = dict.fromkeys(Lane, 0.0)
        #: What waits for a lane to take more.
        self._waits: dict[Lane, Action] = {}

    @property
    def reply_s(self) -> float:
        """Seconds until what the next stage says now is here."""
        return self._latency + self._back.wait(self._agenda.now)

    def send(self, lane: Lane, nbytes: int, at: float, passed: Passed) -> None:
        """A message enters, after those before it on that lane."""
        self.busy_s += nbytes / self._uplink.rate
        is_first = not self._coming[lane]
        self._coming[lane] += nbytes
        at = self._written_at[lane] = max(at, self._written_at[lane])
        if is_first and at <= self._agenda.now:
            self._write(lane, nbytes, passed)
        else:
            self._agenda.at(at, self._write, lane, nbytes, passed)

    def _write(self, lane: Lane, nbytes: int, passed: Passed) -> None:
        self._coming[lane] -= nbytes
        self._lanes[lane].write(nbytes, passed)

    def is_ready(self, lane: Lane, now: float) -> bool:
        """Whether a lane takes more."""
        return self._coming[lane] + self._lanes[lane].unsent < self._queue

    def when_ready(self, lane: Lane, action: Action) -> None:
        """As soon as enough has left."""
        self._waits[lane] = action

    def _left(self, lane: Lane) -> None:
        if lane in self._waits and self.is_ready(lane, self._agenda.now):
            self._agenda.soon(self._waits.pop(lane))
