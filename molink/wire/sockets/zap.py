"""The ZAP handler of a process, which authenticates connections.

CURVE alone only proves that a peer holds some key. libzmq asks the ZAP handler whether the key is
allowed, and attaches the returned ``User-Id`` to each of the peer's messages.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from molink.errors import UsageError
from molink.facts.identity import derive_peer_id
from molink.util.token_bucket import KeyedTokenBuckets, RateLimit
from molink.wire.sockets.create_socket import DOMAIN

logger = logging.getLogger(__name__)

#: libzmq's endpoint, and the frames of a CURVE request (RFC 27, with two of ROUTER).
_ENDPOINT = "inproc://zeromq.zap.01"
_REQUEST_FRAMES = 9
#: Seconds before a failed handler restarts, so that it doesn't spin on a permanent fault.
_RESTART_PAUSE = 0.1
#: Rate limit of handshakes per peer. A ROUTER numbers them with 32 bits, and libzmq aborts the
#: process when a number equals a routing id that a peer has chosen.
HANDSHAKE_LIMIT = RateLimit(100, 10.0)


@dataclass(frozen=True, slots=True)
class RefusedHandshake:
    """A refused handshake: its address, and the peer id of its key."""

    address: str
    peer: str


class ZapAuthenticator:
    """Answers all CURVE handshakes of a ZeroMQ context in a separate thread.

    Handshakes must not wait for a busy event loop. Start it before any bind. An error while
    answering refuses that handshake; an error of the handler restarts it.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        on_refused: Callable[[RefusedHandshake], None] | None = None,
        handshake_limit: RateLimit = HANDSHAKE_LIMIT,
    ) -> None:
        """``on_refused`` is called in the authenticator's thread."""
        self.accepted = 0
        self.refused = 0
        #: Handshakes that allowed peers started too often and will retry.
        self.deferred = 0
        self._handshake_buckets = KeyedTokenBuckets(handshake_limit)
        self._on_refused = on_refused
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
        self._lock = threading.Lock()
        #: Maps public keys to peer ids. The dict is replaced, never modified, so the thread needs
        #: no lock.
        self._keys: dict[str, str] = {}
        self._peers: frozenset[str] = frozenset()
        self._blocked: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None
        self._wake_socket: zmq.Socket[bytes] | None = None

    def start(self) -> None:
        """Start to answer. Raises :class:`UsageError` if the context already has a handler."""
        if self._thread is not None:
            return
        try:
            socket = self._bind()
        except zmq.ZMQError as error:
            raise UsageError(f"this context already has a ZAP handler: {error}") from error
        address = f"inproc://molink.zap.{secrets.token_hex(8)}"
        wake_socket = self._context.socket(zmq.PAIR)
        wake_socket.bind(address)
        heard = self._context.socket(zmq.PAIR)
        heard.connect(address)
        self._wake_socket = wake_socket
        self._thread = threading.Thread(
            target=self._run, args=(socket, heard), name="molink-zap", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering; later handshakes of the context fail."""
        if self._thread is None or self._wake_socket is None:
            return
        self._wake_socket.send(b"")
        self._thread.join()
        self._wake_socket.close(linger=0)
        self._thread = self._wake_socket = None

    # --- membership ------------------------------------------------------------------------------

    def allow_peer(self, public_key: str, peer_id: str | None = None) -> str:
        """Allow the holder of ``public_key`` as ``peer_id`` (default: derived from the key)."""
        peer_id = peer_id or derive_peer_id(public_key)
        with self._lock:
            self._replace({**self._keys, public_key: peer_id})
        return peer_id

    def deny_peer(self, peer_id: str) -> None:
        """Remove ``peer_id`` with its keys and its block."""
        with self._lock:
            self._blocked -= {peer_id}
            self._handshake_buckets.drop_key(peer_id)
            self._replace({key: peer for key, peer in self._keys.items() if peer != peer_id})

    def block_peer(self, peer_id: str) -> None:
        """Refuse ``peer_id`` until it is first denied and then allowed again."""
        with self._lock:
            self._blocked |= {peer_id}
            self._replace(self._keys)

    def is_allowed(self, peer_id: str) -> bool:
        """Whether messages of ``peer_id`` are accepted."""
        return peer_id in self._peers

    @property
    def peers(self) -> frozenset[str]:
        """Ids of the allowed peers."""
        return self._peers

    @property
    def blocked(self) -> frozenset[str]:
        """Peers that are blocked for misbehaviour."""
        return self._blocked

    def _replace(self, keys: dict[str, str]) -> None:
        self._keys = keys
        self._peers = frozenset(keys.values()) - self._blocked

    # --- the handler's thread --------------------------------------------------------------------

    def _bind(self) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        try:
            socket.bind(_ENDPOINT)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _run(self, socket: "zmq.Socket[bytes]", wake_socket: "zmq.Socket[bytes]") -> None:
        with wake_socket:
            while not self._serve_until_error(socket, wake_socket):
                if wake_socket.poll(int(_RESTART_PAUSE * 1000)):
                    return
                socket = self._bind()

    def _serve_until_error(
        self, socket: "zmq.Socket[bytes]", wake_socket: "zmq.Socket[bytes]"
    ) -> bool:
        """Serve until closed; ``False`` if an error ended the handler."""
        try:
            with socket:
                self._serve(socket, wake_socket)
        except zmq.ContextTerminated:
            pass
        except Exception:
            logger.exception("the ZAP handler failed; restarting it")
            return False
        return True

    def _serve(self, socket: "zmq.Socket[bytes]", wake_socket: "zmq.Socket[bytes]") -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(wake_socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if wake_socket in ready:
                return
            frames = socket.recv_multipart()
            if len(frames) >= _REQUEST_FRAMES - 1:
                socket.send_multipart(self._answer(frames))

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """Create the ZAP reply: version, request id, status, text, user id, metadata."""
        try:
            user = self._authenticate(frames)
        except Exception:
            logger.exception("authenticating a handshake failed; refusing it")
            user = None
        if user is None:
            self.refused += 1
            status, text = b"400", b"not allowed"
        elif not self._handshake_buckets.try_take(user, time.monotonic()):
            # A status of 300 or more makes the peer retry.
            self.deferred += 1
            status, text = b"300", b"too often"
        else:
            self.accepted += 1
            status, text = b"200", b"OK"
        return [*frames[:4], status, text, (user or "").encode(), b""]

    def _authenticate(self, frames: list[bytes]) -> str | None:
        version, _, domain, address, _, mechanism, *credentials = frames[2:]
        proper = version == b"1.0" and domain == DOMAIN.encode() and mechanism == b"CURVE"
        if not proper or len(credentials) != 1:
            return None
        key = z85.encode(credentials[0]).decode("ascii")
        user = self._keys.get(key)
        if user is not None and user in self._peers:
            return user
        refusal = RefusedHandshake(address.decode("utf-8", "replace"), derive_peer_id(key))
        if self._on_refused is not None:
            self._on_refused(refusal)
        return None
