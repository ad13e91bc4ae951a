"""ZeroMQ sockets as molink needs them: CURVE, bounded, and quick to notice a dead peer.

Every option is set before bind or connect. ``MAXMSGSIZE`` matters most: without it a stranger makes
libzmq allocate gigabytes before the handshake has begun.
"""

import errno
import sys
from collections.abc import Sequence

import zmq
import zmq.asyncio

from molink.errors import PortInUse, UsageError
from molink.wire.sockets.key_pair import KeyPair

#: The ZAP domain of every server socket.
DOMAIN = "molink"

_OPTIONS: dict[int, int] = {
    # Bytes of a frame: four times what any message of ours has.
    zmq.MAXMSGSIZE: 1 << 20,
    # All times are in ms. A handshake takes five round trips.
    zmq.HANDSHAKE_IVL: 3000,
    zmq.CONNECT_TIMEOUT: 3000,
    # A host that vanished is noticed after about 5 s (12 s on Windows if nothing was under way), in
    # s; MAXRT is for what is not acknowledged. ZMTP has a heartbeat too, but with it libzmq 4.3.5
    # ends the process when a connection is reset while its pipe is full.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 2,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: 3,
    # On Windows a connection whose system refuses MAXRT (Wine's does) would never be made.
    **({} if sys.platform == "win32" else {zmq.TCP_MAXRT: 5000}),
    # Nothing is kept for a connection that is closed, or isn't there yet.
    zmq.LINGER: 0,
    zmq.IMMEDIATE: 1,
    # Quick at first, but a PC that is switched off isn't called 20 times a second.
    zmq.RECONNECT_IVL: 50,
    zmq.RECONNECT_IVL_MAX: 1000,
    # Messages per connection: at 256 KB each this bounds what libzmq has to send to 16 MB.
    zmq.SNDHWM: 64,
    # No bound in messages, or a peer ends the process: it fills the pipe, puts a ZMTP PING behind,
    # and resets the connection. The monitor bounds what comes in bytes, by cutting connections.
    zmq.RCVHWM: 0,
}


def create_server(
    context: zmq.asyncio.Context, keys: KeyPair, *, ipv6: bool = False
) -> zmq.asyncio.Socket:
    """An unbound ROUTER that only peers with a key known to the gatekeeper can talk to."""
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
    """A DEALER for the server that holds ``server_public_key``.

    It connects to ``address`` (``tcp://host:port``), or is left unconnected if that is ``None``.
    """
    socket = _make(context, zmq.DEALER, keys)
    socket.set(zmq.CURVE_SERVERKEY, server_public_key.encode("ascii"))
    if address is not None:
        connect_socket(socket, address)
    return socket


def connect_socket(socket: zmq.asyncio.Socket, address: str) -> None:
    """Begin to connect to ``address``.

    Raises:
        UsageError: it is no address.
    """
    socket.set(zmq.IPV6, int("[" in address))
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise UsageError(f"{address!r} is no address to connect to: {error}") from error


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
        PortInUse: none is free; the message names ``option``.
        UsageError: ``host`` is no address of this PC.
    """
    first, stop = ports
    literal = f"[{host}]" if ":" in host else host
    for port in range(first, max(stop, first + 1)):
        try:
            socket.bind(f"tcp://{literal}:{port}")
        except zmq.ZMQError as error:
            # zmq has numbers of its own where the C library's differ from Winsock's.
            if error.errno in (zmq.EADDRINUSE, errno.EADDRINUSE, errno.EACCES):
                continue
            raise UsageError(f"can't listen on {host} port {port}: {error}") from error
        return int(socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    span = f"port {first} is" if stop <= first + 1 else f"ports {first} to {stop - 1} are"
    raise PortInUse(f"{span} in use on {host}: choose another with {option}")


def endpoints(hosts: Sequence[str], port: int) -> tuple[str, ...]:
    """``tcp://`` endpoints for host names or addresses as peers announce them."""
    return tuple(
        f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}" for host in hosts
    )
