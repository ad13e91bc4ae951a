"""The sending end of a link, without I/O: turns policy decisions into numbered frames."""

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
from molink.util.transition_log import TransitionLog
from molink.wire.messages.codec import MAX_HEADER, Buffer
from molink.wire.messages.data_plane import Ack, Channel, RingMessage, Volume

BOTH_CHANNELS = (Channel.DECODE, Channel.BULK)


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """Memory and message limits of a link, in bytes and seconds."""

    #: Maximum payload of one message.
    max_message_bytes: int = 192 * 1024
    #: Maximum unacknowledged bytes per channel.
    max_unacknowledged_bytes: int = 8 << 20
    #: Queued and unacknowledged bytes at which the link is full; at twice as many it rejects
    #: messages.
    max_total_bytes: int = 64 << 20
    #: A connected channel without acknowledgements for this long sends everything again.
    resend_after: float = 10.0


class LinkSender:
    """Queues, cuts, numbers, sends and resends messages; one object per epoch.

    Control messages go first, on the decode channel. The policy decides when volumes go: prefill
    rows on the bulk channel, decode rows on the decode channel, or all on the bulk channel if the
    policy uses a single one.
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
        #: Estimates the link from sent and acknowledged messages and from heartbeats.
        self.estimator = estimator or LinkEstimator()
        self._channels = {channel: SendWindow(epoch, channel) for channel in BOTH_CHANNELS}
        self._both = self._channels[Channel.DECODE], self._channels[Channel.BULK]
        self._queues = LinkQueues()
        self._transitions = TransitionLog(64)
        #: When to poll again without an event; ``None`` if only an event can change anything.
        self.wake_at: float | None = None
        #: Earliest time at which a channel may have stalled.
        self._stalled_at = inf
        self.sent_frames = 0
        self.sent_bytes = 0
        self.stale_acks = 0

    # --- queueing --------------------------------------------------------------------------------

    def queue_control(self, body: RingMessage, payload: Buffer | None = None) -> None:
        """Send a message other than a volume, before all volumes.

        Raises:
            MessageTooLarge: its header exceeds 4 KiB.
            Overloaded: the link is far behind.
        """
        self._check_capacity(body)
        self._queues.add_control(body, payload)

    def queue_padding(self, payload: Buffer) -> None:
        """Send bytes on the bulk channel before all volumes; the next stage drops them."""
        self._queues.add_padding(payload)

    def queue_volume(self, header: Volume, rows: Buffer, now: float) -> None:
        """Send a volume; ``rows`` are its first rows or all.

        ``header.payload`` describes all rows, ``[total, hidden]``; :meth:`queue_rows` adds the
        others. ``rows`` is not copied and must not change until it is acknowledged.

        Raises:
            WireError: ``rows`` doesn't fit the header, or a volume of that ``seq`` is incomplete.
            MessageTooLarge: its header, or one row, exceeds a message.
            Overloaded: the link is far behind.
        """
        channel = Channel.BULK if header.prefill or self._policy.single_channel else Channel.DECODE
        volume = UnsentVolume(header, channel)
        self._check_capacity(header)
        self.handle(self._queues.add_volume(volume, rows), now)

    def queue_rows(self, seq: int, rows: Buffer, now: float) -> None:
        """Send the next rows of a volume. They are accepted even if the link is far behind.

        Raises:
            WireError: no volume of that ``seq`` lacks these rows.
        """
        self.handle(self._queues.add_rows(seq, rows), now)

    def handle(self, event: LinkEvent, now: float) -> None:
        """Pass an event to the policy."""
        if isinstance(event, LinkEstimatedEvent):
            self.packing.set_rate(event.rate)
        self._policy.handle(event, now)

    def _dispatch_event(
        self,
        event: MessageSentEvent | MessageAcknowledgedEvent | ChannelReconnectedEvent,
        now: float,
    ) -> None:
        """Pass an event to the policy and the estimator."""
        self.estimator.handle(event, now)
        self._policy.handle(event, now)

    def _check_capacity(self, body: RingMessage) -> None:
        if self.queued_bytes + self.unacknowledged_bytes > 2 * self._limits.max_total_bytes:
            raise Overloaded("the link to the next stage is far behind")
        if not header_fits(body):
            raise MessageTooLarge(f"the header of a {type(body).__name__} is over {MAX_HEADER}")

    # --- connection events -----------------------------------------------------------------------

    def on_connected(self, channel: Channel, now: float) -> None:
        """Handle a new connection: unacknowledged frames are sent again first."""
        out = self._channels[channel]
        again = out.next_frame > 0
        out.is_connected = True
        out.rewind_unacknowledged()
        self._transitions.add_entry(now, f"{channel.name} connected, from {out.oldest_frame}")
        if again:
            self._dispatch_event(ChannelReconnectedEvent(channel), now)

    def on_disconnected(self, channel: Channel, now: float) -> None:
        """Stop sending on the channel until it is connected again."""
        self._channels[channel].is_connected = False
        self._transitions.add_entry(now, f"{channel.name} disconnected")

    def on_ack(self, ack: Ack, now: float) -> None:
        """Handle an acknowledgement; those invalid or of another epoch are only counted."""
        freed = None
        if ack.epoch == self.epoch:
            freed = self._channels[ack.channel].apply_ack(ack, now)
        if freed is None:
            self.stale_acks += 1
            return
        self._dispatch_event(MessageAcknowledgedEvent(ack.channel, *freed), now)

    def on_heartbeat_echoed(self, sent_at: float, now: float) -> bool:
        """Handle the echo of the heartbeat sent at ``sent_at``; ``False`` if there is none."""
        known = self.estimator.on_heartbeat_echoed(sent_at, now)
        if known:
            self.handle(HeartbeatEchoedEvent(now - sent_at), now)
        return known

    # --- sending ---------------------------------------------------------------------------------

    def has_due(self, now: float) -> bool:
        """Whether :meth:`poll_packets` may find anything now."""
        return now >= self._stalled_at or self.has_waiting

    def poll_packets(
        self, now: float, ready: Collection[Channel] = BOTH_CHANNELS, maximum: int = 16
    ) -> list[Packet]:
        """Return up to ``maximum`` messages to send now on channels with a ``ready`` socket."""
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
        # Granted rows go first if they can. A blocked channel doesn't block the other one.
        if not any(self._queues.granted_volume(channel) for channel in ready):
            decision = self._policy.choose_action(now, ready)
            if not isinstance(decision, SendRowsAction):
                self.wake_at = decision.until
                return None
            there = self._queues.grant_rows(decision)
            self._require(there, f"{self._policy.name} sends rows that don't exist: {decision}")
        return self._next_rows_packet(now, ready)

    def _is_open(self, channel: Channel) -> bool:
        out = self._channels[channel]
        return out.is_connected and out.nbytes < self._limits.max_unacknowledged_bytes

    def _next_rows_packet(self, now: float, ready: Collection[Channel]) -> Packet | None:
        """Return the next message of granted rows."""
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
                self._transitions.add_entry(
                    now, f"{out.channel.name} stalled: resending from {out.oldest_frame}"
                )
                self._dispatch_event(ChannelReconnectedEvent(out.channel), now)

    def _expect_stalls(self) -> None:
        waiting = [
            out for out in self._channels.values() if out.is_connected and out.num_unacknowledged
        ]
        since = min((out.progress_at for out in waiting), default=inf)
        self._stalled_at = since + self._limits.resend_after

    # --- state -----------------------------------------------------------------------------------

    @property
    def unacknowledged_bytes(self) -> int:
        """Unacknowledged bytes, including those to send again."""
        decode, bulk = self._both
        return decode.nbytes + bulk.nbytes

    @property
    def queued_bytes(self) -> int:
        """Unsent bytes."""
        return self._queues.nbytes

    def queued_on(self, channel: Channel) -> int:
        """Return the unsent bytes of ``channel``."""
        return self._queues.bytes_on(channel)

    def in_flight_on(self, channel: Channel) -> int:
        """Return the unacknowledged bytes of ``channel``, including those to send again."""
        return self._channels[channel].nbytes

    @property
    def has_waiting(self) -> bool:
        """Whether anything remains to be sent, now or later."""
        decode, bulk = self._both
        return (
            self._queues.nbytes > 0
            or (decode.is_connected and decode.num_unsent > 0)
            or (bulk.is_connected and bulk.num_unsent > 0)
        )

    @property
    def is_full(self) -> bool:
        """Whether the producer should pause."""
        return self._queues.nbytes + self.unacknowledged_bytes >= self._limits.max_total_bytes

    @property
    def num_resent(self) -> int:
        """Frames sent more than once."""
        return sum(out.num_resent for out in self._channels.values())

    def oldest_frame(self, channel: Channel) -> int:
        """Return the number of the oldest unacknowledged frame of ``channel``."""
        return self._channels[channel].oldest_frame

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: one is broken.
        """
        for out in self._channels.values():
            self._require(out.is_valid(), f"{out.channel.name} has a gap or miscounts its bytes")
        fault = self._queues.find_fault()
        self._require(not fault, fault)

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise InvariantError(message, self._transitions.format_lines())
