"""The server of ``molink rendezvous``: peers behind routers meet here.

It knows its secret and nothing else: no swarm, no member, no model. Whoever proves the secret may
call a registered peer, and may register under its own key only
(:mod:`molink.wire.messages.rendezvous`). It connects to nobody, and answers nothing but a nonce and
one byte. Where a bound is reached, the newest connection replaces the oldest of the address with
the most, so that one address can't take all.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections import deque
from typing import Any

from molink.errors import PortInUse, WireError
from molink.util.connection_slots import ConnectionSlots
from molink.util.token_bucket import RateLimit, TokenBucket
from molink.wire.messages.relay import (
    NONCE_BYTES,
    PEER_ARRIVED,
    PROOF_BYTES,
    Claim,
    is_valid_proof,
    parse_claim,
)
from molink.wire.messages.rendezvous import (
    JOINED,
    NOBODY,
    REGISTRATION_BYTES,
    derive_session_secret,
    is_valid_registration,
)
from molinkd.peer.membership.relay_server import (
    RATE_LIMIT,
    MeetingServer,
    RelaySession,
    is_alive,
)
from molinkd.splice import Stream, listen_on_free_port, splice_streams

log = logging.getLogger(__name__)

#: Connections in all, sessions, and callers of one peer: a swarm of 64 PCs has a connection each.
MAX_CONNECTIONS, MAX_SESSIONS, MAX_CALLERS = 512, 256, 128
#: Accept rate, and unauthenticated connections from addresses of peers: in an election every PC of
#: a large swarm calls several others at once.
ACCEPT_RATE, MAX_FROM_ENDS = RateLimit(256, 1000.0), 256
#: Time for a registered peer to wait again: after a call, and after it has closed its connection,
#: in seconds.
REGISTER_GAP_S, RENEW_GAP_S = 3.0, 0.5
#: Idle time after which a session is closed, in seconds; a registered peer renews it sooner.
UNUSED_TIMEOUT_S = 60.0
#: Distinguishes sessions of peers from those of routes.
_PEERS = 1 << 64
_BACKLOG = 512
#: Peers whose coming and going is logged; that of others is for debugging.
LOG_LIMIT = RateLimit(burst=128, per_second=0.5)
_MAX_END_ADDRESSES = 32


class RendezvousServer(MeetingServer):
    """A rendezvous on one port."""

    def __init__(self, secret: bytes, rate: float = RATE_LIMIT) -> None:
        """``secret`` is that of its address."""
        super().__init__(rate, ACCEPT_RATE, MAX_FROM_ENDS)
        self._secret = secret
        self._connections = ConnectionSlots[asyncio.StreamWriter](MAX_CONNECTIONS, MAX_CONNECTIONS)
        self._callers: dict[int, ConnectionSlots[asyncio.StreamWriter]] = {}
        #: Sessions by the address that has opened them.
        self._opened = ConnectionSlots[int](MAX_SESSIONS, MAX_SESSIONS)
        self._releasing: set[asyncio.Task[Any]] = set()
        self._log_lines = TokenBucket(LOG_LIMIT, time.monotonic())

    def listen(self, host: str, port: int) -> int:
        """Listen on ``host`` (empty: everywhere) and return the port.

        Raises:
            PortInUse: the port isn't free.
        """
        everywhere = "::" if socket.has_dualstack_ipv6() else ""
        try:
            listener = listen_on_free_port(host or everywhere, port, 1, _BACKLOG)
        except OSError as error:
            raise PortInUse(f"can't listen on port {port}: {error} (--port)") from None
        self._accept_from(listener)
        return self.port

    async def close(self) -> None:
        """Close all sessions."""
        await super().close()
        await asyncio.gather(*self._releasing, return_exceptions=True)

    @property
    def num_peers(self) -> int:
        """Registered peers."""
        return len(self._callers)

    async def _authenticate(self, stream: Stream) -> tuple[int, Claim]:
        reader, writer = stream
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(nonce)
        answer = await reader.readexactly(PROOF_BYTES)
        id, claim = parse_claim(answer)
        if claim == "registers":
            answer += await reader.readexactly(REGISTRATION_BYTES)
            is_valid = is_valid_registration(answer, self._secret, nonce)
        else:
            shared = derive_session_secret(self._secret, claim, id)
            is_valid = is_valid_proof(answer, id, claim, shared, nonce)
        if not is_valid:
            raise WireError("wrong rendezvous secret or key")
        if claim in ("registers", "calls"):
            id |= _PEERS
        session = self._sessions.get(id)
        if claim == "calls" and (session is None or session.is_gone):
            await _refuse_call(stream)
            raise WireError("a call of a peer that isn't registered")
        return id, claim

    def _find_room(self, stream: Stream, id: int, claim: Claim) -> RelaySession | None:
        writer = stream[1]
        peername = writer.get_extra_info("peername")
        if peername is None:
            return None  # it has gone
        address = str(peername[0])
        self._open_session(id, address)
        used = [self._connections, *([self._callers[id]] if claim == "calls" else [])]
        for slots in used:
            replaced = slots.admit(writer, address)
            if replaced is not None:
                replaced.transport.abort()
        self._spawn(_release_at_end(writer, used), self._releasing)
        return self._sessions[id]

    def _open_session(self, id: int, address: str) -> None:
        if id in self._sessions:
            return
        self._close_unused(UNUSED_TIMEOUT_S)
        replaced = self._opened.admit(id, address)
        if replaced is not None:
            self._close_session(replaced)
        ends: deque[str] = deque(maxlen=_MAX_END_ADDRESSES)
        self._sessions[id] = RelaySession(self._now(), ends)
        if id & _PEERS:
            self._callers[id] = ConnectionSlots(MAX_CALLERS, MAX_CALLERS)
            self._log_peer("peer %016x has registered from %s", id ^ _PEERS, address)

    def _close_session(self, id: int) -> None:
        self._opened.release(id)
        if self._callers.pop(id, None) is not None:
            self._log_peer("peer %016x is gone", id ^ _PEERS)
        super()._close_session(id)

    def _log_peer(self, text: str, *values: object) -> None:
        """Log what peers do, at a bounded rate: whoever has the secret may invent peers."""
        is_logged = self._log_lines.try_take(time.monotonic())
        log.log(logging.INFO if is_logged else logging.DEBUG, text, *values)

    async def _join_ends(self, session: RelaySession, stream: Stream, claim: Claim) -> None:
        if claim != "calls":
            await super()._join_ends(session, stream, claim)
            return
        has_closed = bool(session.waiting) and not any(map(is_alive, session.waiting))
        try:
            try:
                async with asyncio.timeout(RENEW_GAP_S if has_closed else REGISTER_GAP_S):
                    other = await self._pop_waiting(session)
            except TimeoutError:
                session.is_gone = True
                await _refuse_call(stream)
                return
            stream[1].write(JOINED)
            other[1].write(PEER_ARRIVED)
            await splice_streams(stream, other, self._limit_rate)
        finally:
            session.last_used = self._now()
            stream[1].transport.abort()


async def _refuse_call(stream: Stream) -> None:
    """Tell a caller that nobody is registered.

    Raises:
        OSError: It has gone.
    """
    writer = stream[1]
    writer.write(NOBODY)
    writer.close()
    await writer.wait_closed()


async def _release_at_end(
    writer: asyncio.StreamWriter, used: list[ConnectionSlots[asyncio.StreamWriter]]
) -> None:
    try:
        await writer.wait_closed()
    finally:
        for slots in used:
            slots.release(writer)
