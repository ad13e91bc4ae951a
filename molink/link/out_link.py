"""The sending end of a link: two connections to the next stage, timers and a LinkSender.

It does no I/O; all methods run on the thread of its timers. :mod:`molink.link.sender` decides what
to send and when, :mod:`molink.link.heartbeat` whether the next stage is dead. The other end is
:mod:`molink.link.in_link`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from molink.errors import MolinkError
from molink.facts.ring_times import LinkFacts
from molink.link.base import Connect, LinkName, OutConnection, OutConnectionEvents, Timer, Timers
from molink.link.heartbeat import HeartbeatClock, LinkLiveness, StageProgress
from molink.link.policies.base import LinkEstimatedEvent, LinkEvent
from molink.link.sender import BOTH_CHANNELS, LinkSender
from molink.wire.messages.codec import Buffer, DataMessage
from molink.wire.messages.data_plane import Ack, Channel, Heartbeat, RingMessage, Volume


@dataclass(slots=True)
class LinkStats:
    """Counters and gauges of a link."""

    connects: int = 0
    sent_frames: int = 0
    sent_bytes: int = 0
    #: Bytes of volume rows before and after packing.
    plain_bytes: int = 0
    packed_bytes: int = 0
    resent: int = 0
    stale_acks: int = 0
    #: Bytes of the decode and the bulk channel: unsent, and unacknowledged.
    queued: tuple[int, int] = (0, 0)
    in_flight: tuple[int, int] = (0, 0)
    #: Latency in seconds and rate in bytes/s; 0 if unknown.
    rtt: float = 0.0
    min_rtt: float = 0.0
    rate: float = 0.0

    @property
    def queued_bytes(self) -> int:
        """Unsent bytes of both channels."""
        return sum(self.queued)

    @property
    def unacknowledged_bytes(self) -> int:
        """Unacknowledged bytes of both channels."""
        return sum(self.in_flight)

    @property
    def counters(self) -> dict[str, float]:
        """Counters by the names of ``/metrics``."""
        return {
            "link_sent_frames_total": float(self.sent_frames),
            "link_sent_bytes_total": float(self.sent_bytes),
            "link_plain_bytes_total": float(self.plain_bytes),
            "link_packed_bytes_total": float(self.packed_bytes),
            "link_resent_frames_total": float(self.resent),
            "link_connects_total": float(self.connects),
        }

    @property
    def gauges(self) -> dict[str, float]:
        """Gauges by the names of ``/metrics``."""
        return {
            "link_rtt_seconds": self.rtt,
            "link_latency_seconds": self.min_rtt / 2,
            "link_rate_bytes_per_second": self.rate,
            "link_queued_decode_bytes": float(self.queued[0]),
            "link_queued_bulk_bytes": float(self.queued[1]),
            "link_unacknowledged_decode_bytes": float(self.in_flight[0]),
            "link_unacknowledged_bulk_bytes": float(self.in_flight[1]),
        }


#: Seconds without bulk traffic before padding. TCP's retransmission timeout is at least 0.2 s.
IDLE_PAUSE = 0.19
#: Seconds of the link's rate per padding: 1/40 of the rate at :data:`IDLE_PAUSE`.
SHARE_S = 0.005
#: Bounds of one padding in bytes; a new connection's window is 14 KB anyway.
MIN_BYTES = 32 * 1024
MAX_BYTES = 256 * 1024
#: Minimum round trip in seconds for which slow start is worth avoiding.
MIN_RTT = 0.008
#: Padding stops this many seconds after the last prompt.
MAX_PROMPT_GAP = 10.0


class TcpKeepWarm:
    """Keeps the TCP congestion window of a bulk channel from shrinking while idle.

    Linux halves the window for each retransmission timeout without traffic (RFC 2861,
    ``tcp_slow_start_after_idle``), and reduces it if traffic doesn't fill it. The next prompt would
    then need a round trip per doubling.
    """

    def __init__(self) -> None:
        self._prefill_at = self._bulk_at = float("-inf")

    def on_prefill(self, now: float) -> None:
        """Record a prompt on this link."""
        self._prefill_at = now

    def on_sent(self, now: float) -> None:
        """Record a message on the bulk channel."""
        self._bulk_at = now

    def due_bytes(self, estimate: LinkEstimatedEvent, now: float) -> int:
        """Bytes of padding to send now if the channel is idle and requests live; 0 for none."""
        if now - self._bulk_at < IDLE_PAUSE or now - self._prefill_at > MAX_PROMPT_GAP:
            return 0
        nbytes = int(SHARE_S * (estimate.rate or 0.0))
        if nbytes < MIN_BYTES or estimate.min_rtt < MIN_RTT:
            return 0
        return min(nbytes, MAX_BYTES)


#: Seconds between unanswered hellos; the next stage may not be ready.
HELLO_INTERVAL = 0.25
#: Seconds until an overdue action is retried.
_OVERDUE_PAUSE = 0.001
#: Messages sent before other callbacks run.
_BATCH = 16
#: Messages sent before congestion is checked again.
_BURST = 2
#: Number of messages that probe a link of unknown rate, and bytes of each.
_PROBE_MESSAGES = 16
_PROBE_BYTES = 16 * 1024


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class OutLinkEvents:
    """Callbacks of an outgoing link.

    ``progress`` returns the stage's progress. ``on_dead`` is called once, with the reason why the
    next stage counts as dead; ``on_writable`` when the link is no longer full; ``on_estimate`` with
    each estimate.
    """

    progress: Callable[[], StageProgress]
    on_dead: Callable[[str], None]
    on_writable: Callable[[], None] = _nothing
    on_estimate: Callable[[LinkFacts], None] = _nothing


@dataclass(slots=True)
class _ChannelConnection:
    connection: OutConnection
    is_connected: bool = False
    hello_at: float = 0.0


class OutLink:
    """Sends a stage's output to the next stage, for one epoch."""

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
        """Set up a link that is not started.

        ``connect`` creates a channel's connection, which the caller closes. ``probe`` measures a
        link of unknown rate at once. ``keep_warm`` sends padding if TCP would lose its congestion
        window while idle.
        """
        self._timers = timers
        self._sender = sender
        self._name = name
        self._events = events
        self._connections = {
            channel: _ChannelConnection(connect(channel, self._connection_events(channel)))
            for channel in BOTH_CHANNELS
        }
        #: Channels whose hello the next stage has answered.
        self._accepted: tuple[Channel, ...] = ()
        self._all_accepted = False
        now = timers.time()
        self._heartbeats = HeartbeatClock(now)
        #: Whether requests were live when a heartbeat was last due, and that time.
        self._has_requests = False
        self._asked_progress_at = now
        self.liveness = LinkLiveness(now)
        self._probe = probe
        self._tcp_keep_warm = TcpKeepWarm() if keep_warm else None
        self._connects = 0
        self._timer: Timer | None = None
        #: When the timer fires.
        self._timer_at = 0.0
        self._batch_timer: Timer | None = None
        self._is_dead = False
        self._is_closed = False

    # --- lifecycle -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to connect."""
        for connection in self._connections.values():
            connection.connection.start()
        self._send_due()

    def close(self) -> None:
        """Stop sending and drop unacknowledged messages."""
        self._is_closed = True
        for timer in (self._timer, self._batch_timer):
            if timer is not None:
                timer.cancel()

    # --- sending ---------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the stage should pause because the next one is behind."""
        return self._sender.is_full

    def send_control(self, body: RingMessage, payload: Buffer | None = None) -> None:
        """As :meth:`LinkSender.queue_control`."""
        self._sender.queue_control(body, payload)
        self._send_due()

    def send_volume(self, header: Volume, rows: Buffer) -> None:
        """As :meth:`LinkSender.queue_volume`."""
        now = self._timers.time()
        self._sender.queue_volume(header, rows, now)
        if self._tcp_keep_warm is not None and header.prefill:
            self._tcp_keep_warm.on_prefill(now)
        self._send_due()

    def send_more_rows(self, seq: int, rows: Buffer) -> None:
        """As :meth:`LinkSender.queue_rows`."""
        self._sender.queue_rows(seq, rows, self._timers.time())
        self._send_due()

    def handle_event(self, event: LinkEvent) -> None:
        """Pass an executor event to the policy."""
        self._sender.handle(event, self._timers.time())
        if self._has_requests:
            self._retry_queued()
        else:
            self._send_due()  # heartbeats may now be due more often

    def _retry_queued(self) -> None:
        """Retry queued messages after a state change."""
        if self._sender.has_waiting:
            self._send_due()

    def _send_due(self) -> None:
        """Send a batch of messages that may go now, and set the timer."""
        if self._is_closed:
            return
        now = self._timers.time()
        self._send_hellos(now)
        has_more = self._sender.has_due(now) and self._send_batch(now)
        self._send_heartbeat(now)
        self._check_liveness(now)
        if has_more and self._batch_timer is None:
            self._batch_timer = self._timers.call_soon(self._send_more)
        self._set_timer(now)

    def _send_more(self) -> None:
        self._batch_timer = None
        self._send_due()

    def _send_batch(self, now: float) -> bool:
        """Send a batch; return whether more may go now."""
        for _ in range(_BATCH // _BURST):
            burst = self._sender.poll_packets(now, self._ready_channels(), _BURST)
            for packet in burst:
                self._send_message(packet.channel, packet.frame, packet.payload)
                if self._tcp_keep_warm is not None and packet.channel is Channel.BULK:
                    self._tcp_keep_warm.on_sent(now)
            if len(burst) < _BURST:
                return False
        return True

    def _ready_channels(self) -> list[Channel]:
        return [
            channel
            for channel in self._accepted
            if not self._connections[channel].connection.is_congested
        ]

    def _send_message(
        self, channel: Channel, message: DataMessage, payload: Buffer | None = None
    ) -> None:
        try:
            self._connections[channel].connection.send(message, payload)
        except MolinkError:
            # The connection has just broken; the message is sent again after a hello.
            self._set_accepted(channel, False)
            self._sender.on_disconnected(channel, self._timers.time())

    def _set_timer(self, now: float) -> None:
        wakes = [self.liveness.next_check(now)]
        if Channel.DECODE in self._accepted:
            wakes.append(self._next_heartbeat_at(now))
        if self._sender.wake_at is not None:
            wakes.append(self._sender.wake_at)
        for _, each in self._unaccepted():
            wakes.append(each.hello_at + HELLO_INTERVAL)
        wake = min(wakes)
        at = wake if wake > now else now + _OVERDUE_PAUSE
        # An earlier timer will run the check again.
        if self._timer is None or at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at = self._timers.call_at(at, self._on_timer), at

    def _on_timer(self) -> None:
        self._timer = None
        self._send_due()

    # --- connections -----------------------------------------------------------------------------

    def _connection_events(self, channel: Channel) -> OutConnectionEvents:
        return OutConnectionEvents(
            on_message=lambda message, _: self._on_message(channel, message),
            on_connect=lambda: self._on_connected(channel),
            on_disconnect=lambda: self._on_disconnected(channel),
            on_drained=self._send_due,
            on_lost=self._declare_dead,
        )

    def _on_connected(self, channel: Channel) -> None:
        connection = self._connections[channel]
        connection.is_connected = True
        self._set_accepted(channel, False)
        connection.hello_at = self._timers.time() - HELLO_INTERVAL
        self._connects += 1
        self._send_due()

    def _on_disconnected(self, channel: Channel) -> None:
        self._connections[channel].is_connected = False
        self._set_accepted(channel, False)
        self._sender.on_disconnected(channel, self._timers.time())

    def _set_accepted(self, channel: Channel, accepted: bool) -> None:
        channels = {*self._accepted, channel} if accepted else {*self._accepted} - {channel}
        self._accepted = tuple(each for each in BOTH_CHANNELS if each in channels)
        self._all_accepted = len(channels) == len(BOTH_CHANNELS)

    def _unaccepted(self) -> list[tuple[Channel, _ChannelConnection]]:
        """Connections without an answered hello."""
        if self._all_accepted:
            return []
        others = [channel for channel in BOTH_CHANNELS if channel not in self._accepted]
        every = [(channel, self._connections[channel]) for channel in others]
        return [(channel, each) for channel, each in every if each.is_connected]

    def _send_hellos(self, now: float) -> None:
        """Send a hello on each connection that needs one."""
        for channel, each in self._unaccepted():
            if now >= each.hello_at + HELLO_INTERVAL:
                each.hello_at = now
                self._send_message(channel, self._name.make_hello(self._sender.epoch, channel))

    def _on_message(self, channel: Channel, message: DataMessage) -> None:
        now = self._timers.time()
        if isinstance(message, Ack):
            self._on_ack(channel, message, now)
        elif isinstance(message, Heartbeat) and message.epoch == self._sender.epoch:
            self.liveness.on_heartbeat(
                message.completed_seq, message.queued, message.predicted_s, now
            )
            if self._sender.on_heartbeat_echoed(message.echo, now):
                self._report_estimate(now, force=True)
        self._retry_queued()

    def _on_ack(self, channel: Channel, ack: Ack, now: float) -> None:
        connection = self._connections[channel]
        if (
            ack.epoch != self._sender.epoch
            or ack.channel is not channel
            or not connection.is_connected
        ):
            return
        if channel not in self._accepted:
            if ack.next_frame < self._sender.oldest_frame(channel):
                self._declare_dead(
                    f"it lost its state: frame {ack.next_frame} of {channel.name} again"
                )
                return
            self._set_accepted(channel, True)
            if ack.next_frame > self._sender.oldest_frame(channel):
                self._apply_ack(ack, now)
            self._sender.on_connected(channel, now)
            if channel is Channel.BULK:
                self._probe_rate(now)
            self._report_estimate(now)
            self._send_due()
        else:
            self._apply_ack(ack, now)
            self._report_estimate(now)

    def _apply_ack(self, ack: Ack, now: float) -> None:
        was_full = self._sender.is_full
        self._sender.on_ack(ack, now)
        if was_full and not self._sender.is_full:
            self._events.on_writable()

    # --- link estimate ---------------------------------------------------------------------------

    def _probe_rate(self, now: float) -> None:
        """Measure the rate of a new link before anything depends on it."""
        if self._probe and self._sender.estimator.current_facts(now).rate is None:
            self._send_padding(_PROBE_MESSAGES * _PROBE_BYTES)
        self._probe = False

    def _send_padding(self, nbytes: int) -> None:
        padding = random.Random(self._sender.epoch)
        for begin in range(0, nbytes, _PROBE_BYTES):
            self._sender.queue_padding(padding.randbytes(min(_PROBE_BYTES, nbytes - begin)))

    def _keep_warm(self, tcp_keep_warm: TcpKeepWarm, now: float) -> None:
        """Send padding if it is due and the bulk channel is idle."""
        sender = self._sender
        if sender.in_flight_on(Channel.BULK) or sender.queued_on(Channel.BULK):
            return
        if nbytes := tcp_keep_warm.due_bytes(sender.estimator.current_estimate(now), now):
            self._send_padding(nbytes)
            self._send_batch(now)

    def _report_estimate(self, now: float, force: bool = False) -> None:
        """Report a noticeable change to the policy and the stage.

        With ``force``, report to the stage in any case.
        """
        change = self._sender.estimator.poll_change(now)
        if change is not None:
            self._sender.handle(change, now)
        if change is not None or force:
            self._events.on_estimate(self._sender.estimator.current_facts(now))

    # --- heartbeats ------------------------------------------------------------------------------

    def _next_heartbeat_at(self, now: float) -> float:
        """Return when the next heartbeat is due if none was due now."""
        soonest = self._heartbeats.next_at(has_requests=True)
        if now < soonest and not self._has_requests and self._asked_progress_at < now:
            lively = self._events.progress().has_requests
        else:
            lively = self._has_requests and now < soonest
        return soonest if lively else self._heartbeats.next_at(has_requests=False)

    def _send_heartbeat(self, now: float) -> None:
        if (
            now < self._heartbeats.next_at(has_requests=True)
            or Channel.DECODE not in self._accepted
        ):
            return
        progress = self._events.progress()  # expensive
        self._has_requests, self._asked_progress_at = progress.has_requests, now
        if now < self._heartbeats.next_at(progress.has_requests):
            return
        self._heartbeats.mark_sent(now)
        heartbeat = Heartbeat(
            self._sender.epoch,
            progress.completed_seq,
            progress.num_queued,
            sent_at=now,
            predicted_s=progress.predicted_s,
        )
        self._sender.estimator.on_heartbeat_sent(now)
        self._send_message(Channel.DECODE, heartbeat)
        if self._tcp_keep_warm is not None and progress.has_requests:
            self._keep_warm(self._tcp_keep_warm, now)

    def _check_liveness(self, now: float) -> None:
        # Whether requests are live is expensive to query and rarely needed.
        is_quiet = self.liveness.is_quiet(now)
        has_requests = is_quiet and self._events.progress().has_requests
        reason = self.liveness.death_reason(now, has_requests)
        if reason is not None:
            self._declare_dead(reason)
        elif is_quiet and self.liveness.should_reconnect(now, has_requests):
            for connection in self._connections.values():
                connection.connection.reconnect_now()

    def _declare_dead(self, reason: str) -> None:
        if not self._is_dead:
            self._is_dead = True
            self._events.on_dead(reason)

    @property
    def stats(self) -> LinkStats:
        """Current counters and gauges."""
        sender = self._sender
        estimate = sender.estimator.current_estimate(self._timers.time())
        return LinkStats(
            connects=self._connects,
            sent_frames=sender.sent_frames,
            sent_bytes=sender.sent_bytes,
            plain_bytes=sender.packing.plain_bytes,
            packed_bytes=sender.packing.packed_bytes,
            resent=sender.num_resent,
            stale_acks=sender.stale_acks,
            queued=(sender.queued_on(Channel.DECODE), sender.queued_on(Channel.BULK)),
            in_flight=(sender.in_flight_on(Channel.DECODE), sender.in_flight_on(Channel.BULK)),
            rtt=estimate.rtt,
            min_rtt=estimate.min_rtt,
            rate=estimate.rate or 0.0,
        )
