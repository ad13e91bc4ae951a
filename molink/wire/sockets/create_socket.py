"""Creates ZeroMQ sockets: CURVE, bounded memory, fast detection of dead peers.

All options are set before bind or connect. ``MAXMSGSIZE`` matters most: without it anyone can make
libzmq allocate gigabytes before the handshake.
"""

import errno
import sys
from collections.abc import Sequence

import zmq
import zmq.asyncio

from molink.errors import PortInUse, UsageError
from molink.wire.sockets.key_pair import KeyPair

#: The ZAP domain of all server sockets.
DOMAIN = "molink"

_OPTIONS: dict[int, int] = {
    # Bytes of a frame: four times the largest message.
    zmq.MAXMSGSIZE: 1 << 20,
    # All times are in ms. A handshake takes five round trips.
    zmq.HANDSHAKE_IVL: 3000,
    zmq.CONNECT_TIMEOUT: 3000,
    # These, in s, detect a vanished host after about 5 s (12 s on Windows if nothing was in
    # flight); MAXRT is for unacknowledged data. ZMTP heartbeats are off, since libzmq 4.3.5 aborts
    # the process if a connection with a full pipe is reset.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 2,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: 3,
    # Windows systems that refuse MAXRT (such as Wine's) would never connect.
    **({} if sys.platform == "win32" else {zmq.TCP_MAXRT: 5000}),
    # Messages for a closed or missing connection are dropped.
    zmq.LINGER: 0,
    zmq.IMMEDIATE: 1,
    # The first retries are quick, but a PC that is off isn't dialed 20 times a second.
    zmq.RECONNECT_IVL: 50,
    zmq.RECONNECT_IVL_MAX: 1000,
    # Messages per connection: at 256 KB each this bounds libzmq's send buffer to 16 MB.
    zmq.SNDHWM: 64,
    # There is no bound in messages: with one, a peer could abort the process through a full pipe, a
    # ZMTP PING and a reset. Instead the monitor bounds received bytes by cutting connections.
    zmq.RCVHWM: 0,
}


def create_server(
    context: zmq.asyncio.Context, keys: KeyPair, *, ipv6: bool = False
) -> zmq.asyncio.Socket:
    """Create an unbound ROUTER for peers whose keys the authenticator knows."""
    socket = _make(context, zmq.ROUTER, keys)
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.ZAP_DOMAIN, DOMAIN.encode())
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.set(zmq.IPV6, int(ipv6))
    return socket


def create_client(
    context: zmq.asyncio.Context, keys: KeyPair, server_public_key: str, address: str | None = None
) -> zmq.asyncio.Socket:
    """Create a DEALER to the holder of ``server_public_key``, at ``address`` if given."""
    socket = _make(context, zmq.DEALER, keys)
    socket.set(zmq.CURVE_SERVERKEY, server_public_key.encode("ascii"))
    if address is not None:
        connect_socket(socket, address)
    return socket


def connect_socket(socket: zmq.asyncio.Socket, address: str) -> None:
    """Start to connect to ``address`` (``tcp://host:port``).

    Raises:
        UsageError: it is invalid.
    """
    socket.set(zmq.IPV6, int("[" in address))
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise UsageError(f"{address!r} is not a valid address: {error}") from error


def _make(context: zmq.asyncio.Context, kind: int, keys: KeyPair) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    for option, value in _OPTIONS.items():
        socket.set(option, value)
    socket.set(zmq.CURVE_PUBLICKEY, keys.public.encode("ascii"))
    socket.set(zmq.CURVE_SECRETKEY, keys.secret.encode("ascii"))
    return socket


def bind_socket(
    socket: zmq.asyncio.Socket, host: str, ports: tuple[int, int], option: str = "--port"
) -> int:
    """Bind to the first free port of ``ports`` (half-open; port 0 takes any) and return it.

    Raises:
        PortInUse: none is free; names ``option``.
        UsageError: ``host`` is not an address of this PC.
    """
    first, stop = ports
    literal = f"[{host}]" if ":" in host else host
    for port in range(first, max(stop, first + 1)):
        try:
            socket.bind(f"tcp://{literal}:{port}")
        except zmq.ZMQError as error:
            # zmq has its own error numbers if the C library's differ from Winsock's.
            if error.errno in (zmq.EADDRINUSE, errno.EADDRINUSE, errno.EACCES):
                continue
            raise UsageError(f"can't listen on {host} port {port}: {error}") from error
        return int(socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    span = f"port {first} is" if stop <= first + 1 else f"ports {first} to {stop - 1} are"
    raise PortInUse(f"{span} in use on {host}: choose another with {option}")


def endpoints(hosts: Sequence[str], port: int) -> tuple[str, ...]:
    """Return ``tcp://`` endpoints for a peer's host names or addresses."""
    return tuple(
        f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}" for host in hosts
    )
