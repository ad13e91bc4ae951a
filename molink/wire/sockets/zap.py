"""Who may connect: the ZAP handler of one process.

CURVE alone proves that a peer holds *some* key; libzmq asks the ZAP handler whether that key may
talk to us, and takes from it the ``User-Id`` that then comes with each of the peer's messages.
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

#: Where libzmq asks, and the frames of a question about a CURVE key (RFC 27, with ROUTER's two).
_ENDPOINT = "inproc://zeromq.zap.01"
_REQUEST_FRAMES = 9
#: Seconds before a handler that failed runs again, so that a lasting fault keeps no core busy.
_RESTART_PAUSE = 0.1
#: Handshakes per peer. A ROUTER numbers them with 32 bits, and libzmq aborts the process when a
#: number equals a routing id that a peer has chosen.
HANDSHAKE_LIMIT = RateLimit(100, 10.0)


@dataclass(frozen=True, slots=True)
class RefusedHandshake:
    """A handshake that was refused: where it came from and the key's peer id."""

    address: str
    peer: str


class ZapAuthenticator:
    """Answers every CURVE handshake of a ZeroMQ context, in a thread of its own.

    A thread, since handshakes should not wait for a busy event loop. Start it before any bind. An
    error while answering refuses that one handshake; an error of the handler itself restarts it.
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
        #: Handshakes of members that were put off: they came too often.
        self.deferred = 0
        self._handshake_buckets = KeyedTokenBuckets(handshake_limit)
        self._on_refused = on_refused
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
        self._lock = threading.Lock()
        #: Public key → user id. Replaced, never changed, so the thread reads it without a lock.
        self._keys: dict[str, str] = {}
        self._peers: frozenset[str] = frozenset()
        self._blocked: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None
        self._wake_socket: zmq.Socket[bytes] | None = None

    def start(self) -> None:
        """Begin to answer. Raises :class:`UsageError` if the context has a handler already."""
        if self._thread is not None:
            return
        try:
            socket = self._bind()
        except zmq.ZMQError as error:
            raise UsageError(f"this context has a ZAP handler already: {error}") from error
        address = f"inproc://molink.gatekeeper.{secrets.token_hex(8)}"
        wake_socket = self._context.socket(zmq.PAIR)
        wake_socket.bind(address)
        heard = self._context.socket(zmq.PAIR)
        heard.connect(address)
        self._wake_socket = wake_socket
        self._thread = threading.Thread(
            target=self._run, args=(socket, heard), name="molink-gatekeeper", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering; from then on every handshake of the context fails."""
        if self._thread is None or self._wake_socket is None:
            return
        self._wake_socket.send(b"")
        self._thread.join()
        self._wake_socket.close(linger=0)
        self._thread = self._wake_socket = None

    # --- membership --------------------------------------------------------------------------

    def allow_peer(self, public_key: str, user_id: str | None = None) -> str:
        """Let the holder of ``public_key`` in, as ``peer_id`` (default: its peer id)."""
        user = user_id or derive_peer_id(public_key)
        with self._lock:
            self._replace({**self._keys, public_key: user})
        return user

    def deny_peer(self, peer_id: str) -> None:
        """Forget ``peer_id`` and its keys, and whether it was blocked."""
        with self._lock:
            self._blocked -= {peer_id}
            self._handshake_buckets.drop_key(peer_id)
            self._replace({key: user for key, user in self._keys.items() if user != peer_id})

    def block_peer(self, peer_id: str) -> None:
        """Refuse ``peer_id``, although a member, until it is denied and allowed again."""
        with self._lock:
            self._blocked |= {peer_id}
            self._replace(self._keys)

    def is_allowed(self, peer_id: str) -> bool:
        """Whether messages of ``peer_id`` count."""
        return peer_id in self._peers

    @property
    def peers(self) -> frozenset[str]:
        """The user ids that are let in now."""
        return self._peers

    @property
    def blocked(self) -> frozenset[str]:
        """The members that are refused because they misbehaved."""
        return self._blocked

    def _replace(self, keys: dict[str, str]) -> None:
        self._keys = keys
        self._peers = frozenset(keys.values()) - self._blocked

    # --- the handler's thread ----------------------------------------------------------------

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
        """Serve until the end; ``False`` if the handler failed before that."""
        try:
            with socket:
                self._serve(socket, wake_socket)
        except zmq.ContextTerminated:
            pass
        except Exception:
            logger.exception("the ZAP handler failed; starting it again")
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
        """The reply to a ZAP request: version, request id, status, text, user id, metadata."""
        try:
            user = self._authenticate(frames)
        except Exception:
            logger.exception("can't judge a handshake; refusing it")
            user = None
        if user is None:
            self.refused += 1
            status, text = b"400", b"not a member"
        elif not self._handshake_buckets.try_take(user, time.monotonic()):
            # A number from 300 on has the peer try again.
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
