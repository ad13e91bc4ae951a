"""Bounds the bulk channel's bytes in flight by a window that follows delay."""

from molink.link.policies.base import (
    ChannelReconnectedEvent,
    HeartbeatEchoedEvent,
    LinkEstimatedEvent,
    LinkEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
)
from molink.wire.messages.data_plane import Channel

#: Target queueing delay in seconds above the minimum round trip of a chunk.
TARGET_DELAY = 0.008
#: Delays in seconds below which there is no queue, and above which it is too long.
LOW_DELAY = 0.004
HIGH_DELAY = 0.020
#: Seconds for which a timely decode message proves that there is no queue.
VOUCH_S = 0.25
#: Bounds of the window as a multiple of its computed size. Late chunks shrink it; chunks that meet
#: no queue grow it, since the real rate then exceeds the estimate.
MIN_SHARE = 0.6
MAX_SHARE = 1.25
#: Change of that multiple per round trip.
SHARE_STEP = 0.25
#: An empty window is filled at this multiple of the link's rate, after the first
#: :data:`TARGET_DELAY` seconds' worth.
FILL_FACTOR = 1.25
#: Seconds of the link's rate per chunk, and its bounds in bytes.
CHUNK_S = 0.005
MIN_CHUNK = 16 * 1024
MAX_CHUNK = 256 * 1024
#: Chunk size before the link is known.
FIRST_CHUNK = 32 * 1024
#: The maximum of unacknowledged bytes per channel; more than 1 Gbps at 50 ms needs.
MAX_WINDOW = 8 << 20


class CreditWindow:
    """A window on bytes in flight: the link's capacity plus :data:`TARGET_DELAY`.

    The size is ``rate × (minimum round trip + TARGET_DELAY)`` plus a chunk, by the link's estimate,
    so at most :data:`TARGET_DELAY` seconds' worth can queue. Delay corrects errors of the estimate,
    but only within bounds: a connection in slow start or loss recovery holds chunks back on this
    PC, where they do no harm, and would never grow if the window shrank with it. While decode
    messages are timely, there is no queue on the link. Late chunks then mean that a segment was
    lost, for which later ones wait at the receiver. Before the first estimate the window doubles
    per round trip.
    """

    def __init__(self) -> None:
        #: The window in bytes; two chunks always fit.
        self.size = 2.0 * FIRST_CHUNK
        #: Unacknowledged bytes.
        self.in_flight = 0
        self._rate: float | None = None
        self._minimum = 0.0
        self._share = 1.0
        #: Until then, late chunks say nothing about the link.
        self._vouched_until = 0.0
        #: Until then, the window may not grow, since a heartbeat met a queue.
        self._queue_until = 0.0
        #: When everything sent would have left at the window's rate.
        self._filled_until = 0.0

    def handle(self, event: LinkEvent, now: float) -> None:
        """Record an event of the bulk channel."""
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
        """Return when the next chunk may go.

        Chunks are paced; otherwise an idle link would get all of them at once.
        """
        return self._filled_until - TARGET_DELAY

    @property
    def chunk_bytes(self) -> int:
        """Chunk size in bytes: :data:`CHUNK_S` of the link's rate."""
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
        """Record the delay of a decode message, which shows whether there is a queue."""
        if self._rate is not None:
            in_time = elapsed - self._minimum - nbytes / self._rate <= HIGH_DELAY
            self._vouched_until = now - elapsed + VOUCH_S if in_time else now

    def _update_size(self) -> None:
        if self._rate is not None:
            wanted = self._rate * (self._minimum + TARGET_DELAY) + self.chunk_bytes
            self.size = min(max(self._share * wanted, 2.0 * MIN_CHUNK), MAX_WINDOW)
