"""The sending end of a link: two channels to the next stage and the timers, around a LinkSender.

It does no I/O itself, and all its methods belong to one thread: that of its timers. What to send,
when, and whether the next stage is dead is decided by :mod:`molink.link.sender` and
:mod:`molink.link.heartbeat`. The other end is :mod:`molink.link.incoming`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from molink.errors import MolinkError
from molink.facts.ringtimes import LinkFacts
from molink.link.ends import Channel, ChannelEvents, Connect, LinkName, Timer, Timers
from molink.link.heartbeat import BeatClock, Liveness, StageProgress
from molink.link.policies.base import Event
from molink.link.sender import BOTH_LANES, LinkSender
from molink.link.stats import LinkStats
from molink.link.warmth import Warmth
from molink.wire.messages.codec import Buffer, DataMessage
from molink.wire.messages.data import Ack, Beat, Lane, RingBody, Volume

#: Seconds until a hello is repeated that the next stage hasn't answered: it may not be that far.
HELLO_INTERVAL = 0.25
#: Seconds until the next look at what was due already and could not be done.
_OVERDUE_PAUSE = 0.001
#: Messages sent before others on the same thread get their turn.
_BATCH = 16
#: Messages that leave before the channels are asked again whether they take more.
_BURST = 2
#: Messages that a link of unknown rate is tried out with, and the bytes of one that says nothing.
_PROBES = 16
_PROBE_BYTES = 16 * 1024


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class OutLinkEvents:
    """What an outgoing link asks of its stage, and tells it.

    ``progress`` says how the stage itself gets on. ``on_dead`` is told, once, why the next one is
    dead; ``on_room`` is called when the link is not ``full`` any more; ``on_estimate`` is told what
    is known of the link, again and again.
    """

    progress: Callable[[], StageProgress]
    on_dead: Callable[[str], None]
    on_room: Callable[[], None] = _nothing
    on_estimate: Callable[[LinkFacts], None] = _nothing


@dataclass(slots=True)
class _LaneConnection:
    channel: Channel
    connected: bool = False
    hello_at: float = 0.0


class OutLink:
    """Sends what its stage produces to the next stage, for one epoch."""

    def __init__(
        self,
        timers: Timers,
        connect: Connect,
        sender: LinkSender,
        name: LinkName,
        events: OutLinkEvents,
        *,
        probe: bool = False,
        keep_warm: bool = False,
    ) -> None:
        """``connect`` makes a lane's channel, which is somebody else's to close.

        With ``probe``, a link of unknown rate is tried out at once. With ``keep_warm``, TCP forgets
        what it has learnt of the link in a pause, and is kept from that while prompts come often.
        """
        self._timers = timers
        self._sender = sender
        self._name = name
        self._events = events
        self._connections = {
            lane: _LaneConnection(connect(lane, self._channel_events(lane))) for lane in BOTH_LANES
        }
        #: Lanes on whose connections the next stage has answered our hello.
        self._welcome: tuple[Lane, ...] = ()
        self._all_welcome = False
        now = timers.time()
        self._beats = BeatClock(now)
        #: Whether requests lived when a beat was last due, and when that was.
        self._lively = False
        self._asked_at = now
        self.liveness = Liveness(now)
        self._probe = probe
        self._warmth = Warmth() if keep_warm else None
        self._connects = 0
        self._timer: Timer | None = None
        #: When the timer is set for.
        self._timer_at = 0.0
        self._pumping: Timer | None = None
        self._dead = False
        self._closed = False

    # --- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect."""
        for connection in self._connections.values():
            connection.channel.start()
        self._pump()

    def close(self) -> None:
        """Send nothing more; what has not been acknowledged is dropped."""
        self._closed = True
        for timer in (self._timer, self._pumping):
            if timer is not None:
                timer.cancel()

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
        now = self._timers.time()
        self._sender.volume(header, rows, now)
        if self._warmth is not None and header.prefill:
            self._warmth.prefill(now)
        self._pump()

    def more(self, tick: int, rows: Buffer) -> None:
        """As :meth:`LinkSender.more`."""
        self._sender.more(tick, rows, self._timers.time())
        self._pump()

    def handle(self, event: Event) -> None:
        """Tell the policy what the executor did."""
        self._sender.handle(event, self._timers.time())
        if self._lively:
            self._go_on()
        else:
            self._pump()  # it may be time to beat more often

    def _go_on(self) -> None:
        """Something has happened that what waits, if anything does, may have waited for."""
        if self._sender.waiting:
            self._pump()

    def _pump(self) -> None:
        """Send what may be sent now, a batch at a time, and set the timer for what comes next."""
        if self._closed:
            return
        now = self._timers.time()
        self._greet(now)
        more = self._sender.due(now) and self._send_batch(now)
        self._beat(now)
        self._look(now)
        if more and self._pumping is None:
            self._pumping = self._timers.call_soon(self._pump_more)
        self._set_timer(now)

    def _pump_more(self) -> None:
        self._pumping = None
        self._pump()

    def _send_batch(self, now: float) -> bool:
        """Send what may be sent; whether there may be more than a batch of it."""
        for _ in range(_BATCH // _BURST):
            burst = self._sender.poll(now, self._ready(), _BURST)
            for packet in burst:
                self._say(packet.lane, packet.frame, packet.payload)
                if self._warmth is not None and packet.lane is Lane.BULK:
                    self._warmth.sent(now)
            if len(burst) < _BURST:
                return False
        return True

    def _ready(self) -> list[Lane]:
        return [lane for lane in self._welcome if not self._connections[lane].channel.congested]

    def _say(self, lane: Lane, message: DataMessage, payload: Buffer | None = None) -> None:
        try:
            self._connections[lane].channel.send(message, payload)
        except MolinkError:
            # The connection has just broken: what counts is kept, and sent again after a hello.
            self._set_welcome(lane, False)
            self._sender.disconnected(lane, self._timers.time())

    def _set_timer(self, now: float) -> None:
        wakes = [self.liveness.next_look(now)]
        if Lane.DECODE in self._welcome:
            wakes.append(self._next_beat(now))
        if self._sender.wake_at is not None:
            wakes.append(self._sender.wake_at)
        for _, each in self._unwelcome():
            wakes.append(each.hello_at + HELLO_INTERVAL)
        wake = min(wakes)
        at = wake if wake > now else now + _OVERDUE_PAUSE
        # One that is set for earlier looks again then.
        if self._timer is None or at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at = self._timers.call_at(at, self._pump_again), at

    def _pump_again(self) -> None:
        self._timer = None
        self._pump()

    # --- connections -------------------------------------------------------------------------

    def _channel_events(self, lane: Lane) -> ChannelEvents:
        return ChannelEvents(
            on_message=lambda message, _: self._message(lane, message),
            on_connect=lambda: self._connected(lane),
            on_disconnect=lambda: self._disconnected(lane),
            on_drained=self._pump,
            on_gone=self._die,
        )

    def _connected(self, lane: Lane) -> None:
        connection = self._connections[lane]
        connection.connected = True
        self._set_welcome(lane, False)
        connection.hello_at = self._timers.time() - HELLO_INTERVAL
        self._connects += 1
        self._pump()

    def _disconnected(self, lane: Lane) -> None:
        self._connections[lane].connected = False
        self._set_welcome(lane, False)
        self._sender.disconnected(lane, self._timers.time())

    def _set_welcome(self, lane: Lane, welcome: bool) -> None:
        lanes = {*self._welcome, lane} if welcome else {*self._welcome} - {lane}
        self._welcome = tuple(each for each in BOTH_LANES if each in lanes)
        self._all_welcome = len(lanes) == len(BOTH_LANES)

    def _unwelcome(self) -> list[tuple[Lane, _LaneConnection]]:
        """Connections on which the next stage doesn't know yet which link this is."""
        if self._all_welcome:
            return []
        others = [lane for lane in BOTH_LANES if lane not in self._welcome]
        every = [(lane, self._connections[lane]) for lane in others]
        return [(lane, each) for lane, each in every if each.connected]

    def _greet(self, now: float) -> None:
        """Say which link this is wherever the next stage doesn't know it yet."""
        for lane, each in self._unwelcome():
            if now >= each.hello_at + HELLO_INTERVAL:
                each.hello_at = now
                self._say(lane, self._name.hello(self._sender.epoch, lane))

    def _message(self, lane: Lane, message: DataMessage) -> None:
        now = self._timers.time()
        if isinstance(message, Ack):
            self._acknowledged(lane, message, now)
        elif isinstance(message, Beat) and message.epoch == self._sender.epoch:
            self.liveness.beat(message.completed, message.queued, message.predicted, now)
            if self._sender.beat_back(message.echo, now):
                self._tell(now, anyway=True)
        self._go_on()

    def _acknowledged(self, lane: Lane, ack: Ack, now: float) -> None:
        connection = self._connections[lane]
        if ack.epoch != self._sender.epoch or ack.lane is not lane or not connection.connected:
            return
        if lane not in self._welcome:
            if ack.next < self._sender.base(lane):
                self._die(f"it lost its place: frame {ack.next} of {lane.name} has come before")
                return
            self._set_welcome(lane, True)
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
            self._events.on_room()

    # --- what the link is like ---------------------------------------------------------------

    def _try_out(self, now: float) -> None:
        """Find out the rate of a new link before anything depends on it."""
        if self._probe and self._sender.estimator.facts(now).rate is None:
            self._send_noise(_PROBES * _PROBE_BYTES)
        self._probe = False

    def _send_noise(self, nbytes: int) -> None:
        noise = random.Random(self._sender.epoch)
        for begin in range(0, nbytes, _PROBE_BYTES):
            self._sender.probe(noise.randbytes(min(_PROBE_BYTES, nbytes - begin)))

    def _keep_warm(self, warmth: Warmth, now: float) -> None:
        """While requests live; unless something is on the bulk lane, or waits for it."""
        sender = self._sender
        if sender.in_flight_on(Lane.BULK) or sender.queued_on(Lane.BULK):
            return
        if nbytes := warmth.due(sender.estimator.estimate(now), now):
            self._send_noise(nbytes)
            self._send_batch(now)

    def _tell(self, now: float, anyway: bool = False) -> None:
        """The policy hears of what has changed noticeably; the stage too, or ``anyway``."""
        news = self._sender.estimator.news(now)
        if news is not None:
            self._sender.handle(news, now)
        if news is not None or anyway:
            self._events.on_estimate(self._sender.estimator.facts(now))

    # --- signs of life -----------------------------------------------------------------------

    def _next_beat(self, now: float) -> float:
        """When to beat, if that was not now: no request lives where it could have been."""
        soonest = self._beats.next_at(busy=True)
        if now < soonest and not self._lively and self._asked_at < now:
            lively = self._events.progress().busy
        else:
            lively = self._lively and now < soonest
        return soonest if lively else self._beats.next_at(busy=False)

    def _beat(self, now: float) -> None:
        if now < self._beats.next_at(busy=True) or Lane.DECODE not in self._welcome:
            return
        progress = self._events.progress()  # which is not free
        self._lively, self._asked_at = progress.busy, now
        if now < self._beats.next_at(progress.busy):
            return
        self._beats.beat(now)
        beat = Beat(
            self._sender.epoch,
            progress.completed,
            progress.queued,
            sent_at=now,
            predicted=progress.predicted,
        )
        self._sender.estimator.beat_left(now)
        self._say(Lane.DECODE, beat)
        if self._warmth is not None and progress.busy:
            self._keep_warm(self._warmth, now)

    def _look(self, now: float) -> None:
        # Whether requests live is not free to ask for, and seldom matters.
        quiet = self.liveness.quiet(now)
        busy = quiet and self._events.progress().busy
        reason = self.liveness.death(now, busy)
        if reason is not None:
            self._die(reason)
        elif quiet and self.liveness.stalled(now, busy):
            for connection in self._connections.values():
                connection.channel.redial()

    def _die(self, reason: str) -> None:
        if not self._dead:
            self._dead = True
            self._events.on_dead(reason)

    @property
    def stats(self) -> LinkStats:
        """What happened so far."""
        sender = self._sender
        estimate = sender.estimator.estimate(self._timers.time())
        return LinkStats(
            connects=self._connects,
            sent_frames=sender.sent_frames,
            sent_bytes=sender.sent_bytes,
            plain_bytes=sender.packing.plain_bytes,
            packed_bytes=sender.packing.packed_bytes,
            resent=sender.resent,
            stale_acks=sender.stale_acks,
            queued=(sender.queued_on(Lane.DECODE), sender.queued_on(Lane.BULK)),
            in_flight=(sender.in_flight_on(Lane.DECODE), sender.in_flight_on(Lane.BULK)),
            rtt=estimate.rtt,
            min_rtt=estimate.min_rtt,
            rate=estimate.rate or 0.0,
        )
