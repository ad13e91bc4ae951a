"""How many bytes the bulk channel may have in flight: a window that follows delay."""

from molink.link.policies.base import (
    ChannelReconnectedEvent,
    HeartbeatEchoedEvent,
    LinkEstimatedEvent,
    LinkEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
)
from molink.wire.messages.data_plane import Channel

#: Queueing delay that the window aims at, in seconds above the least round trip of a chunk.
TARGET_DELAY = 0.008
#: A delay that passes for none, and one that is too much.
LOW_DELAY = 0.004
HIGH_DELAY = 0.020
#: What the decode channel tells of the queue counts for so many seconds.
VOUCH_S = 0.25
#: The window is so many times what it should be, at least and at most: it shrinks where chunks
#: come back late, and grows where they find no queue, for the rate is then more than was estimated.
MIN_SHARE = 0.6
MAX_SHARE = 1.25
#: How far the share moves in a round trip.
SHARE_STEP = 0.25
#: A window that was empty is filled so many times as fast as the link should empty it, after the
#: first :data:`TARGET` seconds' worth.
FILL_FACTOR = 1.25
#: A chunk takes this long at the link's rate, in seconds, within these bytes.
CHUNK_S = 0.005
MIN_CHUNK = 16 * 1024
MAX_CHUNK = 256 * 1024
#: Before anything is known of the link.
FIRST_CHUNK = 32 * 1024
#: As much as a channel may have unacknowledged, and more than a link of 1 Gbps and 50 ms needs.
MAX_WINDOW = 8 << 20


class CreditWindow:
    """A window on bytes in flight, :data:`TARGET_DELAY` above what the link holds by itself.

    That is ``rate × (least round trip + TARGET)`` and a chunk, by the estimate of the link: no more
    than :data:`TARGET_DELAY` seconds' worth can stand in a queue then. Delay corrects what the
    estimate is late to see. It only does so within bounds: a connection that starts slowly, or
    recovers from a loss, keeps chunks waiting on this PC, where they are in nobody's way, and would
    never grow if the window shrank with it. And while messages of the decode channel come back in
    time, there is no queue that chunks could be late by: then a segment was lost, and those that
    followed wait for it at the other end. Until there is an estimate, the window doubles in a
    round trip.
    """

    def __init__(self) -> None:
        #: The window in bytes, but that two chunks always fit.
        self.size = 2.0 * FIRST_CHUNK
        #: Bytes sent and not acknowledged.
        self.in_flight = 0
        self._rate: float | None = None
        self._minimum = 0.0
        self._share = 1.0
        #: Until when late chunks say nothing of the link.
        self._vouched_until = 0.0
        #: Until when the window may not grow: a heartbeat has found a queue.
        self._queue_until = 0.0
        #: When all that was sent would have left at the pace of the window.
        self._filled_until = 0.0

    def handle(self, event: LinkEvent, now: float) -> None:
        """Take note of what happened on the bulk channel."""
        match event:
            case MessageSentEvent(channel=Channel.BULK):
                if self._rate is not None:
                    seconds = event.nbytes / (FILL_FACTOR * self._share * self._rate)
                    self._filled_until = max(now, self._filled_until) + seconds
                self.in_flight += event.nbytes
            case MessageAcknowledgedEvent(channel=Channel.BULK):
                self._on_acknowledged(event, now)
                self.in_flight = max(0, self.in_flight - event.nbytes)
            case MessageAcknowledgedEvent(channel=Channel.DECODE):
                self._vouch(event.elapsed, event.nbytes, now)
            case HeartbeatEchoedEvent():
                self._vouch(event.elapsed, 0, now)
                if event.elapsed - self._minimum > LOW_DELAY:
                    self._queue_until = now + VOUCH_S
            case LinkEstimatedEvent():
                self._rate, self._minimum = event.rate, event.min_rtt
                self._update_size()
            case ChannelReconnectedEvent(channel=Channel.BULK):
                self.in_flight = 0
                self._filled_until = min(now, self._filled_until)

    def has_credit(self, nbytes: int) -> bool:
        """Whether a chunk of ``nbytes`` may be sent now."""
        return self.in_flight + nbytes <= max(self.size, 2 * nbytes)

    @property
    def opens_at(self) -> float:
        """When the next chunk may go: one after another, or an idle link would get them all."""
        return self._filled_until - TARGET_DELAY

    @property
    def chunk_bytes(self) -> int:
        """How long a chunk should be: :data:`CHUNK_S` of the link's rate, in bytes."""
        if self._rate is None:
            return FIRST_CHUNK
        return int(min(MAX_CHUNK, max(MIN_CHUNK, CHUNK_S * self._rate)))

    def _on_acknowledged(self, event: MessageAcknowledgedEvent, now: float) -> None:
        if self._rate is None:
            self.size = min(self.size + event.nbytes, MAX_WINDOW)
            return
        queued = event.elapsed - self._minimum - event.nbytes / self._rate
        if queued > HIGH_DELAY and now < self._vouched_until:
            queued = TARGET_DELAY
        part = min(1.0, event.nbytes / self.size)
        if queued > HIGH_DELAY:
            self._share = max(MIN_SHARE, self._share - SHARE_STEP * part)
        elif queued < LOW_DELAY and self.in_flight + self.chunk_bytes > self.size:
            maximum = MAX_SHARE if now >= self._queue_until else max(1.0, self._share)
            self._share = min(maximum, self._share + SHARE_STEP * part)
        else:
            self._share += SHARE_STEP * part * (1.0 - self._share)
        self._update_size()

    def _vouch(self, elapsed: float, nbytes: int, now: float) -> None:
        """A message of the decode channel has come back."""
        if self._rate is not None:
            in_time = elapsed - self._minimum - nbytes / self._rate <= HIGH_DELAY
            self._vouched_until = now - elapsed + VOUCH_S if in_time else now

    def _update_size(self) -> None:
        if self._rate is not None:
            wanted = self._rate * (self._minimum + TARGET_DELAY) + self.chunk_bytes
            self.size = min(max(self._share * wanted, 2.0 * MIN_CHUNK), MAX_WINDOW)
