"""One hop of the ring: what the two ends of a link have between them, in virtual time.

The ends are the product's own, :class:`molink.link.outgoing.OutLink` of a stage and
:class:`molink.link.incoming.InLink` of the next; here are their channels and their server.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from molink.errors import InvariantError
from molink.link.ends import Channel, ChannelEvents
from molink.link.incoming import InLink
from molink.link.window import size_of
from molink.sim.agenda import Agenda
from molink.sim.medium import Medium, OnTransfer
from molink.sim.packing import packing_s
from molink.wire.messages.base import Coding, Payload
from molink.wire.messages.codec import Buffer, DataMessage
from molink.wire.messages.data import Frame, Lane, Volume, VolumePart

#: Bytes of a beat or a hello.
_SMALL = 64


@dataclass(frozen=True, slots=True)
class SimSender:
    """Where a message came from, as a link's end is told; the connection is named by its lane."""

    identity: bytes
    user_id: str = ""


_SENDERS = {lane: SimSender(bytes([lane])) for lane in Lane}
_LANES = {sender.identity: lane for lane, sender in _SENDERS.items()}


class Hop:
    """The channels from stage ``stage`` to the next, on a medium.

    What the next stage answers takes its time back and no bandwidth; a message that has arrived
    takes ``handling`` seconds more. Rows have no content: those that travel packed arrive as
    ``zeros``, of which there have to be as many as a message holds. Nothing is ever lost.
    """

    def __init__(
        self, stage: int, agenda: Agenda, medium: Medium, handling: float, zeros: memoryview
    ) -> None:
        self.medium = medium
        self.on_transfer: OnTransfer | None = None
        #: The end at the next stage.
        self.incoming: InLink | None = None
        self._stage = stage
        self._agenda = agenda
        self._handling = handling
        self._zeros = zeros
        self._events: dict[Lane, ChannelEvents] = {}
        #: When the next stage has the last frame that was sent.
        self._handed_at = 0.0

    def connect(self, lane: Lane, events: ChannelEvents) -> Channel:
        """The channel of a lane; it is there as soon as it is started."""
        self._events[lane] = events
        return _SimChannel(self._agenda, self.medium, lane, events, partial(self._leave, lane))

    # --- to the next stage -----------------------------------------------------------------------

    def _leave(self, lane: Lane, message: DataMessage, payload: Buffer | None) -> None:
        now = self._agenda.now
        if not isinstance(message, Frame):
            self.medium.send(lane, _SMALL, now, partial(self._passed, lane, message))
            return
        packing = _packing_s(message)
        passed = partial(self._frame_passed, message, payload, packing)
        self.medium.send(lane, size_of(payload), now + packing, passed)

    def _passed(
        self, lane: Lane, message: DataMessage, begin: float, end: float, arrival: float
    ) -> None:
        self._agenda.at(arrival + self._handling, self._arrive, lane, message, None)

    def _frame_passed(
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
            frame, data = self._unpacked(frame)
        # The next stage unpacks one message after another, and takes none out of turn.
        self._handed_at = max(self._handed_at, arrival + self._handling) + packing
        self._agenda.at(self._handed_at, self._arrive, frame.lane, frame, data)

    def _unpacked(self, frame: Frame) -> tuple[Frame, memoryview]:
        body = frame.body
        assert isinstance(body, Volume | VolumePart)
        plain = Payload(body.payload.dtype, body.payload.shape)
        body = msgspec.structs.replace(body, payload=plain)
        return msgspec.structs.replace(frame, body=body), self._zeros[: plain.nbytes]

    def _arrive(self, lane: Lane, message: DataMessage, data: memoryview | None) -> None:
        assert self.incoming is not None
        self.incoming.handle(_SENDERS[lane], message, data)

    # --- back: what the next stage has in place of a server --------------------------------------

    def send(self, identity: bytes, message: DataMessage, payload: Buffer | None = None) -> bool:
        """Answer on a connection."""
        events = self._events[_LANES[identity]]
        at = self._agenda.now + self.medium.reply_s
        self._agenda.at(at, events.on_message, message, None)
        return True

    def offend(self, user_id: str, reason: str) -> None:
        """Nobody misbehaves here.

        Raises:
            InvariantError: always.
        """
        raise InvariantError(f"stage {self._stage} says what makes no sense: {reason}")


class _SimChannel:
    """One lane of a hop."""

    def __init__(
        self,
        agenda: Agenda,
        medium: Medium,
        lane: Lane,
        events: ChannelEvents,
        leave: Callable[[DataMessage, Buffer | None], None],
    ) -> None:
        self._agenda = agenda
        self._medium = medium
        self._lane = lane
        self._events = events
        self._leave = leave
        #: Whether the lane can't take more; somebody is told when it can.
        self.congested = False

    def start(self) -> None:
        """Be connected."""
        self._agenda.soon(self._events.on_connect)

    def send(self, message: DataMessage, payload: Buffer | None = None) -> None:
        """Let it leave."""
        self._leave(message, payload)
        if not self.congested and not self._medium.is_ready(self._lane, self._agenda.now):
            self.congested = True
            self._medium.when_ready(self._lane, self._drained)

    def _drained(self) -> None:
        self.congested = not self._medium.is_ready(self._lane, self._agenda.now)
        if self.congested:
            self._medium.when_ready(self._lane, self._drained)
        else:
            self._events.on_drained()

    def redial(self) -> None:
        """A new connection would be as good as this one."""


def _packing_s(frame: Frame) -> float:
    """Seconds to pack the rows of a message, and to unpack them; 0 if they travel plain."""
    body = frame.body
    if isinstance(body, Volume | VolumePart) and body.payload.coding is not Coding.PLAIN:
        return packing_s(body.payload.nbytes)
    return 0.0


def _is_prefill(frame: Frame) -> bool:
    """Whether a message has prefill rows; decode volumes hardly ever have parts."""
    body = frame.body
    return body.prefill if isinstance(body, Volume) else isinstance(body, VolumePart)
