"""ZMTP 3.1 with CURVE on a bare TCP socket, for what libzmq would never send.

Synchronous: a handshake does not depend on the other side's event loop. The crypto is libsodium's
(PyNaCl), independent of molink and libzmq.
"""

import contextlib
import os
import socket
import struct
from types import TracebackType
from typing import Self

from nacl.bindings import (
    crypto_box,
    crypto_box_afternm,
    crypto_box_beforenm,
    crypto_box_keypair,
    crypto_box_open,
    crypto_box_open_afternm,
)
from zmq.utils import z85

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01" + b"CURVE".ljust(20, b"\0")
#: Flags of a frame inside its CURVE box.
MORE, COMMAND = 1, 2
_TIMEOUT_S = 10.0


class Refused(Exception):
    """The other side broke off the handshake."""


def frame(body: bytes, flags: int = 0) -> bytes:
    """A frame of ZMTP; ``flags`` beside the one for its length (4: a command)."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


def metadata(kind: bytes, identity: bytes = b"") -> bytes:
    """The properties at the end of a handshake."""
    pairs = ((b"Socket-Type", kind), (b"Identity", identity))
    return b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value for name, value in pairs
    )


class Wire:
    """One end of a connection after, or amid, its handshake."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(_TIMEOUT_S)
        self._nonce = 0
        self._mine, self._theirs = b"", b""
        self._shared = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close it as TCP does."""
        self.socket.close()

    def reset(self) -> None:
        """End it abruptly: the other side's system sees a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    # --- messages ----------------------------------------------------------------------------

    def part(self, body: bytes, flags: int = 0) -> bytes:
        """The bytes of one part; :data:`MORE` and :data:`COMMAND` are ``flags``."""
        self._nonce += 1
        number = struct.pack(">Q", self._nonce)
        box = crypto_box_afternm(bytes([flags]) + body, self._mine + number, self._shared)
        return frame(b"\x07MESSAGE" + number + box)

    def message(self, *parts: bytes) -> bytes:
        """The bytes of a whole message."""
        last = len(parts) - 1
        return b"".join(self.part(part, MORE * (i < last)) for i, part in enumerate(parts))

    def ping(self, ttl: int = 0) -> bytes:
        """The bytes of a PING; ``ttl`` in tenths of a second."""
        return self.part(b"\x04PING" + struct.pack(">H", ttl), COMMAND)

    def send(self, data: bytes) -> bool:
        """Send all of ``data``; ``False`` if the connection was closed meanwhile."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> list[bytes]:
        """The next message's parts.

        Raises:
            Refused: the connection has ended.
        """
        parts: list[bytes] = []
        while True:
            body = self.frame()
            number = body[8:16]
            plain = crypto_box_open_afternm(body[16:], self._theirs + number, self._shared)
            if plain[0] & COMMAND:
                continue
            parts.append(plain[1:])
            if not plain[0] & MORE:
                return parts

    @property
    def ended(self) -> bool:
        """Whether the other side closes the connection within a while."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    # --- frames ------------------------------------------------------------------------------

    def frame(self) -> bytes:
        """The body of the next frame.

        Raises:
            Refused: the connection has ended.
        """
        flags, size = self.exactly(2)
        if flags & 2:
            (size,) = struct.unpack(">Q", bytes([size]) + self.exactly(7))
        return self.exactly(size)

    def exactly(self, size: int) -> bytes:
        """The next ``size`` bytes.

        Raises:
            Refused: the connection has ended.
        """
        data = b""
        while len(data) < size:
            with contextlib.suppress(ConnectionError):
                got = self.socket.recv(size - len(data))
                if got:
                    data += got
                    continue
            raise Refused("the connection has ended")
        return data

    def _speaks(self, mine: bytes, theirs: bytes, peer: bytes, secret: bytes) -> None:
        self._mine, self._theirs = mine, theirs
        self._shared = crypto_box_beforenm(peer, secret)


class RawClient(Wire):
    """Connects to a server as the holder of a key.

    The steps of a handshake are methods of their own, so that one may stop in its midst.
    """

    def __init__(
        self,
        port: int,
        secret: str,
        public: str,
        server: str,
        *,
        host: str = "127.0.0.1",
        source: str = "127.0.0.1",
    ) -> None:
        """``public`` and ``secret`` are our keys, ``server`` is the server's public key, in Z85."""
        super().__init__(socket.create_connection((host, port), _TIMEOUT_S, (source, 0)))
        self._own_public, self._own_secret = z85.decode(public), z85.decode(secret)
        self._server = z85.decode(server)
        self._short_public, self._short_secret = crypto_box_keypair()
        #: The last handshake command, to send it again.
        self.initiate_bytes = b""

    def handshake(self, kind: bytes = b"DEALER", identity: bytes = b"") -> Self:
        """Run the whole handshake.

        Raises:
            Refused: the server let us down.
        """
        try:
            self.greet()
            self.hello()
            self.initiate(kind, identity)
            self.ready()
        except OSError as error:
            self.close()
            raise Refused(str(error)) from error
        except Refused:
            self.close()
            raise
        return self

    def greet(self) -> None:
        """Exchange greetings."""
        self.socket.sendall(GREETING + bytes(32))
        self.exactly(64)

    def hello(self) -> None:
        """Send HELLO and take WELCOME."""
        self.socket.sendall(self.hello_bytes())
        body = self.frame()
        if not body.startswith(b"\x07WELCOME"):
            raise Refused(repr(body[:40]))
        plain = crypto_box_open(
            body[24:], b"WELCOME-" + body[8:24], self._server, self._short_secret
        )
        self._server_short, self._cookie = plain[:32], plain[32:]

    def hello_bytes(self) -> bytes:
        """A HELLO."""
        number = self._number()
        box = crypto_box(bytes(64), b"CurveZMQHELLO---" + number, self._server, self._short_secret)
        body = b"\x05HELLO\x01\0" + bytes(72) + self._short_public + number + box
        return frame(body, 4)

    def initiate(self, kind: bytes = b"DEALER", identity: bytes = b"") -> None:
        """Send INITIATE."""
        nonce = os.urandom(16)
        vouch = crypto_box(
            self._short_public + self._server,
            b"VOUCH---" + nonce,
            self._server_short,
            self._own_secret,
        )
        number = self._number()
        box = crypto_box(
            self._own_public + nonce + vouch + metadata(kind, identity),
            b"CurveZMQINITIATE" + number,
            self._server_short,
            self._short_secret,
        )
        self.initiate_bytes = frame(b"\x08INITIATE" + self._cookie + number + box, 4)
        self.socket.sendall(self.initiate_bytes)
        self._speaks(
            b"CurveZMQMESSAGEC", b"CurveZMQMESSAGES", self._server_short, self._short_secret
        )

    def ready(self) -> None:
        """Take READY."""
        body = self.frame()
        if not body.startswith(b"\x05READY"):
            raise Refused(repr(body[:40]))

    def _number(self) -> bytes:
        self._nonce += 1
        return struct.pack(">Q", self._nonce)


class RawServer:
    """Listens as the holder of a key, as a hostile server."""

    def __init__(self, secret: str, port: int = 0) -> None:
        self._secret = z85.decode(secret)
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.settimeout(_TIMEOUT_S)
        self.port = int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def accept(self) -> Wire:
        """Accept the next client that completes the handshake."""
        while True:
            wire = Wire(self._listener.accept()[0])
            try:
                return self._shake(wire)
            except (Refused, OSError):  # a client that has given up meanwhile dials again
                wire.close()

    def _shake(self, wire: Wire) -> Wire:
        wire.socket.sendall(GREETING + b"\1" + bytes(31))
        wire.exactly(64)
        theirs = wire.frame()[80:112]
        public, secret = crypto_box_keypair()
        nonce = os.urandom(16)
        box = crypto_box(public + bytes(96), b"WELCOME-" + nonce, theirs, self._secret)
        wire.socket.sendall(frame(b"\x07WELCOME" + nonce + box, 4))
        wire.frame()
        number = struct.pack(">Q", 1)
        box = crypto_box(metadata(b"ROUTER"), b"CurveZMQREADY---" + number, theirs, secret)
        wire._nonce = 1
        wire._speaks(b"CurveZMQMESSAGES", b"CurveZMQMESSAGEC", theirs, secret)
        wire.socket.sendall(frame(b"\x05READY" + number + box, 4))
        return wire
