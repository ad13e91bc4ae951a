"""One hop of the ring: the product's sender and receiver at the ends of a simulated medium."""

from collections.abc import Callable
from functools import partial

import msgspec

from molink.facts.ringtimes import LinkFacts
from molink.link.heartbeat import BUSY_INTERVAL
from molink.link.lane import Outgoing
from molink.link.policies.base import Event
from molink.link.receiver import Arrival, LinkReceiver
from molink.link.sender import BOTH_LANES, LinkSender
from molink.sim.agenda import Agenda
from molink.sim.medium import Medium, OnTransfer
from molink.sim.packing import packing_s
from molink.wire.messages.base import Coding, Payload
from molink.wire.messages.codec import Buffer
from molink.wire.messages.data import Ack, Frame, Lane, RingBody, Volume, VolumePart

#: Messages that leave before it is asked again whether the lanes are ready.
_BURST = 2
#: Bytes of a beat.
_BEAT = 64
#: Messages that a new link is tried out with, and their bytes, as an ``OutLink`` does.
_PROBES = 16
_PROBE_BYTES = 16 * 1024


class Hop:
    """The outgoing link of stage ``stage`` and the incoming one of the next.

    What an ``OutLink`` and an ``InLink`` do with sockets and timers, on a medium and an agenda.
    Acknowledgements take their time back and no bandwidth; a message that has arrived takes
    ``handling`` seconds more. ``on_arrival`` is told what has come to the next stage, ``on_room``
    that the link is not ``full`` any more, ``on_estimate`` what the link has been measured to be.
    Rows have no content: those that travel packed arrive as ``zeros``, of which there have to be as
    many as a message holds.
    """

    def __init__(
        self,
        stage: int,
        agenda: Agenda,
        sender: LinkSender,
        receiver: LinkReceiver,
        medium: Medium,
        handling: float,
        zeros: memoryview,
        on_arrival: Callable[[Arrival], None],
        on_room: Callable[[], None],
        on_estimate: Callable[[LinkFacts], None],
    ) -> None:
        self.medium = medium
        self.sender = sender
        self.on_transfer: OnTransfer | None = None
        self._stage = stage
        self._agenda = agenda
        self._receiver = receiver
        self._handling = handling
        self._zeros = zeros
        self._on_arrival = on_arrival
        self._on_room = on_room
        self._on_estimate = on_estimate
        self._pumping = False
        #: When the next stage has the last message that was sent.
        self._handed_at = 0.0
        #: The next times at which to pump and to acknowledge; 0 if none is set.
        self._pump_at = 0.0
        self._ack_at = 0.0
        self._waits_for_lane = False

    def connect(self) -> None:
        """Both lanes are there; what the link is like has to be found out."""
        now = self._agenda.now
        for lane in BOTH_LANES:
            self.sender.reconnected(lane, now)
        for _ in range(_PROBES):
            self.sender.probe(self._zeros[:_PROBE_BYTES])
        self._beat()
        self._pump_soon()

    # --- what the stage wants ------------------------------------------------------------------

    def control(self, body: RingBody, payload: Buffer | None = None) -> None:
        """As :meth:`LinkSender.control`."""
        self.sender.control(body, payload)
        self._pump_soon()

    def volume(self, header: Volume, rows: Buffer) -> None:
        """As :meth:`LinkSender.volume`."""
        self.sender.volume(header, rows, self._agenda.now)
        self._pump_soon()

    def more(self, tick: int, rows: Buffer) -> None:
        """As :meth:`LinkSender.more`."""
        self.sender.more(tick, rows, self._agenda.now)
        self._pump_soon()

    def handle(self, event: Event) -> None:
        """Tell the policy what the executor did."""
        self.sender.handle(event, self._agenda.now)
        self._pump_soon()

    @property
    def full(self) -> bool:
        """Whether the stage should pause."""
        return self.sender.full

    # --- sending -------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            self._agenda.soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if not self.sender.queued_bytes:
            return  # nothing is ever lost here and has to be sent again
        now, medium = self._agenda.now, self.medium
        while True:
            ready = [lane for lane in BOTH_LANES if medium.is_ready(lane, now)]
            batch = self.sender.poll(now, ready, _BURST)
            for out in batch:
                self._send(out, now)
            if len(batch) < _BURST:
                break
        if len(ready) < len(BOTH_LANES) and not self._waits_for_lane:
            self._waits_for_lane = True
            full = [lane for lane in BOTH_LANES if lane not in ready]
            medium.when_ready(full, self._lane_ready)
        self._set_timer(now)

    def _lane_ready(self) -> None:
        self._waits_for_lane = False
        self._pump()

    def _set_timer(self, now: float) -> None:
        wake = self.sender.wake_at
        # One that is set for earlier looks again then.
        if wake is not None and not now < self._pump_at <= wake:
            self._pump_at = max(wake, now)
            self._agenda.at(self._pump_at, self._wake, self._pump_at)

    def _wake(self, at: float) -> None:
        if at == self._pump_at:
            self._pump_at = 0.0
            wake = self.sender.wake_at
            if wake is not None and wake > at:
                self._set_timer(at)
            else:
                self._pump()

    def _send(self, out: Outgoing, now: float) -> None:
        packing = _packing_s(out.message)
        passed = partial(self._passed, out, packing)
        self.medium.send(out.lane, out.nbytes, now + packing, passed)

    def _passed(
        self, out: Outgoing, packing: float, begin: float, end: float, arrival: float
    ) -> None:
        if self.on_transfer is not None:
            self.on_transfer(self._stage, _is_prefill(out.message), begin, end)
        # The next stage unpacks one message after another, and takes none out of turn.
        self._handed_at = max(self._handed_at, arrival + self._handling) + packing
        self._agenda.at(self._handed_at, self._arrive, out)

    # --- what the link is like -------------------------------------------------------------------

    def _beat(self) -> None:
        now = self._agenda.now
        self.medium.send(Lane.DECODE, _BEAT, now, partial(self._beat_passed, now))
        self.sender.estimator.beat_left(now)
        self._tell(now)
        self._agenda.at(now + BUSY_INTERVAL, self._beat)

    def _beat_passed(self, sent_at: float, begin: float, end: float, arrival: float) -> None:
        self._agenda.at(arrival + self._handling + self.medium.reply_s, self._beat_back, sent_at)

    def _beat_back(self, sent_at: float) -> None:
        now = self._agenda.now
        if self.sender.estimator.beat_back(sent_at, now):
            self._on_estimate(self.sender.estimator.facts(now))
        self._tell(now)
        self._pump_soon()

    def _tell(self, now: float) -> None:
        """The policy hears of what has changed noticeably."""
        news = self.sender.estimator.news(now)
        if news is not None:
            self.sender.handle(news, now)
            self._on_estimate(self.sender.estimator.facts(now))

    # --- at the next stage -----------------------------------------------------------------------

    def _arrive(self, out: Outgoing) -> None:
        now, frame = self._agenda.now, out.message
        data = None if out.payload is None else memoryview(out.payload)
        if _packing_s(frame):
            frame, data = self._unpacked(frame)
        for arrival in self._receiver.frame(frame, data, now):
            self._on_arrival(arrival)
        self._acknowledge()

    def _unpacked(self, frame: Frame) -> tuple[Frame, memoryview]:
        body = frame.body
        assert isinstance(body, Volume | VolumePart)
        plain = Payload(body.payload.dtype, body.payload.shape)
        body = msgspec.structs.replace(body, payload=plain)
        return msgspec.structs.replace(frame, body=body), self._zeros[: plain.nbytes]

    def _acknowledge(self) -> None:
        now, receiver = self._agenda.now, self._receiver
        for ack in receiver.acks(now):
            self._agenda.at(now + self.medium.reply_s, self._acknowledged, ack)
        due = receiver.wake_at
        if due is not None and not now < self._ack_at <= due:
            self._ack_at = due
            self._agenda.at(due, self._acknowledge)

    def _acknowledged(self, ack: Ack) -> None:
        was_full = self.sender.full
        now = self._agenda.now
        self.sender.ack(ack, now)
        self._tell(now)
        self._pump_soon()
        if was_full and not self.sender.full:
            self._on_room()


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
