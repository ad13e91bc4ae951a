"""One simulated hop of the ring: the connections between two ends of a link.

The ends are the real :class:`molink.link.out_link.OutLink` and :class:`molink.link.in_link.InLink`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from molink.errors import InvariantError
from molink.link.base import OutConnection, OutConnectionEvents
from molink.link.in_link import InLink
from molink.link.packing.compressor import Compressor, PackedSample
from molink.link.send_window import message_size
from molink.sim.event_queue import EventQueue
from molink.sim.link_model import LinkModel, OnTransfer
from molink.wire.messages.base import Coding, Payload
from molink.wire.messages.codec import Buffer, DataMessage
from molink.wire.messages.data_plane import Channel, Frame, Volume, VolumeFragment

#: Bytes of a heartbeat or a hello.
_CONTROL_BYTES = 64


@dataclass(frozen=True, slots=True)
class SimSender:
    """The sender of a message; the channel identifies the connection."""

    identity: bytes
    peer_id: str = ""


_SENDERS = {channel: SimSender(bytes([channel])) for channel in Channel}
_CHANNELS = {sender.identity: channel for channel, sender in _SENDERS.items()}


class Hop:
    """The connections from stage ``stage`` to the next over a link model.

    Replies take the time of the return path but no bandwidth. The receiver takes ``handling``
    seconds more for each message. Rows have no content: packed rows arrive as views of ``zeros``,
    which must be as large as the largest message. No message is lost.
    """

    def __init__(
        self,
        stage: int,
        event_queue: EventQueue,
        link_model: LinkModel,
        handling: float,
        zeros: memoryview,
    ) -> None:
        self.link_model = link_model
        self.on_transfer: OnTransfer | None = None
        #: The link's end at the next stage.
        self.incoming: InLink | None = None
        self._stage = stage
        self._event_queue = event_queue
        self._handling = handling
        self._zeros = zeros
        self._events: dict[Channel, OutConnectionEvents] = {}
        #: When the next stage will have handled the last frame.
        self._handed_at = 0.0

    def open_channel(self, channel: Channel, events: OutConnectionEvents) -> OutConnection:
        """Open a connection for a channel; it connects once it is started."""
        self._events[channel] = events
        return _SimChannel(
            self._event_queue,
            self.link_model,
            channel,
            events,
            partial(self._transmit_message, channel),
        )

    def _transmit_message(
        self, channel: Channel, message: DataMessage, payload: Buffer | None
    ) -> None:
        now = self._event_queue.now
        if not isinstance(message, Frame):
            self.link_model.send_message(
                channel, _CONTROL_BYTES, now, partial(self._on_passed, channel, message)
            )
            return
        packing = _packing_s(message)
        passed = partial(self._on_frame_passed, message, payload, packing)
        self.link_model.send_message(channel, message_size(payload), now + packing, passed)

    def _on_passed(
        self, channel: Channel, message: DataMessage, begin: float, end: float, arrival: float
    ) -> None:
        self._event_queue.schedule_at(
            arrival + self._handling, self._on_arrival, channel, message, None
        )

    def _on_frame_passed(
        self,
        frame: Frame,
        payload: Buffer | None,
        packing: float,
        begin: float,
        end: float,
        arrival: float,
    ) -> None:
        if self.on_transfer is not None:
            self.on_transfer(self._stage, _is_prefill(frame), begin, end)
        data = None if payload is None else memoryview(payload)
        if packing:
            frame, data = self._unpack_frame(frame)
        # The next stage unpacks messages one after another, in order.
        self._handed_at = max(self._handed_at, arrival + self._handling) + packing
        self._event_queue.schedule_at(self._handed_at, self._on_arrival, frame.channel, frame, data)

    def _unpack_frame(self, frame: Frame) -> tuple[Frame, memoryview]:
        body = frame.body
        assert isinstance(body, Volume | VolumeFragment)
        plain = Payload(body.payload.dtype, body.payload.shape)
        body = msgspec.structs.replace(body, payload=plain)
        return msgspec.structs.replace(frame, body=body), self._zeros[: plain.nbytes]

    def _on_arrival(self, channel: Channel, message: DataMessage, data: memoryview | None) -> None:
        assert self.incoming is not None
        self.incoming.handle_message(_SENDERS[channel], message, data)

    def send(self, identity: bytes, message: DataMessage, payload: Buffer | None = None) -> bool:
        """Reply on a connection."""
        events = self._events[_CHANNELS[identity]]
        at = self._event_queue.now + self.link_model.reply_s
        self._event_queue.schedule_at(at, events.on_message, message, None)
        return True

    def report_misbehaviour(self, peer_id: str, reason: str) -> None:
        """Fail: simulated stages never misbehave.

        Raises:
            InvariantError: always.
        """
        raise InvariantError(f"stage {self._stage} misbehaves: {reason}")


class _SimChannel:
    """A connection of a hop."""

    def __init__(
        self,
        event_queue: EventQueue,
        link_model: LinkModel,
        channel: Channel,
        events: OutConnectionEvents,
        leave: Callable[[DataMessage, Buffer | None], None],
    ) -> None:
        self._event_queue = event_queue
        self._link_model = link_model
        self._channel = channel
        self._events = events
        self._transmit = leave
        #: Whether the channel is full; ``on_drained`` is called once it is not.
        self.is_congested = False

    def start(self) -> None:
        self._event_queue.schedule_soon(self._events.on_connect)

    def send(self, message: DataMessage, payload: Buffer | None = None) -> None:
        self._transmit(message, payload)
        if not self.is_congested and not self._link_model.is_ready(
            self._channel, self._event_queue.now
        ):
            self.is_congested = True
            self._link_model.call_when_ready(self._channel, self._on_drained)

    def _on_drained(self) -> None:
        self.is_congested = not self._link_model.is_ready(self._channel, self._event_queue.now)
        if self.is_congested:
            self._link_model.call_when_ready(self._channel, self._on_drained)
        else:
            self._events.on_drained()

    def reconnect_now(self) -> None:
        """Do nothing: a new connection would behave the same."""


def _packing_s(frame: Frame) -> float:
    """Return the seconds to pack or unpack a message's rows; 0 if they are uncompressed."""
    body = frame.body
    if isinstance(body, Volume | VolumeFragment) and body.payload.coding is not Coding.PLAIN:
        return packing_s(body.payload.nbytes)
    return 0.0


def _is_prefill(frame: Frame) -> bool:
    """Whether a message has prefill rows.

    Fragments count as prefill rows, since decode volumes are hardly ever fragmented.
    """
    body = frame.body
    return body.prefill if isinstance(body, Volume) else isinstance(body, VolumeFragment)


#: Bytes/s at which one core packs or unpacks bf16 rows.
PACKING_RATE = 700e6


class SimPacker:
    """A :class:`molink.link.packing.base.Packer` in virtual time.

    It compresses rows to ``1 / ratio`` of their bytes at :data:`PACKING_RATE`.
    """

    def __init__(self, ratio: float, clock: Callable[[], float]) -> None:
        self._compressor = Compressor("lossless")
        self._ratio = ratio
        self._clock = clock

    def set_rate(self, rate: float | None) -> None:
        """Update the measured rate of the link, in bytes/s."""
        self._compressor.set_rate(rate)

    def pack_rows(self, bulk: bool, payload: Payload, data: memoryview) -> tuple[Payload, Buffer]:
        """Pack a volume's rows if that saves time."""
        choice = self._compressor.choose_coding(bulk, self._clock())
        plain = payload.nbytes
        coded = int(plain / self._ratio)
        if choice.coding is Coding.PLAIN or coded >= plain:
            return payload, data
        if choice.is_sample:  # all samples have the same outcome
            seconds = packing_s(plain)
            self._compressor.on_packed(bulk, PackedSample(plain, coded, seconds, seconds))
        return Payload(payload.dtype, payload.shape, choice.coding, coded), data[:coded]


def packing_s(plain: int) -> float:
    return plain / PACKING_RATE
