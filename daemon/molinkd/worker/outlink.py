"""One outgoing link: two connections to the next stage and the timers, around a LinkSender.

All callbacks and methods belong to the event loop's thread. What to send, when, and whether the
next stage is dead is decided by :mod:`molink.link.sender` and :mod:`molink.link.heartbeat`. At the
other end is an :mod:`molinkd.worker.inlink`, whose :mod:`molink.link.receiver` puts things
together.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from molink.errors import MolinkError
from molink.facts.ringtimes import LinkFacts
from molink.link.heartbeat import BeatClock, Liveness, StageProgress
from molink.link.lane import Outgoing
from molink.link.policies.base import Event
from molink.link.sender import BOTH_LANES, LinkSender
from molink.wire.messages.codec import Buffer
from molink.wire.messages.data import Ack, Beat, DataMessage, Lane, LinkHello, RingBody, Volume

#: Until a hello is repeated that the next stage hasn't answered: it may not be that far yet.
HELLO_INTERVAL = 0.25
#: How often the next stage's life is looked at.
_LOOK_INTERVAL = 0.5
_MIN_PAUSE = 0.001
#: Messages sent before others on the event loop get their turn.
_BATCH = 16
#: Messages that a link of unknown rate is tried out with, and their bytes.
_PROBES = 16
_PROBE_BYTES = 16 * 1024


class Channel(Protocol):
    """A connection to the next stage; :class:`molink.wire.sockets.client.Client` is one."""

    @property
    def congested(self) -> bool:
        """Whether messages wait for the socket."""

    def start(self) -> None:
        """Begin to connect."""

    def send(self, message: DataMessage, payload: Buffer | None = None) -> None:
        """Send; raises :class:`MolinkError` if that can't be."""

    def redial(self) -> None:
        """Give up the connection for a new one."""

    async def close(self) -> None:
        """Disconnect."""


@dataclass(frozen=True, slots=True)
class ChannelEvents:
    """What a channel calls its link with."""

    on_message: Callable[[DataMessage, memoryview | None], None]
    on_connect: Callable[[], None]
    on_disconnect: Callable[[], None]
    on_drained: Callable[[], None]


@dataclass(slots=True)
class LinkStats:
    """What happened on a link so far."""

    connects: int = 0
    sent_frames: int = 0
    sent_bytes: int = 0
    #: Rows of volumes: as the stage made them, and as they were sent.
    plain_bytes: int = 0
    packed_bytes: int = 0
    resent: int = 0
    stale_acks: int = 0
    queued_bytes: int = 0
    unacknowledged_bytes: int = 0
    #: Seconds there and back, and bytes/s; 0 = unknown.
    rtt: float = 0.0
    min_rtt: float = 0.0
    rate: float = 0.0


@dataclass(slots=True)
class _LaneConnection:
    channel: Channel
    connected: bool = False
    #: Whether the next stage has answered our hello on this connection.
    welcome: bool = False
    hello_at: float = field(default=0.0)


class OutLink:
    """Sends what its stage produces to the next stage, for one epoch."""

    def __init__(
        self,
        connect: Callable[[Lane, ChannelEvents], Channel],
        sender: LinkSender,
        pipeline: str,
        from_stage: int,
        progress: Callable[[], StageProgress],
        on_dead: Callable[[str], None],
        on_room: Callable[[], None],
        on_estimate: Callable[[LinkFacts], None] | None = None,
        *,
        probe: bool = False,
    ) -> None:
        """``connect`` makes a lane's connection. ``on_dead`` is told, once, why the next is dead.

        ``on_room`` is called when the link is not :attr:`full` any more.
        ``progress`` says how this stage itself gets on. ``on_estimate`` is told what is known of
        the link, again and again; with ``probe``, a link of unknown rate is tried out at once.
        """
        self._loop = asyncio.get_running_loop()
        self._sender = sender
        self._pipeline = pipeline
        self._from_stage = from_stage
        self._progress = progress
        self._on_dead = on_dead
        self._on_room = on_room
        self._connections = {
            lane: _LaneConnection(connect(lane, self._events(lane))) for lane in Lane
        }
        now = self._loop.time()
        self._beats = BeatClock(now)
        self.liveness = Liveness(now)
        self._on_estimate = on_estimate
        self._probe = probe
        self._connects = 0
        self._timer: asyncio.TimerHandle | None = None
        self._pumping: asyncio.Handle | None = None
        self._dead = False
        self._closed = False

    # --- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect."""
        for connection in self._connections.values():
            connection.channel.start()
        self._pump()

    async def close(self) -> None:
        """Disconnect; what has not been acknowledged is dropped."""
        self._closed = True
        for handle in (self._timer, self._pumping):
            if handle is not None:
                handle.cancel()
        for connection in self._connections.values():
            await connection.channel.close()

    # --- sending -----------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether the stage should pause: the next one doesn't take what it produces."""
        return self._sender.full

    def control(self, body: RingBody, payload: Buffer | None = None) -> None:
        """As :meth:`LinkSender.control`."""
        self._sender.control(body, payload)
        self._pump()

    def volume(self, header: Volume, rows: Buffer) -> None:
        """As :meth:`LinkSender.volume`."""
        self._sender.volume(header, rows, self._loop.time())
        self._pump()

    def more(self, tick: int, rows: Buffer) -> None:
        """As :meth:`LinkSender.more`."""
        self._sender.more(tick, rows, self._loop.time())
        self._pump()

    def handle(self, event: Event) -> None:
        """Tell the policy what the executor did."""
        self._sender.handle(event, self._loop.time())
        self._go_on()

    def _go_on(self) -> None:
        """Something has happened that what waits, if anything does, may have waited for."""
        if self._sender.waiting:
            self._pump()

    def _pump(self) -> None:
        """Send what may be sent now, a batch at a time, and set the timer for what comes next."""
        if self._closed:
            return
        now = self._loop.time()
        self._greet(now)
        batch = self._sender.poll(now, self._ready(), _BATCH)
        for out in batch:
            self._send(out)
        self._beat(now)
        self._look(now)
        if len(batch) == _BATCH and self._pumping is None:
            self._pumping = self._loop.call_soon(self._pump_more)
        self._set_timer(now)

    def _pump_more(self) -> None:
        self._pumping = None
        self._pump()

    def _ready(self) -> list[Lane]:
        return [
            lane
            for lane in BOTH_LANES
            if self._connections[lane].welcome and not self._connections[lane].channel.congested
        ]

    def _send(self, out: Outgoing) -> None:
        self._say(out.lane, out.message, out.payload)

    def _say(self, lane: Lane, message: DataMessage, payload: Buffer | None = None) -> None:
        try:
            self._connections[lane].channel.send(message, payload)
        except MolinkError:
            # The connection has just broken: what counts is kept, and sent again after a hello.
            self._connections[lane].welcome = False
            self._sender.disconnected(lane, self._loop.time())

    def _set_timer(self, now: float) -> None:
        wakes = [now + _LOOK_INTERVAL]
        if self._connections[Lane.DECODE].welcome:
            wakes.append(self._next_beat(now))
        if self._sender.wake_at is not None:
            wakes.append(self._sender.wake_at)
        for each in self._connections.values():
            if each.connected and not each.welcome:
                wakes.append(each.hello_at + HELLO_INTERVAL)
        at = max(min(wakes), now + _MIN_PAUSE)
        # One that is set for earlier looks again then.
        if self._timer is None or at < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(at, self._pump_again)

    def _pump_again(self) -> None:
        self._timer = None
        self._pump()

    # --- connections -------------------------------------------------------------------------

    def _events(self, lane: Lane) -> ChannelEvents:
        return ChannelEvents(
            on_message=lambda message, _: self._message(lane, message),
            on_connect=lambda: self._connected(lane),
            on_disconnect=lambda: self._disconnected(lane),
            on_drained=self._pump,
        )

    def _connected(self, lane: Lane) -> None:
        connection = self._connections[lane]
        connection.connected = True
        connection.welcome = False
        connection.hello_at = self._loop.time() - HELLO_INTERVAL
        self._connects += 1
        self._pump()

    def _disconnected(self, lane: Lane) -> None:
        connection = self._connections[lane]
        connection.connected = connection.welcome = False
        self._sender.disconnected(lane, self._loop.time())

    def _greet(self, now: float) -> None:
        """Say which link this is wherever the next stage doesn't know it yet."""
        for lane, each in self._connections.items():
            if each.connected and not each.welcome and now >= each.hello_at + HELLO_INTERVAL:
                each.hello_at = now
                hello = LinkHello(self._pipeline, self._sender.epoch, self._from_stage, lane)
                self._say(lane, hello)

    def _message(self, lane: Lane, message: DataMessage) -> None:
        now = self._loop.time()
        if isinstance(message, Ack):
            self._acknowledged(lane, message, now)
        elif isinstance(message, Beat) and message.epoch == self._sender.epoch:
            self.liveness.beat(message.completed, message.queued, message.predicted, now)
            if self._sender.beat_back(message.echo, now):
                self._report(now)
        self._go_on()

    def _acknowledged(self, lane: Lane, ack: Ack, now: float) -> None:
        connection = self._connections[lane]
        if ack.epoch != self._sender.epoch or ack.lane is not lane or not connection.connected:
            return
        if ack.next < self._sender.base(lane):
            self._die(f"it lost its place: frame {ack.next} of {lane.name} has come before")
            return
        if not connection.welcome:
            connection.welcome = True
            if ack.next > self._sender.base(lane):
                self._take(ack, now)
            self._sender.reconnected(lane, now)
            if lane is Lane.BULK:
                self._try_out(now)
            self._tell(now)
            self._pump()
        else:
            self._take(ack, now)
            self._tell(now)

    def _take(self, ack: Ack, now: float) -> None:
        was_full = self._sender.full
        self._sender.ack(ack, now)
        if was_full and not self._sender.full:
            self._on_room()

    # --- what the link is like ---------------------------------------------------------------

    def _try_out(self, now: float) -> None:
        """Find out the rate of a new link before anything depends on it."""
        if self._probe and self._sender.estimator.facts(now).rate is None:
            noise = random.Random(self._sender.epoch)
            for _ in range(_PROBES):
                self._sender.probe(noise.randbytes(_PROBE_BYTES))
        self._probe = False

    def _tell(self, now: float) -> None:
        """The policy hears of what has changed noticeably."""
        news = self._sender.estimator.news(now)
        if news is not None:
            self._sender.handle(news, now)
            self._report(now)

    def _report(self, now: float) -> None:
        if self._on_estimate is not None:
            self._on_estimate(self._sender.estimator.facts(now))

    # --- signs of life -----------------------------------------------------------------------

    def _next_beat(self, now: float) -> float:
        """When to beat. Asks for our progress, which is not free, only once a beat may be due."""
        soonest = self._beats.next_at(busy=True)
        return soonest if now < soonest else self._beats.next_at(self._progress().busy)

    def _beat(self, now: float) -> None:
        if not self._connections[Lane.DECODE].welcome or now < self._next_beat(now):
            return
        progress = self._progress()
        self._beats.beat(now)
        beat = Beat(
            self._sender.epoch,
            progress.completed,
            progress.queued,
            sent_at=now,
            predicted=progress.predicted,
        )
        self._sender.estimator.beat_left(now)
        self._tell(now)
        self._say(Lane.DECODE, beat)

    def _look(self, now: float) -> None:
        reason = self.liveness.death(now)
        if reason is not None:
            self._die(reason)
        elif self.liveness.stalled(now):
            for connection in self._connections.values():
                connection.channel.redial()

    def _die(self, reason: str) -> None:
        if not self._dead:
            self._dead = True
            self._on_dead(reason)

    @property
    def stats(self) -> LinkStats:
        """What happened so far."""
        sender = self._sender
        estimate = sender.estimator.estimate(self._loop.time())
        return LinkStats(
            connects=self._connects,
            sent_frames=sender.sent_frames,
            sent_bytes=sender.sent_bytes,
            plain_bytes=sender.packing.plain_bytes,
            packed_bytes=sender.packing.packed_bytes,
            resent=sender.resent,
            stale_acks=sender.stale_acks,
            queued_bytes=sender.queued_bytes,
            unacknowledged_bytes=sender.unacknowledged_bytes,
            rtt=estimate.rtt,
            min_rtt=estimate.min_rtt,
            rate=estimate.rate or 0.0,
        )
