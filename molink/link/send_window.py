"""The sending end of a channel: frame numbers, acknowledgements, retransmission."""

from collections import deque

import msgspec

from molink.wire.messages.codec import MAX_HEADER, Buffer
from molink.wire.messages.data_plane import Ack, Channel, Frame, RingMessage

#: Assumed bytes of a message besides its payload.
HEADER_COST = 128
#: Bytes that a header may grow by when the packed size is added.
_CODING_COST = 4


def message_size(payload: Buffer | None) -> int:
    """Return the memory cost of a message with ``payload``, in bytes."""
    return HEADER_COST + (0 if payload is None else memoryview(payload).nbytes)


def header_fits(body: RingMessage) -> bool:
    """Whether the header of ``body`` fits even with the largest frame number."""
    widest = Frame(2**53, Channel.BULK, 2**53, body)
    return len(msgspec.msgpack.encode(widest)) <= MAX_HEADER - _CODING_COST


class Packet(msgspec.Struct, frozen=True):
    """A frame and its payload: one message of a channel."""

    frame: Frame
    payload: Buffer | None
    #: Size of the message, with an estimated header.
    nbytes: int

    @property
    def channel(self) -> Channel:
        """The channel of its frame."""
        return self.frame.channel


class SendWindow:
    """Frames of one (epoch, channel), from their numbering to their acknowledgement."""

    def __init__(self, epoch: int, channel: Channel) -> None:
        self.channel = channel
        self._epoch = epoch
        #: Unacknowledged frames: numbers ``oldest_frame … next_frame - 1`` without gaps.
        self._unacknowledged: deque[tuple[Packet, float]] = deque()
        #: How many of them, oldest first, were sent on this connection, and how many were not yet.
        self._num_sent = 0
        self.num_unsent = 0
        #: First frame number that was never sent on any connection.
        self._first_unsent = 0
        self.oldest_frame = 0
        self.next_frame = 0
        #: Unacknowledged bytes.
        self.nbytes = 0
        self.is_connected = False
        self.num_resent = 0
        #: Time of the last progress: an acknowledgement, or a message sent while nothing was in
        #: flight.
        self.progress_at = 0.0

    def append_frame(self, body: RingMessage, payload: Buffer | None, now: float) -> None:
        """Number a message and keep it until it is acknowledged."""
        frame = Frame(self._epoch, self.channel, self.next_frame, body)
        packet = Packet(frame, payload, message_size(payload))
        self._unacknowledged.append((packet, now))
        self.next_frame += 1
        self.num_unsent += 1
        self.nbytes += packet.nbytes

    @property
    def has_pending(self) -> bool:
        """Whether a frame must be sent (again) on this connection."""
        return self.is_connected and self.num_unsent > 0

    @property
    def num_unacknowledged(self) -> int:
        """Unacknowledged frames sent on this connection."""
        return self._num_sent

    def next_packet(self, now: float) -> Packet:
        """Return the next frame to send."""
        if self._num_sent == 0:
            self.progress_at = now
        packet, _ = self._unacknowledged[self._num_sent]
        self._unacknowledged[self._num_sent] = (packet, now)
        self._num_sent += 1
        self.num_unsent -= 1
        number = packet.frame.frame_number
        if number < self._first_unsent:
            self.num_resent += 1
        else:
            self._first_unsent = number + 1
        return packet

    def apply_ack(self, ack: Ack, now: float) -> tuple[int, float] | None:
        """Drop acknowledged frames.

        Returns:
            Their bytes, and the seconds since the newest was sent; ``None`` if the acknowledgement
            is old or invalid.
        """
        if not self.oldest_frame < ack.next_frame <= self._first_unsent:
            return None
        freed, sent_at = 0, now
        while self.oldest_frame < ack.next_frame:
            packet, sent_at = self._unacknowledged.popleft()
            freed += packet.nbytes
            self.oldest_frame += 1
            self._num_sent = max(0, self._num_sent - 1)
        self.nbytes -= freed
        self.num_unsent = len(self._unacknowledged) - self._num_sent
        self.progress_at = now
        return freed, now - sent_at

    def rewind_unacknowledged(self) -> None:
        """Send all unacknowledged frames again."""
        self._num_sent, self.num_unsent = 0, len(self._unacknowledged)

    def is_valid(self) -> bool:
        """Whether numbers and sizes agree."""
        numbers = [packet.frame.frame_number for packet, _ in self._unacknowledged]
        return (
            numbers == list(range(self.oldest_frame, self.next_frame))
            and self.nbytes == sum(packet.nbytes for packet, _ in self._unacknowledged)
            and 0 <= self._num_sent <= len(self._unacknowledged)
            and self.num_unsent == len(self._unacknowledged) - self._num_sent
        )
