"""The receiving end of a link: the previous stage's two connections, around a LinkReceiver.

It does no I/O itself; all its methods belong to one thread: that of its timers.
"""

from collections.abc import Callable
from dataclasses import dataclass

from molink.link.base import InConnection, LinkName, LinkServer, Timer, Timers
from molink.link.heartbeat import StageProgress
from molink.link.receiver import Arrival, LinkReceiver
from molink.wire.messages.codec import DataMessage
from molink.wire.messages.data_plane import Ack, Channel, Frame, Heartbeat, LinkHello
from molink.wire.protocol import is_later


@dataclass(slots=True)
class InLinkStats:
    """What happened on a link so far, beside its receiver's counters."""

    #: Hellos of another peer, pipeline, epoch or stage.
    foreign_hellos: int = 0
    #: Messages on connections that are no channel of this link.
    unbound_messages: int = 0


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
        server: LinkServer,
        receiver: LinkReceiver,
        name: LinkName,
        peer_id: str,
        events: InLinkEvents,
    ) -> None:
        """``peer_id`` is the peer that runs the previous stage: nobody else may send."""
        self._timers = timers
        self._server = server
        self._receiver = receiver
        self._name = name
        self._peer_id = peer_id
        self._events = events
        self._identities: dict[Channel, bytes] = {}
        self._channels: dict[bytes, Channel] = {}
        self._timer: Timer | None = None
        self.stats = InLinkStats()
        #: The last heartbeat of the previous stage.
        self.last_heartbeat: Heartbeat | None = None

    @property
    def counters(self) -> dict[str, float]:
        """What happened so far, as ``/metrics`` names it."""
        received, stats = self._receiver.counters, self.stats
        counts = {
            "frames": received.frames,
            "bytes": received.nbytes,
            "duplicates": received.duplicates,
            "gaps": received.gaps,
            "old_epochs": received.old_epochs,
            "garbage": received.garbage,
            "strangers": stats.foreign_hellos,
            "unbound": stats.unbound_messages,
        }
        return {f"link_received_{name}_total": float(count) for name, count in counts.items()}

    @property
    def gauges(self) -> dict[str, float]:
        """What is the case now, as ``/metrics`` names it."""
        return {
            "link_unfinished_volumes": float(self._receiver.num_unfinished),
            "link_unfinished_bytes": float(self._receiver.unfinished_bytes),
        }

    def close(self) -> None:
        """Forget the link."""
        if self._timer is not None:
            self._timer.cancel()
        self._channels.clear()
        self._identities.clear()

    def handle_message(
        self, sender: InConnection, message: DataMessage, payload: memoryview | None
    ) -> bool:
        """Take a message from the server; ``False`` if it is none of a link's."""
        match message:
            case LinkHello():
                self._on_hello(sender, message)
            case Frame() | Heartbeat() if sender.identity not in self._channels:
                self.stats.unbound_messages += 1
            case Frame():
                self._on_frame(sender, message, payload)
            case Heartbeat():
                self._answer_heartbeat(sender, message)
            case _:
                return False
        return True

    def _on_hello(self, sender: InConnection, hello: LinkHello) -> None:
        """Bind a connection to its channel, and say what has already arrived on it.

        The latest one counts: what was sent on an earlier one may be read after its first words,
        and the previous stage would never know that it isn't heard any more.
        A hello of another epoch is not answered: the previous stage repeats it until both agree.
        """
        expected = self._name.make_hello(self._receiver.epoch, hello.channel)
        if hello != expected or sender.peer_id != self._peer_id:
            self.stats.foreign_hellos += 1
            if hello == expected:
                self._server.report_misbehaviour(
                    sender.peer_id, "says it is a stage that it is not"
                )
            return
        before = self._identities.get(hello.channel, b"")
        ack = self._receiver.make_ack(hello.channel)
        if before and is_later(before, sender.identity) and self._server.send(before, ack):
            # Read late, after that of the connection which followed on it, and which is there.
            self.stats.unbound_messages += 1
            return
        self._channels.pop(before, None)
        self._channels[sender.identity] = hello.channel
        self._identities[hello.channel] = sender.identity
        self._server.send(sender.identity, ack)

    def _on_frame(self, sender: InConnection, frame: Frame, payload: memoryview | None) -> None:
        if self._channels[sender.identity] is not frame.channel:
            self.stats.unbound_messages += 1
            self._server.report_misbehaviour(
                sender.peer_id, f"a frame of the {frame.channel.name} channel elsewhere"
            )
            return
        garbage = self._receiver.counters.garbage
        for arrival in self._receiver.on_frame(frame, payload, self._timers.time()):
            self._events.on_arrival(arrival)
        if self._receiver.counters.garbage > garbage:
            self._server.report_misbehaviour(sender.peer_id, self._receiver.last_fault)
        self._send_due_acks()

    def _send_due_acks(self) -> None:
        """Send the acknowledgements that are due and wake for the next."""
        for ack in self._receiver.due_acks(self._timers.time()):
            self._send_ack(ack)
        if self._timer is None and (at := self._receiver.wake_at) is not None:
            self._timer = self._timers.call_at(at, self._on_ack_timer)

    def _on_ack_timer(self) -> None:
        self._timer = None
        self._send_due_acks()

    def _send_ack(self, ack: Ack) -> None:
        identity = self._identities.get(ack.channel)
        if identity is not None:
            self._server.send(identity, ack)

    def _answer_heartbeat(self, sender: InConnection, heartbeat: Heartbeat) -> None:
        self.last_heartbeat = heartbeat
        own = self._events.progress()
        now = self._timers.time()
        epoch = self._receiver.epoch
        answer = Heartbeat(
            epoch, own.completed_seq, own.num_queued, now, heartbeat.sent_at, own.predicted_s
        )
        self._server.send(sender.identity, answer)
