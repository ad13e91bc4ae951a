"""A network that is slow, partitioned and lossy, with connections like ZeroMQ's.

Messages of a connection arrive in order or not at all. When a connection breaks, messages in flight
are lost or arrive late, after those of its successor. A new connection may first repeat messages of
the old one, and one that reconnected below the surface repeats its last ones. While a path is cut,
messages wait, as TCP retransmits; an end that hears nothing for long enough closes the connection.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from molink.errors import Unavailable
from molink.link.base import OutConnectionEvents
from molink.sim.event_queue import EventQueue
from tests.dst.process import Failure, Pc, Process

#: Seconds of a handshake, in one-way delays; and between two attempts of a client.
_HANDSHAKE = 5.0
_RETRY = (0.2, 1.0)
#: Messages repeated on the next connection, at most.
_RECENT = 3


@dataclass(frozen=True, slots=True)
class Sender:
    """A message's sender as a server sees it."""

    identity: bytes
    peer_id: str


def nothing(*_: object) -> None:
    """Ignore an event."""


class Network:
    """Reachability and delay between PCs, by direction."""

    def __init__(self, event_queue: EventQueue, seed: int, rng: Random) -> None:
        self.event_queue = event_queue
        self.seed = seed
        self.rng = rng
        #: Minimum one-way seconds between two PCs.
        self.latency = rng.choice((0.002, 0.02, 0.05))
        #: Seconds without any sign of the other end after which a connection closes.
        self.dead_after = rng.uniform(4.0, 12.0)
        #: Whether connections to frozen processes close too.
        self.frozen_are_dead = rng.random() < 0.3
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._slow: dict[tuple[str, str], float] = {}
        self.pcs: dict[str, Pc] = {}
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.wires: dict[bytes, Wire] = {}
        self._numbers = 0

    # --- paths -----------------------------------------------------------------------------------

    def blocked(self, source: Pc, target: Pc) -> bool:
        """Whether nothing gets from one PC to the other."""
        if not (source.up and target.up):
            return True
        return source is not target and self._cuts.get((source.name, target.name), 0) > 0

    def broken(self, one: Pc, other: Pc) -> bool:
        """Whether either direction is blocked."""
        return self.blocked(one, other) or self.blocked(other, one)

    def cut(self, pairs: list[tuple[Pc, Pc]]) -> None:
        """Block these directions."""
        for source, target in pairs:
            self._cuts[source.name, target.name] += 1
        self._check_wires()

    def heal(self, pairs: list[tuple[Pc, Pc]]) -> None:
        """Undo :meth:`cut`."""
        for source, target in pairs:
            self._cuts[source.name, target.name] -= 1
        for wire in list(self.wires.values()):
            wire.healed()

    def slow(self, one: Pc, other: Pc, factor: float) -> None:
        """Multiply the delay between two PCs."""
        self._slow[one.name, other.name] = self._slow[other.name, one.name] = factor

    def reaches(self, process: Process, target: tuple[str, int]) -> bool:
        """Whether a connection to a port can be made now."""
        server = self.listeners.get(target)
        if server is None or server.process.frozen:
            return False
        return not self.broken(process.pc, server.process.pc)

    def delay(self, source: Pc, target: Pc, rng: Random) -> float:
        """Delay of a message in seconds."""
        if source is target:
            return 0.0005
        slow = self._slow.get((source.name, target.name), 1.0) if self._slow else 1.0
        return self.latency * slow * (1.0 + 2.0 * rng.random() ** 3)

    def _check_wires(self) -> None:
        """Connections on broken paths close if these stay broken."""
        for wire in list(self.wires.values()):
            wire.watch()

    # --- PCs and processes -----------------------------------------------------------------------

    def pc_down(self) -> None:
        """A PC is off and silent."""
        self._check_wires()

    def died(self, process: Process) -> None:
        """The kernel closes a dead process's connections where it can reach the other end."""
        for listener in [one for one in self.listeners.values() if one.process is process]:
            listener.close()
        for wire in list(self.wires.values()):
            wire.process_died(process)

    def froze(self, process: Process) -> None:
        """Peers of a frozen process may close its connections."""
        if self.frozen_are_dead:
            for wire in list(self.wires.values()):
                wire.process_froze(process)

    # --- faults of connections -------------------------------------------------------------------

    def reset(self, one: Pc, other: Pc) -> None:
        """Break all connections between two PCs."""
        for wire in list(self.wires.values()):
            if {wire.client.process.pc, wire.server.process.pc} == {one, other}:
                wire.reset()

    def echo(self, one: Pc, other: Pc) -> None:
        """Reconnect below the surface, which repeats messages."""
        for wire in list(self.wires.values()):
            if {wire.client.process.pc, wire.server.process.pc} == {one, other}:
                wire.echo()

    def next_number(self) -> int:
        """A new connection number."""
        self._numbers += 1
        return self._numbers


class _Flow:
    """One direction of a connection."""

    def __init__(
        self,
        network: Network,
        source: Pc,
        process: Process,
        receive: Callable[..., None],
        rng: Random,
        closed: Callable[[], None],
    ) -> None:
        self._network = network
        self._event_queue = network.event_queue
        self._source = source
        self._target = process.pc
        self.process = process
        self._receive = receive
        self._rng = rng
        self._closed = closed
        self._last = 0.0
        self._held: list[tuple[Any, Any]] = []
        self.open = True
        self.recent: deque[tuple[Any, Any]] = deque(maxlen=_RECENT)

    def send(self, message: Any, payload: Any) -> None:
        self.recent.append((message, payload))
        self._event_queue.schedule_at(self._next(), self._arrive, message, payload)

    def _next(self) -> float:
        at = self._event_queue.now + self._network.delay(self._source, self._target, self._rng)
        if at > self._last:
            self._last = at
        return self._last

    def after_all(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run once all messages in flight have arrived."""
        self._event_queue.schedule_at(self._next(), action, *arguments)

    def _arrive(self, message: Any, payload: Any) -> None:
        if not self.open:
            self._closed()
            return
        if self._held or self._network.blocked(self._source, self._target):
            self._held.append((message, payload))
            return
        self.process.run(self._receive, message, payload)

    def healed(self) -> None:
        """The sender's TCP retransmits after a while."""
        if self._held:
            self._event_queue.schedule_at(
                self._event_queue.now + 2.0 * self._rng.random(), self._flush
            )

    def _flush(self) -> None:
        if not self.open or self._network.blocked(self._source, self._target):
            return
        held, self._held = self._held, []
        for message, payload in held:
            self.process.run(self._receive, message, payload)


class Wire:
    """One connection of a client to a server, until either end closes it."""

    def __init__(self, network: Network, client: "Dial", server: "Listener") -> None:
        number = network.next_number()
        self.identity = b"\0" + number.to_bytes(4, "big")
        self.client = client
        self.server = server
        self._network = network
        self._rng = rng = Random(network.seed * 1_000_003 + number)
        here, there = client.process, server.process
        sender = Sender(self.identity, client.user)
        ended = self.nobody_there
        self.up = _Flow(
            network, here.pc, there, partial(server.receive_message, sender), rng, ended
        )
        self.down = _Flow(network, there.pc, here, client.receive_message, rng, ended)
        self._watched = False
        network.wires[self.identity] = self
        server.wires[self.identity] = self

    def healed(self) -> None:
        self.up.healed()
        self.down.healed()

    def echo(self) -> None:
        for name, flow in (("up", self.up), ("down", self.down)):
            if name not in self.client.echoes:
                continue
            for message, payload in tuple(flow.recent):
                flow.send(message, payload)

    # --- closing ---------------------------------------------------------------------------------

    def watch(self) -> None:
        """Close it if its path stays broken."""
        if not self._watched and self._is_broken():
            self._watched = True
            network = self._network
            network.event_queue.schedule_at(
                network.event_queue.now + network.dead_after, self._watched_for_long
            )

    def _is_broken(self) -> bool:
        return self._network.broken(self.client.process.pc, self.server.process.pc)

    def _watched_for_long(self) -> None:
        self._watched = False
        if self._is_broken() or self._half_dead():
            self.reset()

    def _half_dead(self) -> bool:
        return not (self.client.process.alive and self.server.process.alive)

    def nobody_there(self) -> None:
        """A message came for a dead process: its kernel answers with a reset."""
        if self._half_dead() and not self._is_broken():
            self._tell_client(self._network.latency)
            self._server_hears()

    def reset(self) -> None:
        """Both ends see it broken at different times; some messages in flight are lost."""
        self._lose()
        self._tell_client(self._rng.random() * 0.1)
        self._tell_server(self._rng.random() * 0.1)

    def _lose(self) -> None:
        for flow in (self.up, self.down):
            flow.open = flow.open and self._rng.random() < 0.3

    def given_up(self) -> None:
        """The client closes it; the server learns of it if it can."""
        self.down.open = False
        self.up.open = self.up.open and self._rng.random() < 0.5
        if not self._is_broken():
            self.up.after_all(self._server_hears)
        else:
            self._network.event_queue.schedule_at(
                self._network.event_queue.now + self._network.dead_after, self._server_hears
            )

    def shut_out(self) -> None:
        """The server closes it."""
        self._server_hears()
        if not self._is_broken():
            self.down.after_all(self._tell_client, 0.0)

    def process_died(self, process: Process) -> None:
        if process is self.client.process:
            self.down.open = False
            if self._is_broken():
                self.watch()
            else:
                self.up.after_all(self._server_hears)
        elif process is self.server.process:
            self.up.open = False
            self._server_hears()
            if self._is_broken():
                self.watch()
            else:
                self.down.after_all(self._tell_client, 0.0)

    def process_froze(self, process: Process) -> None:
        if process in (self.client.process, self.server.process):
            event_queue = self._network.event_queue
            event_queue.schedule_at(
                event_queue.now + self._network.dead_after, self._frozen_for_long, process
            )

    def _frozen_for_long(self, process: Process) -> None:
        if process.frozen and self.identity in self._network.wires:
            self.reset()

    def _tell_client(self, seconds: float) -> None:
        self.client.process.later(seconds, self.client.lost, self)

    def _tell_server(self, seconds: float) -> None:
        event_queue = self._network.event_queue
        event_queue.schedule_at(event_queue.now + seconds, self._server_hears)

    def _server_hears(self) -> None:
        """The server can no longer answer on it."""
        there = self.server.wires.pop(self.identity, None)
        self._network.wires.pop(self.identity, None)
        if there is not None:
            self.server.process.run(self.server.on_disconnect)


class Listener:
    """Stands in for :class:`molink.wire.sockets.server.Server`."""

    def __init__(
        self,
        network: Network,
        process: Process,
        port: int,
        key: str,
        handler: Callable[[Sender, Any, Any], object],
        admits: Callable[[str], bool],
    ) -> None:
        self._network = network
        self.process = process
        self.port = port
        self.key = key
        self._handler = handler
        self.admits = admits
        self.wires: dict[bytes, Wire] = {}
        #: Called when a connection has ended.
        self.on_disconnect: Callable[[], None] = nothing
        network.listeners[process.pc.name, port] = self

    def receive_message(self, sender: Sender, message: Any, payload: Any) -> None:
        """A message arrived."""
        if self.admits(sender.peer_id):
            self._handler(sender, message, payload)

    def send(self, identity: bytes, message: Any, payload: Any = None) -> bool:
        """Answer on a connection; returns whether it exists."""
        wire = self.wires.get(identity)
        if wire is None:
            return False
        wire.down.send(message, payload)
        return True

    def report_misbehaviour(self, peer_id: str, reason: str) -> None:
        """Fail: no simulated peer misbehaves.

        Raises:
            Failure: always.
        """
        raise Failure(f"{self.process} takes {peer_id} for hostile: {reason}")

    def expel(self, user: str) -> None:
        """Disconnect a former member."""
        for wire in list(self.wires.values()):
            if wire.client.user == user:
                wire.shut_out()

    def close(self) -> None:
        """Stop listening."""
        where = self.process.pc.name, self.port
        if self._network.listeners.get(where) is self:
            del self._network.listeners[where]


class Dial:
    """Stands in for :class:`molink.wire.sockets.client.Client`: reconnects for ever."""

    is_congested = False

    def __init__(
        self,
        network: Network,
        process: Process,
        user: str,
        target: Callable[[], tuple[str, int]],
        key: str,
        events: OutConnectionEvents,
        *,
        echoes: str = "",
    ) -> None:
        """``target()`` is called before each attempt.

        ``echoes``: messages may be duplicated ``up`` to the server or ``down`` from it.
        """
        self._network = network
        self.process = process
        self.user = user
        self._target = target
        self._key = key
        self._events = events
        self.echoes = echoes
        self.wire: Wire | None = None
        self._again: list[tuple[Any, Any]] = []
        self._closed = False
        self._trying = False
        #: Whether there was a connection since the other end was last seen dead.
        self._met = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self.wire is not None

    def start(self) -> None:
        """Start to connect."""
        self._try_in(0.0)

    def send(self, message: Any, payload: Any = None) -> None:
        """Send on the connection.

        Raises:
            Unavailable: there is none.
        """
        if self.wire is None:
            raise Unavailable("not connected")
        self.wire.up.send(message, payload)
        if self._again and self._network.rng.random() < 0.5:
            again, self._again = self._again, []
            for old in again:
                self.wire.up.send(*old)

    def reconnect_now(self) -> None:
        """Replace the connection."""
        self.process.call_soon(self._redial)

    def _redial(self) -> None:
        if self.wire is not None:
            self.wire.given_up()
            self.lost(self.wire)

    def close(self) -> None:
        """Disconnect."""
        self._closed = True
        if self.wire is not None:
            self.wire.given_up()
            self.wire = None

    def receive_message(self, message: Any, payload: Any) -> None:
        """A message arrived."""
        if not self._closed:
            self._events.on_message(message, payload)

    def lost(self, wire: Wire) -> None:
        """The connection broke."""
        if self.wire is not wire:
            return
        if "up" in self.echoes and self._network.rng.random() < 0.3:
            self._again = list(wire.up.recent)
        self.wire = None
        if not self._closed:
            self._events.on_disconnect()
            self._try_in(0.05)

    def _try_in(self, seconds: float) -> None:
        if self._trying:
            return
        self._trying = True
        self.process.later(seconds + _HANDSHAKE * self._network.latency, self._try)

    def _try(self) -> None:
        self._trying = False
        if self._closed or self.wire is not None:
            return
        network, here = self._network, self.process.pc
        name, port = self._target()
        server = network.listeners.get((name, port))
        reached = (
            server is not None
            and not server.process.frozen
            and not network.broken(here, server.process.pc)
            and server.key == self._key
            and server.admits(self.user)
        )
        if not reached:
            if server is None and self._met and not network.broken(here, network.pcs[name]):
                self._met = False
                self._events.on_lost("nothing listens there")
            self._try_in(network.rng.uniform(*_RETRY))
            return
        assert server is not None
        self.wire, self._met = Wire(network, self, server), True
        self._events.on_connect()
