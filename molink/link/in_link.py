"""The receiving end of a link: two connections from the previous stage, and a LinkReceiver.

It does no I/O; all methods run on the thread of its timers.
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
    """Counters of a link that its :class:`LinkReceiver` doesn't keep."""

    #: Rejected hellos, from another peer, pipeline, epoch or stage.
    foreign_hellos: int = 0
    #: Messages on connections without a channel of this link.
    unbound_messages: int = 0


@dataclass(frozen=True, slots=True)
class InLinkEvents:
    """Callbacks of an incoming link.

    ``progress`` returns the stage's progress; ``on_arrival`` gets each message once, in order.
    """

    progress: Callable[[], StageProgress]
    on_arrival: Callable[[Arrival], None]


class InLink:
    """Receives from the previous stage and answers it, for one epoch."""

    def __init__(
        self,
        timers: Timers,
        server: LinkServer,
        receiver: LinkReceiver,
        name: LinkName,
        peer_id: str,
        events: InLinkEvents,
    ) -> None:
        """``peer_id`` runs the previous stage; messages from other peers are rejected."""
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
        self.last_heartbeat: Heartbeat | None = None

    @property
    def counters(self) -> dict[str, float]:
        """Counters by the names of ``/metrics``."""
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
        """Gauges by the names of ``/metrics``."""
        return {
            "link_unfinished_volumes": float(self._receiver.num_unfinished),
            "link_unfinished_bytes": float(self._receiver.unfinished_bytes),
        }

    def close(self) -> None:
        """End the link."""
        if self._timer is not None:
            self._timer.cancel()
        self._channels.clear()
        self._identities.clear()

    def handle_message(
        self, sender: InConnection, message: DataMessage, payload: memoryview | None
    ) -> bool:
        """Handle a server's message; ``False`` if it is not a link message."""
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
        """Bind a connection to its channel and acknowledge what has arrived on that channel.

        The newest connection wins. Messages of an older one may be read after the newer one's
        hello, and if they won, the previous stage would never learn that its newer connection is
        ignored. A hello of another epoch isn't answered; the previous stage repeats it until both
        epochs agree.
        """
        expected = self._name.make_hello(self._receiver.epoch, hello.channel)
        if hello != expected or sender.peer_id != self._peer_id:
            self.stats.foreign_hellos += 1
            if hello == expected:
                self._server.report_misbehaviour(sender.peer_id, "claims to be another stage")
            return
        before = self._identities.get(hello.channel, b"")
        ack = self._receiver.make_ack(hello.channel)
        if before and is_later(before, sender.identity) and self._server.send(before, ack):
            # This is a late hello of an older connection.
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
                sender.peer_id, f"a frame of the {frame.channel.name} channel on another connection"
            )
            return
        garbage = self._receiver.counters.garbage
        for arrival in self._receiver.on_frame(frame, payload, self._timers.time()):
            self._events.on_arrival(arrival)
        if self._receiver.counters.garbage > garbage:
            self._server.report_misbehaviour(sender.peer_id, self._receiver.last_fault)
        self._send_due_acks()

    def _send_due_acks(self) -> None:
        """Send due acknowledgements, and set the timer for the next one."""
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
