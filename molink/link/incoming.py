"""The receiving end of a link: the previous stage's two connections, around a LinkReceiver.

It does no I/O itself; all its methods belong to one thread: that of its timers.
"""

from collections.abc import Callable
from dataclasses import dataclass

from molink.link.ends import Answering, Connection, LinkName, Timer, Timers
from molink.link.heartbeat import StageProgress
from molink.link.receiver import Arrival, LinkReceiver
from molink.wire.messages.codec import DataMessage
from molink.wire.messages.data import Ack, Beat, Frame, Lane, LinkHello
from molink.wire.routing import is_later


@dataclass(slots=True)
class InLinkStats:
    """What happened on a link so far, beside its receiver's counters."""

    #: Hellos of another peer, pipeline, epoch or stage.
    strangers: int = 0
    #: Messages on connections that are no lane of this link.
    unbound: int = 0


@dataclass(frozen=True, slots=True)
class InLinkEvents:
    """What an incoming link asks of its stage, and tells it.

    ``progress`` says how the stage gets on; ``on_arrival`` is told what has come, once, in order.
    """

    progress: Callable[[], StageProgress]
    on_arrival: Callable[[Arrival], None]


class InLink:
    """Takes what the previous stage sends, for one epoch, and answers it."""

    def __init__(
        self,
        timers: Timers,
        server: Answering,
        receiver: LinkReceiver,
        name: LinkName,
        user_id: str,
        events: InLinkEvents,
    ) -> None:
        """``user_id`` is the peer that runs the previous stage: nobody else may send."""
        self._timers = timers
        self._server = server
        self._receiver = receiver
        self._name = name
        self._user_id = user_id
        self._events = events
        self._identities: dict[Lane, bytes] = {}
        self._lanes: dict[bytes, Lane] = {}
        self._timer: Timer | None = None
        self.stats = InLinkStats()
        #: The last beat of the previous stage.
        self.beat: Beat | None = None

    @property
    def counts(self) -> dict[str, float]:
        """What happened so far, as ``/metrics`` names it."""
        received, stats = self._receiver.counters, self.stats
        counts = {
            "frames": received.frames,
            "bytes": received.nbytes,
            "duplicates": received.duplicates,
            "gaps": received.gaps,
            "old_epochs": received.old_epochs,
            "garbage": received.garbage,
            "strangers": stats.strangers,
            "unbound": stats.unbound,
        }
        return {f"link_received_{name}_total": float(count) for name, count in counts.items()}

    @property
    def gauges(self) -> dict[str, float]:
        """What is the case now, as ``/metrics`` names it."""
        return {
            "link_unfinished_volumes": float(self._receiver.unfinished),
            "link_unfinished_bytes": float(self._receiver.unfinished_bytes),
        }

    def close(self) -> None:
        """Forget the link."""
        if self._timer is not None:
            self._timer.cancel()
        self._lanes.clear()
        self._identities.clear()

    def handle(self, sender: Connection, message: DataMessage, payload: memoryview | None) -> bool:
        """Take a message from the server; ``False`` if it is none of a link's."""
        match message:
            case LinkHello():
                self._hello(sender, message)
            case Frame() | Beat() if sender.identity not in self._lanes:
                self.stats.unbound += 1
            case Frame():
                self._frame(sender, message, payload)
            case Beat():
                self._answer(sender, message)
            case _:
                return False
        return True

    def _hello(self, sender: Connection, hello: LinkHello) -> None:
        """Bind a connection to its lane, and say what has already arrived on it.

        The latest one counts: what was sent on an earlier one may be read after its first words,
        and the previous stage would never know that it isn't heard any more.
        A hello of another epoch is not answered: the previous stage repeats it until both agree.
        """
        expected = self._name.hello(self._receiver.epoch, hello.lane)
        if hello != expected or sender.user_id != self._user_id:
            self.stats.strangers += 1
            if hello == expected:
                self._server.offend(sender.user_id, "says it is a stage that it is not")
            return
        before = self._identities.get(hello.lane, b"")
        ack = self._receiver.ack(hello.lane)
        if before and is_later(before, sender.identity) and self._server.send(before, ack):
            # Read late, after that of the connection which followed on it, and which is there.
            self.stats.unbound += 1
            return
        self._lanes.pop(before, None)
        self._lanes[sender.identity] = hello.lane
        self._identities[hello.lane] = sender.identity
        self._server.send(sender.identity, ack)

    def _frame(self, sender: Connection, frame: Frame, payload: memoryview | None) -> None:
        if self._lanes[sender.identity] is not frame.lane:
            self.stats.unbound += 1
            self._server.offend(sender.user_id, f"a frame of the {frame.lane.name} lane elsewhere")
            return
        garbage = self._receiver.counters.garbage
        for arrival in self._receiver.frame(frame, payload, self._timers.time()):
            self._events.on_arrival(arrival)
        if self._receiver.counters.garbage > garbage:
            self._server.offend(sender.user_id, self._receiver.fault)
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Send the acknowledgements that are due and wake for the next."""
        for ack in self._receiver.acks(self._timers.time()):
            self._send_ack(ack)
        if self._timer is None and (at := self._receiver.wake_at) is not None:
            self._timer = self._timers.call_at(at, self._acknowledge_again)

    def _acknowledge_again(self) -> None:
        self._timer = None
        self._acknowledge()

    def _send_ack(self, ack: Ack) -> None:
        identity = self._identities.get(ack.lane)
        if identity is not None:
            self._server.send(identity, ack)

    def _answer(self, sender: Connection, beat: Beat) -> None:
        self.beat = beat
        own = self._events.progress()
        now = self._timers.time()
        epoch = self._receiver.epoch
        answer = Beat(epoch, own.completed, own.queued, now, beat.sent_at, own.predicted)
        self._server.send(sender.identity, answer)
