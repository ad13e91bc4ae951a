"""Tracks unread data of libzmq's connections, and selects connections to cut.

libzmq delivers whole messages only, so the parts of an endless message would accumulate in its
memory without limit. Therefore the bytes that the system received are compared with the bytes of
delivered messages.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from molink.wire.protocol import is_later

#: Maximum bytes of a handshake; further bytes count as unread.
HANDSHAKE_BYTES = 1024
#: Unread bytes above which a connection is checked; normal connections rarely have more.
SUSPECT_BYTES = 1 << 20
#: Bytes that CURVE adds to a part: command name, nonce, authentication code, flags.
_CURVE_OVERHEAD = 8 + 8 + 16 + 1


def wire_size(nbytes: int) -> int:
    """Return the bytes on the wire of a part of ``nbytes``, with CURVE and framing."""
    sealed = nbytes + _CURVE_OVERHEAD
    return sealed + (2 if sealed < 256 else 9)


@dataclass(frozen=True, slots=True)
class BacklogLimits:
    """Bounds of unread bytes and of connections.

    A *party* is a peer, or an address before its first whole message. Empty parts take 3.4 times
    their bytes in memory.
    """

    #: Maximum bytes of an incomplete message; a normal connection has at most 264 KB.
    party_unfinished: int = 4 << 20
    total_unfinished: int = 10 << 20
    #: Maximum bytes of all data while nobody reads; a link may have 8 MiB in flight per channel.
    party_bytes: int = 12 << 20
    total_bytes: int = 14 << 20
    party_connections: int = 64
    total_connections: int = 384


@dataclass(slots=True, eq=False)
class OpenConnection:
    """A TCP connection of a socket."""

    descriptor: int
    #: Address and port of the other end, which distinguish connections.
    remote: tuple[str, int]
    party: str = field(init=False)
    #: The routing id from a ROUTER; ``None`` before the first message.
    identity: bytes | None = None
    #: Bytes that libzmq has taken, and bytes of read messages.
    received: int = 0
    delivered: int = HANDSHAKE_BYTES
    #: Bytes received up to a time when all whole messages were read.
    settled: int = 0
    is_cut: bool = False

    def __post_init__(self) -> None:
        self.party = self.remote[0]

    @property
    def unread(self) -> int:
        """Received and unread bytes."""
        return max(0, self.received - self.delivered)

    @property
    def unfinished(self) -> int:
        """Received bytes of an incomplete message."""
        return max(0, self.settled - self.delivered)


class UnreadBytes:
    """Unread data of one socket's connections. Thread-safe."""

    def __init__(self, limits: BacklogLimits | None = None) -> None:
        self._limits = limits or BacklogLimits()
        self._lock = threading.Lock()
        #: Connections by descriptor, oldest first. Descriptors are reused, but never shared.
        self._live: dict[int, OpenConnection] = {}
        #: Closed connections with possibly unread messages.
        self._ended: list[OpenConnection] = []
        self._named: dict[bytes, OpenConnection] = {}
        #: Whether all whole messages have been read since the last count.
        self._drained = False

    def on_opened(self, descriptor: int, remote: tuple[str, int]) -> None:
        """Add a connection."""
        with self._lock:
            self._close_connection(descriptor)
            self._live[descriptor] = OpenConnection(descriptor, remote)

    def on_closed(self, descriptor: int) -> None:
        """Remove the connection of a descriptor."""
        with self._lock:
            self._close_connection(descriptor)

    def on_delivered(
        self, descriptor: int, nbytes: int, identity: bytes = b"", user: str = ""
    ) -> None:
        """Record a read message of ``nbytes`` on the wire.

        ``descriptor`` belongs to its connection, which may be closed; ``identity`` is its routing
        id, if any.
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
        """Record that all whole messages were read; closed connections are dropped."""
        self._drained = True
        if not self._ended:
            return
        with self._lock:
            for connection in self._ended:
                self._drop_connection(connection)
            self._ended.clear()

    def on_counted(self, counts: Iterable[tuple[OpenConnection, int]]) -> bool:
        """Record the bytes taken from each connection.

        Returns whether the caller should read and call :meth:`on_drained`, since too many bytes are
        unread.
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
        """Open connections that are not cut."""
        with self._lock:
            return [connection for connection in self._live.values() if not connection.is_cut]

    def find_excess(self) -> OpenConnection | None:
        """Choose the connection to cut next, and mark it as cut; ``None`` if all are within bounds.

        It belongs to a party beyond its bounds, and is its connection with the most unread bytes.
        If there are too many connections it is the oldest, so that nobody can occupy all of them.
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
        """Record a connection's routing id; ``False`` if the id belongs to an earlier connection.

        Routing ids rise. A message of an earlier connection may be read after its descriptor was
        reused, even as the first message of either connection.
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
