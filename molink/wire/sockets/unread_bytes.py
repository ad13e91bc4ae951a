"""Who has sent more than was read: what libzmq holds of each connection, and whom to cut for it.

libzmq hands over whole messages only. The parts of one that never ends pile up in its memory, and
no limit of its own counts them. So the bytes that came on a connection, as the system counts them,
are held against those of the messages that were handed over.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from molink.wire.protocol import is_later

#: What a connection's handshake takes at most, in bytes; longer ones count as unread.
HANDSHAKE_BYTES = 1024
#: More than this, in bytes, is worth a closer look: no honest connection has it without a reason.
SUSPECT_BYTES = 1 << 20
#: What CURVE adds to a part: the command's name, a nonce, a code, and the part's flags.
_CURVE_OVERHEAD = 8 + 8 + 16 + 1


def wire_size(nbytes: int) -> int:
    """Bytes on the wire of a part of ``nbytes``, in CURVE and in its frame."""
    sealed = nbytes + _CURVE_OVERHEAD
    return sealed + (2 if sealed < 256 else 9)


@dataclass(frozen=True, slots=True)
class BacklogLimits:
    """Bounds of what came and was not read, in bytes, and of connections.

    A *party* is a user, or an address while a connection hasn't said a whole message yet. Parts
    without content take 3.4 times their bytes in memory.
    """

    #: Of a message that isn't complete: an honest connection has 264 KB at most.
    party_unfinished: int = 4 << 20
    total_unfinished: int = 10 << 20
    #: Of all, while nobody reads: one channel of a link may have 8 MiB on the way.
    party_bytes: int = 12 << 20
    total_bytes: int = 14 << 20
    party_connections: int = 64
    total_connections: int = 384


@dataclass(slots=True, eq=False)
class OpenConnection:
    """A TCP connection of a socket."""

    descriptor: int
    #: The other end's address and port, by which the connection is told from a later one.
    remote: tuple[str, int]
    party: str = field(init=False)
    #: The routing id that a ROUTER has given it; ``None`` until its first message.
    identity: bytes | None = None
    #: Bytes that libzmq has taken, and those of the messages that were read.
    received: int = 0
    delivered: int = HANDSHAKE_BYTES
    #: Bytes that came before a moment in which no whole message waited to be read.
    settled: int = 0
    is_cut: bool = False

    def __post_init__(self) -> None:
        self.party = self.remote[0]

    @property
    def unread(self) -> int:
        """Bytes that came and were not read."""
        return max(0, self.received - self.delivered)

    @property
    def unfinished(self) -> int:
        """Bytes that came and can't be read, since they make no whole message."""
        return max(0, self.settled - self.delivered)


class UnreadBytes:
    """What is unread of one socket's connections; for any thread."""

    def __init__(self, limits: BacklogLimits | None = None) -> None:
        self._limits = limits or BacklogLimits()
        self._lock = threading.Lock()
        #: By descriptor, oldest first. Numbers are used again, but not by two at once.
        self._live: dict[int, OpenConnection] = {}
        #: Ended, but something of theirs may still wait to be read.
        self._ended: list[OpenConnection] = []
        self._named: dict[bytes, OpenConnection] = {}
        #: Whether no whole message waited since the last look.
        self._drained = False

    def on_opened(self, descriptor: int, remote: tuple[str, int]) -> None:
        """There is a new connection."""
        with self._lock:
            self._close_connection(descriptor)
            self._live[descriptor] = OpenConnection(descriptor, remote)

    def on_closed(self, descriptor: int) -> None:
        """The connection with this descriptor is no more."""
        with self._lock:
            self._close_connection(descriptor)

    def on_delivered(
        self, descriptor: int, nbytes: int, identity: bytes = b"", user: str = ""
    ) -> None:
        """A whole message that took ``nbytes`` on the wire was read.

        ``descriptor`` is that of its connection, which may have ended since; ``identity`` is the
        routing id of it, if it has one.
        """
        with self._lock:
            connection = self._named.get(identity) if identity else self._live.get(descriptor)
            if connection is None:
                connection = self._live.get(descriptor)
                if connection is None or not self._assign_identity(connection, identity):
                    return
            connection.delivered += nbytes
            if user:
                connection.party = user

    def on_drained(self) -> None:
        """All whole messages were read, so nothing is left of connections that have ended."""
        self._drained = True
        if not self._ended:
            return
        with self._lock:
            for connection in self._ended:
                self._drop_connection(connection)
            self._ended.clear()

    def on_counted(self, counts: Iterable[tuple[OpenConnection, int]]) -> bool:
        """Connections were looked at, and so many bytes have been taken of each.

        Returns whether so much is unread that one should know whether it could be read: look for
        messages, then, and call :meth:`on_drained`.
        """
        wanted = False
        with self._lock:
            drained, self._drained = self._drained, False
            for connection, count in counts:
                if drained:
                    connection.settled = connection.received
                connection.received = count
                wanted = wanted or connection.unread > SUSPECT_BYTES
        return wanted

    @property
    def connections(self) -> list[OpenConnection]:
        """Those that are open and shall be."""
        with self._lock:
            return [connection for connection in self._live.values() if not connection.is_cut]

    def find_excess(self) -> OpenConnection | None:
        """The connection to cut next, or ``None`` if all is within the bounds.

        It is one of the party that exceeds them: the one furthest ahead, or the oldest if there are
        too many, so that someone who sits on all of them keeps nobody out. It counts as cut from
        now on.
        """
        with self._lock:
            found = self._find_excess()
            if found is not None:
                found.is_cut = True
            return found

    def _find_excess(self) -> OpenConnection | None:
        limits = self._limits
        ahead: dict[str, int] = defaultdict(int)
        unfinished: dict[str, int] = defaultdict(int)
        open_ones: dict[str, list[OpenConnection]] = defaultdict(list)
        for connection in self._live.values():
            if not connection.is_cut:
                open_ones[connection.party].append(connection)
                ahead[connection.party] += connection.unread
                unfinished[connection.party] += connection.unfinished
        if not open_ones:
            return None
        most = max(open_ones, key=lambda party: len(open_ones[party]))
        count = sum(map(len, open_ones.values()))
        if len(open_ones[most]) > limits.party_connections or count > limits.total_connections:
            return open_ones[most][0]
        for connection in self._ended:
            ahead[connection.party] += connection.unread
        for bytes_of, each, together in (
            (unfinished, limits.party_unfinished, limits.total_unfinished),
            (ahead, limits.party_bytes, limits.total_bytes),
        ):
            worst = max(bytes_of, key=lambda party: bytes_of[party])
            too_much = sum(bytes_of.values()) > together
            for party, connections in open_ones.items():
                if bytes_of[party] > each or (too_much and party == worst):
                    furthest = max(connections, key=lambda connection: connection.unread)
                    if furthest.unread:
                        return furthest
        return None

    def _assign_identity(self, connection: OpenConnection, identity: bytes) -> bool:
        """Note the routing id of a connection; ``False`` if it is that of an earlier one.

        Routing ids rise. A message of an earlier connection may be read only after its descriptor
        was used again, and be the first one read of either.
        """
        if connection.identity is not None:
            if not is_later(identity, connection.identity):
                return False
            self._named.pop(connection.identity, None)
            connection.delivered = HANDSHAKE_BYTES
        connection.identity = identity
        self._named[identity] = connection
        return True

    def _close_connection(self, descriptor: int) -> None:
        connection = self._live.pop(descriptor, None)
        if connection is None:
            return
        if connection.unread:
            self._ended.append(connection)
        else:
            self._drop_connection(connection)

    def _drop_connection(self, connection: OpenConnection) -> None:
        if connection.identity is not None:
            self._named.pop(connection.identity, None)
