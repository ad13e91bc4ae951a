"""The sending end of one lane: numbers, and what to send again after a reconnect."""

from collections import deque

import msgspec

from molink.wire.messages.codec import MAX_HEADER, Buffer
from molink.wire.messages.data import Ack, Frame, Lane, RingBody

#: What a message is counted as beside its payload, in bytes.
HEADER_COST = 128
#: What a header may grow by when the size of its packed rows is put in.
_CODED = 4


def size_of(payload: Buffer | None) -> int:
    """What a message with ``payload`` costs in memory, in bytes."""
    return HEADER_COST + (0 if payload is None else memoryview(payload).nbytes)


def header_fits(body: RingBody) -> bool:
    """Whether the header of ``body`` is within its bound whatever the frame's numbers are."""
    widest = Frame(2**53, Lane.BULK, 2**53, body)
    return len(msgspec.msgpack.encode(widest)) <= MAX_HEADER - _CODED


class Packet(msgspec.Struct, frozen=True):
    """A frame and its payload: what goes on a lane as one message."""

    frame: Frame
    payload: Buffer | None
    #: Size of the message (its header is estimated).
    nbytes: int

    @property
    def lane(self) -> Lane:
        """The lane that it goes on."""
        return self.frame.lane


class SendWindow:
    """Frames of one (epoch, lane), from their numbering to their acknowledgement."""

    def __init__(self, epoch: int, lane: Lane) -> None:
        self.lane = lane
        self._epoch = epoch
        #: Frames not acknowledged yet: numbers ``base … next - 1``, without gaps.
        self._kept: deque[tuple[Packet, float]] = deque()
        #: How many of them, oldest first, have been sent on this connection, and how many not.
        self._sent = 0
        self.unsent = 0
        #: The number above which a frame has never been sent on any connection.
        self._fresh = 0
        self.base = 0
        self.next = 0
        #: Bytes not acknowledged yet.
        self.nbytes = 0
        self.connected = False
        self.resent = 0
        #: When the lane last got on: an acknowledgement, or something sent into an empty lane.
        self.progress_at = 0.0

    def append(self, body: RingBody, payload: Buffer | None, now: float) -> None:
        """Number a message and keep it until it is acknowledged."""
        frame = Frame(self._epoch, self.lane, self.next, body)
        packet = Packet(frame, payload, size_of(payload))
        self._kept.append((packet, now))
        self.next += 1
        self.unsent += 1
        self.nbytes += packet.nbytes

    @property
    def pending(self) -> bool:
        """Whether something is to be sent on this connection (again)."""
        return self.connected and self.unsent > 0

    @property
    def unacknowledged(self) -> int:
        """How many frames were sent on this connection and not acknowledged."""
        return self._sent

    def take(self, now: float) -> Packet:
        """The next frame to send."""
        if self._sent == 0:
            self.progress_at = now
        packet, _ = self._kept[self._sent]
        self._kept[self._sent] = (packet, now)
        self._sent += 1
        self.unsent -= 1
        seq = packet.frame.seq
        if seq < self._fresh:
            self.resent += 1
        else:
            self._fresh = seq + 1
        return packet

    def acknowledge(self, ack: Ack, now: float) -> tuple[int, float] | None:
        """Let go of what has arrived.

        Returns:
            How many bytes that was and the seconds since the newest of it was sent;
            ``None`` if the acknowledgement says nothing new, or what can't be.
        """
        if not self.base < ack.next <= self._fresh:
            return None
        freed, sent_at = 0, now
        while self.base < ack.next:
            packet, sent_at = self._kept.popleft()
            freed += packet.nbytes
            self.base += 1
            self._sent = max(0, self._sent - 1)
        self.nbytes -= freed
        self.unsent = len(self._kept) - self._sent
        self.progress_at = now
        return freed, now - sent_at

    def rewind(self) -> None:
        """Send everything that was not acknowledged again."""
        self._sent, self.unsent = 0, len(self._kept)

    def valid(self) -> bool:
        """Whether numbers and sizes agree."""
        numbers = [packet.frame.seq for packet, _ in self._kept]
        return (
            numbers == list(range(self.base, self.next))
            and self.nbytes == sum(packet.nbytes for packet, _ in self._kept)
            and 0 <= self._sent <= len(self._kept)
            and self.unsent == len(self._kept) - self._sent
        )
