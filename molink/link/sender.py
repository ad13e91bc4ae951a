"""The sending end of a link, without I/O: what the policy decides becomes numbered frames."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from molink.errors import InvariantError, MessageTooLarge, Overloaded
from molink.link.estimate.estimator import LinkEstimator
from molink.link.link_queues import LinkQueues, UnsentVolume
from molink.link.packing.base import MessagePacker, Packer
from molink.link.policies.base import (
    ChannelPolicy,
    ChannelReconnectedEvent,
    HeartbeatEchoedEvent,
    LinkEstimatedEvent,
    LinkEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
    SendRowsAction,
)
from molink.link.send_window import Packet, SendWindow, header_fits
from molink.wire.messages.codec import MAX_HEADER, Buffer
from molink.wire.messages.data_plane import Ack, Channel, RingMessage, Volume

BOTH_CHANNELS = (Channel.DECODE, Channel.BULK)


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """Bounds of a link's memory and messages, in bytes and seconds."""

    #: Payload of one message.
    max_message_bytes: int = 192 * 1024
    #: Not acknowledged on one channel; more is not sent.
    max_unacknowledged_bytes: int = 8 << 20
    #: Waiting and not acknowledged in all; above it the link is ``full``, at twice it refuses.
    max_total_bytes: int = 64 << 20
    #: A channel that is connected but acknowledges nothing for so long sends everything again.
    resend_after: float = 10.0


class LinkSender:
    """Numbers, cuts, sends, keeps and sends again; one object per epoch.

    Control messages go first, on the decode channel; volumes when the policy says so, each on its
    channel: prefill rows on the bulk channel, decode rows on the decode channel, or all on the bulk
    channel if the policy has one for both.
    """

    def __init__(
        self,
        epoch: int,
        policy: ChannelPolicy,
        limits: SenderLimits | None = None,
        packer: Packer | None = None,
        estimator: LinkEstimator | None = None,
    ) -> None:
        self.epoch = epoch
        self._policy = policy
        self._limits = limits or SenderLimits()
        self.packing = MessagePacker(packer)
        #: Learns from what is sent and acknowledged; whoever sends heartbeats tells it of them.
        self.estimator = estimator or LinkEstimator()
        self._channels = {channel: SendWindow(epoch, channel) for channel in BOTH_CHANNELS}
        self._both = self._channels[Channel.DECODE], self._channels[Channel.BULK]
        self._queues = LinkQueues()
        self._story: deque[str] = deque(maxlen=64)
        #: When to poll again without an event; ``None`` if only an event can change anything.
        self.wake_at: float | None = None
        #: When a channel may have acknowledged nothing for too long, at the soonest.
        self._stalled_at = inf
        self.sent_frames = 0
        self.sent_bytes = 0
        self.stale_acks = 0

    # --- what is to be sent ------------------------------------------------------------------

    def queue_control(self, body: RingMessage, payload: Buffer | None = None) -> None:
        """Send anything but a volume, before every volume.

        Raises:
            MessageTooLarge: its header would be over 4 KiB.
            Overloaded: far more is waiting than the link can hold.
        """
        self._check_capacity(body)
        self._queues.add_control(body, payload)

    def queue_padding(self, payload: Buffer) -> None:
        """Send bytes on the bulk channel, before every volume there, for the next stage to drop."""
        self._queues.add_padding(payload)

    def queue_volume(self, header: Volume, rows: Buffer, now: float) -> None:
        """Send a volume, of which ``rows`` are the first rows or all.

        ``header.payload`` describes all of them, ``[total, hidden]``; the others are handed over
        with :meth:`queue_rows`. ``rows`` is not copied and must not change until it is
        acknowledged.

        Raises:
            WireError: ``rows`` is not what the header says, or a volume of that seq lacks rows.
            MessageTooLarge: its header, or one row, is over the bound of a message.
            Overloaded: far more is waiting than the link can hold.
        """
        channel = Channel.BULK if header.prefill or self._policy.single_channel else Channel.DECODE
        volume = UnsentVolume(header, channel)
        self._check_capacity(header)
        self.handle(self._queues.add_volume(volume, rows), now)

    def queue_rows(self, seq: int, rows: Buffer, now: float) -> None:
        """Send the next rows of a volume whose first rows have been handed over.

        They count as accepted with the first: a link that is far behind takes them too.

        Raises:
            WireError: no volume of that seq lacks rows, or they are more than it lacks.
        """
        self.handle(self._queues.add_rows(seq, rows), now)

    def handle(self, event: LinkEvent, now: float) -> None:
        """Tell the policy what happened."""
        if isinstance(event, LinkEstimatedEvent):
            self.packing.set_rate(event.rate)
        self._policy.handle(event, now)

    def _dispatch_event(
        self,
        event: MessageSentEvent | MessageAcknowledgedEvent | ChannelReconnectedEvent,
        now: float,
    ) -> None:
        """Tell the policy, and the estimator, what became of messages."""
        self.estimator.handle(event, now)
        self._policy.handle(event, now)

    def _check_capacity(self, body: RingMessage) -> None:
        if self.queued_bytes + self.unacknowledged_bytes > 2 * self._limits.max_total_bytes:
            raise Overloaded("the link to the next stage is far behind")
        if not header_fits(body):
            raise MessageTooLarge(f"the header of a {type(body).__name__} is over {MAX_HEADER}")

    # --- what the connections tell -----------------------------------------------------------

    def on_connected(self, channel: Channel, now: float) -> None:
        """There is a new connection: what was not acknowledged goes again, before anything new."""
        out = self._channels[channel]
        again = out.next_frame > 0
        out.is_connected = True
        out.rewind_unacknowledged()
        self._log_transition(now, f"{channel.name} connected, from {out.oldest_frame}")
        if again:
            self._dispatch_event(ChannelReconnectedEvent(channel), now)

    def on_disconnected(self, channel: Channel, now: float) -> None:
        """The connection is gone: the channel waits for the next."""
        self._channels[channel].is_connected = False
        self._log_transition(now, f"{channel.name} disconnected")

    def on_ack(self, ack: Ack, now: float) -> None:
        """The next stage says what has arrived. One of another epoch, or nonsense, is counted."""
        freed = None
        if ack.epoch == self.epoch:
            freed = self._channels[ack.channel].apply_ack(ack, now)
        if freed is None:
            self.stale_acks += 1
            return
        self._dispatch_event(MessageAcknowledgedEvent(ack.channel, *freed), now)

    def on_heartbeat_echoed(self, sent_at: float, now: float) -> bool:
        """The heartbeat that left at ``sent_at`` is back; ``False`` if none did."""
        known = self.estimator.on_heartbeat_echoed(sent_at, now)
        if known:
            self.handle(HeartbeatEchoedEvent(now - sent_at), now)
        return known

    # --- sending -----------------------------------------------------------------------------

    def has_due(self, now: float) -> bool:
        """Whether :meth:`poll_packets` may find anything now."""
        return now >= self._stalled_at or self.has_waiting

    def poll_packets(
        self, now: float, ready: Collection[Channel] = BOTH_CHANNELS, maximum: int = 16
    ) -> list[Packet]:
        """At most ``maximum`` messages to send now, on those channels whose sockets are
        ``ready``."""
        may_stall = now >= self._stalled_at
        if may_stall:
            self._rewind_stalled(now)
        self.wake_at = None
        batch: list[Packet] = []
        while len(batch) < maximum and self.has_waiting:
            out = self._next_packet(now, ready)
            if out is None:
                break
            batch.append(out)
            self.sent_frames += 1
            self.sent_bytes += out.nbytes
            self._dispatch_event(MessageSentEvent(out.channel, out.nbytes), now)
        if batch or may_stall:
            self._expect_stalls()
        if self._stalled_at < inf:
            self.wake_at = min(self._stalled_at, inf if self.wake_at is None else self.wake_at)
        return batch

    def _next_packet(self, now: float, ready: Collection[Channel]) -> Packet | None:
        for channel in ready:
            if self._channels[channel].has_pending:
                return self._channels[channel].next_packet(now)
        ready = [channel for channel in ready if self._is_open(channel)]
        if Channel.DECODE in ready and (control := self._queues.pop_control()) is not None:
            return self._send_body(Channel.DECODE, *control, now)
        if Channel.BULK in ready and (probe := self._queues.pop_padding()) is not None:
            return self._send_body(Channel.BULK, *probe, now)
        # What was granted goes on first where it can; a channel that can't take it holds up no
        # other.
        if not any(self._queues.granted_volume(channel) for channel in ready):
            decision = self._policy.choose_action(now, ready)
            if not isinstance(decision, SendRowsAction):
                self.wake_at = decision.until
                return None
            there = self._queues.grant_rows(decision)
            self._require(there, f"{self._policy.name} sends what isn't there: {decision}")
        return self._next_rows_packet(now, ready)

    def _is_open(self, channel: Channel) -> bool:
        out = self._channels[channel]
        return out.is_connected and out.nbytes < self._limits.max_unacknowledged_bytes

    def _next_rows_packet(self, now: float, ready: Collection[Channel]) -> Packet | None:
        """The next message of what was granted."""
        for channel in ready:
            if (volume := self._queues.granted_volume(channel)) is not None:
                body, rows = self._queues.pop_rows(channel, self._limits.max_message_bytes)
                message = self.packing.pack_message(body, rows, volume.header.prefill)
                return self._send_body(channel, *message, now)
        return None

    def _send_body(
        self, channel: Channel, body: RingMessage, payload: Buffer | None, now: float
    ) -> Packet:
        self._channels[channel].append_frame(body, payload, now)
        return self._channels[channel].next_packet(now)

    def _rewind_stalled(self, now: float) -> None:
        for out in self._channels.values():
            waiting = out.is_connected and out.num_unacknowledged
            if waiting and now - out.progress_at >= self._limits.resend_after:
                out.rewind_unacknowledged()
                self._log_transition(
                    now, f"{out.channel.name} acknowledges nothing: again from {out.oldest_frame}"
                )
                self._dispatch_event(ChannelReconnectedEvent(out.channel), now)

    def _expect_stalls(self) -> None:
        waiting = [
            out for out in self._channels.values() if out.is_connected and out.num_unacknowledged
        ]
        since = min((out.progress_at for out in waiting), default=inf)
        self._stalled_at = since + self._limits.resend_after

    # --- state -------------------------------------------------------------------------------

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes sent, or to be sent again, and not acknowledged."""
        decode, bulk = self._both
        return decode.nbytes + bulk.nbytes

    @property
    def queued_bytes(self) -> int:
        """Bytes that have not been sent at all."""
        return self._queues.nbytes

    def queued_on(self, channel: Channel) -> int:
        """Bytes that are to go on ``channel`` and have not been sent at all."""
        return self._queues.bytes_on(channel)

    def in_flight_on(self, channel: Channel) -> int:
        """Bytes sent on ``channel``, or to be sent again, and not acknowledged."""
        return self._channels[channel].nbytes

    @property
    def has_waiting(self) -> bool:
        """Whether anything is to be sent, now or when something allows it."""
        decode, bulk = self._both
        return (
            self._queues.nbytes > 0
            or (decode.is_connected and decode.num_unsent > 0)
            or (bulk.is_connected and bulk.num_unsent > 0)
        )

    @property
    def is_full(self) -> bool:
        """Whether who produces should pause."""
        return self._queues.nbytes + self.unacknowledged_bytes >= self._limits.max_total_bytes

    @property
    def num_resent(self) -> int:
        """Frames that were sent more than once."""
        return sum(out.num_resent for out in self._channels.values())

    def oldest_frame(self, channel: Channel) -> int:
        """The number of the oldest frame of ``channel`` that is not acknowledged."""
        return self._channels[channel].oldest_frame

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: one doesn't hold.
        """
        for out in self._channels.values():
            self._require(out.is_valid(), f"{out.channel.name} has a gap or miscounts its bytes")
        fault = self._queues.find_fault()
        self._require(not fault, fault)

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise InvariantError(message, self._story)

    def _log_transition(self, now: float, what: str) -> None:
        self._story.append(f"{now:.3f} {what}")
