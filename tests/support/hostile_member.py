"""A hostile PC that was admitted to a swarm, and sends any message.

It holds a home that joined by a token, and speaks by molink's own client, server and messages. The
test decides what it sends.
"""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import zmq.asyncio

from molink.errors import MolinkError, Unavailable
from molink.facts.device import Device
from molink.facts.identity import derive_peer_id
from molink.swarm.election.leases import LeaseIssuer
from molink.swarm.election.replica import Replica, Version, decode_replica
from molink.swarm.membership.join_token import JoinToken
from molink.swarm.membership.membership_log import MembershipLog
from molink.swarm.membership.versions import own_version
from molink.wire.messages.admin import InviteReply, InviteRequest
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.election import (
    LeaderHeartbeat,
    LeaderReply,
    LeaderRequest,
    LeaderView,
    Lease,
    StateReplica,
    StateRequest,
)
from molink.wire.messages.instructions import PeerInfo, PeerRemoved, Welcome
from molink.wire.messages.membership import SignedEntry, Statement
from molink.wire.messages.peer_reports import PeerReport
from molink.wire.signing import generate_seed
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.create_socket import endpoints
from molink.wire.sockets.event_loop import EventLoop
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender, Server
from molink.wire.sockets.zap import ZapAuthenticator
from molinkd.peer.election.leadership import query_leader
from molinkd.peer.home import Home
from molinkd.peer.membership.joining import join_swarm
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.membership.membership_requests import (
    MembershipRequest,
    send_membership_request,
)
from molinkd.tasks import cancel_tasks
from tests.support.processes import START_S

REPORT_INTERVAL_S = 0.25
HOST = "127.0.0.1"

#: The view of a PC that knows nothing.
NO_VIEW = LeaderView(
    term=0, leader="", is_leader=False, hears_leader=False, can_lead=False, replica=(0, 0)
)

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own, so that a test may block meanwhile."""

    def __init__(self) -> None:
        self._loop = EventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hostile", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 2 * START_S) -> T:
        """Run ``work`` in the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class HostileMember:
    """A hostile member. Its methods may be called from any thread."""

    def __init__(self, loop: LoopThread, root: Path, token: str, name: str) -> None:
        """Join by ``token``; ``root`` is its home.

        Raises:
            MolinkError: the swarm doesn't admit it.
        """
        self.loop, self.name = loop, name
        self.home = Home(root).create_folders()
        self.keys = self.home.load_keys()
        self.peer = derive_peer_id(self.keys.public)
        #: Messages of each coordinator, by type.
        self.heard: list[ControlMessage] = []
        self.replica: Replica | None = None
        self.heartbeat: LeaderHeartbeat | None = None
        #: The other peers, as announced.
        self.others: dict[str, PeerInfo] = {}
        #: The state that it pretends to hold; ``None``: what it holds.
        self.forged: Replica | None = None
        #: How it answers who asks for the leader; ``None``: not at all.
        self.answer: Callable[[], LeaderView | None] = lambda: None
        #: Signs leases of its own.
        self.leases = LeaseIssuer(self.peer, generate_seed(), time.monotonic())
        #: The highest term that an honest PC has told it.
        self.term = 0
        self.record = loop.run(self._join(token))

    async def _join(self, token: str) -> MembershipRecord:
        self.context = zmq.asyncio.Context()
        self.authenticator = ZapAuthenticator(self.context)
        self.authenticator.start()
        self._server: Server[ControlMessage] | None = None
        self._client: Client[ControlMessage] | None = None
        self._reporter: asyncio.Task[None] | None = None
        self._tellers: list[asyncio.Task[None]] = []
        self.honest: frozenset[str] = frozenset()
        try:
            return await join_swarm(self.context, self.keys, JoinToken.parse(token, 0.0), self.name)
        except MolinkError:
            await self._close()
            raise

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
        """Close all connections."""
        self.loop.run(self._close())

    async def _close(self) -> None:
        await cancel_tasks(self._reporter, *self._tellers)
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.close()
        self.authenticator.close()
        self.context.destroy(linger=0)

    # --- with the coordinator ----------------------------------------------------------------

    def start(self) -> Self:
        """Act as any PC: open a control socket, and report to the coordinator."""
        self.loop.run(self._start())
        return self

    async def _start(self) -> None:
        self._server = Server(
            self.context, self.keys, control_codec(), self.authenticator, self._on_request
        )
        self._server.bind(HOST, (0, 1))
        self._follow(self.record.coordinator_key, self.record.endpoints)
        self._reporter = asyncio.create_task(self._report())

    def follow(self, coordinator_key: str, addresses: Sequence[str]) -> None:
        """Report to another coordinator, at ``host:port``."""

        async def follow() -> None:
            if self._client is not None:
                await self._client.close()
            self._follow(coordinator_key, tuple(f"tcp://{one}" for one in addresses))

        self.loop.run(follow())

    def _follow(self, coordinator_key: str, addresses: Sequence[str]) -> None:
        self._client = Client(
            self.context,
            self.keys,
            control_codec(),
            coordinator_key,
            addresses,
            events=ClientEvents(on_message=self._on_message),
        )
        self._client.start()

    def _report_of(self) -> PeerReport:
        assert self._server is not None
        version, held = own_version(), self.forged or self.replica
        return PeerReport(
            name=self.name,
            version=version.version,
            protocol=version.protocol,
            addresses=(HOST,),
            control_port=self._server.port,
            api_address="",
            daemon_pid=1,
            stage="none",
            device=Device(kind="cpu", name="not used", memory=0),
            models=(),
            replica=(0, 0) if held is None else held.version,
            log_digest="" if held is None else held.log.digest,
            platform=sys.platform,
        )

    async def _report(self) -> None:
        while True:
            if self._client is not None:
                with contextlib.suppress(MolinkError):
                    self._client.send(self._report_of())
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _on_message(self, message: ControlMessage, payload: memoryview | None) -> None:
        self.heard.append(message)
        match message:
            case LeaderHeartbeat():
                self.heartbeat = message
            case StateReplica() if payload is not None:
                self.replica = decode_replica(bytes(payload))
            case StateRequest():
                self._push_replica()
            case PeerInfo():
                self.others[message.peer] = message
                self.authenticator.allow_peer(message.public_key)
            case PeerRemoved():
                self.others.pop(message.peer, None)

    def _push_replica(self) -> None:
        assert self._client is not None
        if self.forged is None:
            return
        data = self.forged.encode()
        with contextlib.suppress(MolinkError):
            self._client.send(StateReplica(payload=Payload("u8", (len(data),))), data)

    def offer(self, forged: Replica) -> None:
        """Claim to hold ``forged``, in a new session; send it, requested or not."""
        self.forged = forged
        self.heard.clear()
        self.follow(self.record.coordinator_key, self.record.addresses)
        with contextlib.suppress(TimeoutError):
            self.wait_for(lambda: self.has_heard(StateRequest), 1.5)

        async def push() -> None:
            self._push_replica()

        self.loop.run(push())

    def has_heard(self, kind: type[ControlMessage]) -> bool:
        """Whether a coordinator has sent a message of that type."""
        return any(isinstance(one, kind) for one in self.heard)

    def wait_for(self, condition: Callable[[], object], timeout: float = START_S) -> None:
        """Wait until ``condition`` holds."""

        async def wait() -> None:
            async with asyncio.timeout(timeout):
                while not condition():  # noqa: ASYNC110  any condition, not an event
                    await asyncio.sleep(0.02)

        self.loop.run(wait())

    def wait_welcome(self) -> None:
        """Wait until it has the state and knows the other peers."""
        self.wait_for(lambda: self.has_heard(Welcome) and self.replica is not None and self.others)

    def ask(self, message: ControlMessage, timeout: float = START_S) -> ControlMessage:
        """The coordinator's reply to a request; those about members are signed.

        Raises:
            MolinkError: it refuses.
        """
        return self.loop.run(self._ask(message, timeout))[0]

    async def _ask(self, message: ControlMessage, timeout: float) -> tuple[ControlMessage, bytes]:
        async def ask(one: ControlMessage) -> tuple[ControlMessage, bytes]:
            assert self._client is not None
            reply, payload = await self._client.send_request(one, timeout=timeout)
            return reply, b"" if payload is None else bytes(payload)

        if isinstance(message, MembershipRequest):
            record = self.record
            done = send_membership_request(
                message, self.keys, record.swarm, record.coordinator_key, ask
            )
            return await done, b""
        return await ask(message)

    def invite(self, uses: int = 1) -> str:
        """Create an invitation.

        Raises:
            MolinkError: the coordinator refuses.
        """
        reply = self.ask(InviteRequest(ref=0, ttl=3600.0, uses=uses))
        assert isinstance(reply, InviteReply)
        return reply.token

    # --- with other PCs ----------------------------------------------------------------------

    def _on_request(
        self, sender: MessageSender, message: ControlMessage, _payload: memoryview | None
    ) -> None:
        if isinstance(message, LeaderRequest):
            self._note(sender.peer_id, message.view)
            view = self.answer()
            if view is not None and self._server is not None:
                self._server.send(sender.identity, LeaderReply(ref=message.ref, view=view))

    def query(self, peer: str, view: LeaderView) -> LeaderView | None:
        """Send ``view`` to another PC in a leader query; returns the answer, if any."""
        return self.loop.run(self._query(peer, view))

    def keep_telling(
        self, peers: Iterable[str], view: Callable[[], LeaderView], every: float = 0.2
    ) -> None:
        """Answer with ``view()`` from now on, and also send it to ``peers`` unasked."""
        honest = tuple(peers)

        async def tell(peer: str) -> None:
            while True:
                if peer in self.others:
                    await self._query(peer, view())
                await asyncio.sleep(every)

        async def begin() -> None:
            self.honest = frozenset(honest)
            self._tellers += [asyncio.create_task(tell(peer)) for peer in honest]

        self.answer = view
        self.loop.run(begin())

    def silence(self) -> None:
        """Stop sending and answering views."""
        self.answer = lambda: None
        self.loop.run(cancel_tasks(*self._tellers))

    async def _query(self, peer: str, view: LeaderView) -> LeaderView | None:
        request = LeaderRequest(ref=0, swarm=self.record.swarm, view=view)
        answer = await query_leader(self.context, self.keys, self.others[peer], request)
        if answer is not None:
            self._note(peer, answer)
        return answer

    def _note(self, peer: str, view: LeaderView) -> None:
        if peer in self.honest:
            self.term = max(self.term, view.term)

    def can_reach(self, peer: str) -> bool:
        """Whether another PC's control socket accepts it."""
        info = self.others[peer]
        return can_connect(
            self.loop, self.keys, info.public_key, endpoints(info.addresses, info.control_port)
        )

    def can_reach_coordinator(self) -> bool:
        """Whether the coordinator accepts it."""
        return can_connect(self.loop, self.keys, self.record.coordinator_key, self.record.endpoints)

    # --- what it says ------------------------------------------------------------------------

    def follows(self, leader: str, term: int, lease: Lease | None) -> LeaderView:
        """A view: it hears ``leader``, as the lease shows."""
        return LeaderView(
            term=term,
            leader=leader,
            is_leader=False,
            hears_leader=True,
            can_lead=True,
            replica=self._held,
            lease=lease,
        )

    @property
    def lease(self) -> Lease | None:
        """The last lease that it has received."""
        return None if self.heartbeat is None else self.heartbeat.lease

    def issue_lease(self, term: int) -> Lease:
        """A lease of its own."""
        return self.leases.issue_lease(term, time.monotonic())

    def claims(self, term: int, coordinator: "FakeCoordinator | None" = None) -> LeaderView:
        """A view: it leads."""
        made = coordinator
        return LeaderView(
            term=term,
            leader=self.peer,
            is_leader=True,
            hears_leader=True,
            can_lead=True,
            replica=(term, self._held[1] + 1),
            coordinator_key=self.keys.public if made is None else made.keys.public,
            addresses=(f"{HOST}:1",) if made is None else made.addresses,
        )

    def lost(self, term: int) -> LeaderView:
        """A view: it hears nobody."""
        return msgspec.structs.replace(NO_VIEW, term=term, can_lead=True, replica=self._held)

    @property
    def _held(self) -> Version:
        return (0, 0) if self.replica is None else self.replica.version


def forge_entry(swarm: str, entry: Statement, by: KeyPair) -> SignedEntry:
    """An entry in any peer's name, signed with the key of ``by``."""
    body = msgspec.msgpack.encode(entry)
    return SignedEntry(body, by.signer.sign(b"membership:" + swarm.encode("ascii"), body))


def forge_replica(held: Replica, version: Version, *entries: SignedEntry) -> Replica:
    """A replica with further, unchecked entries."""
    known = {one.hash: one for one in (*held.log.entries, *entries)}
    log = MembershipLog(held.swarm, known)
    return replace(held, term=version[0], revision=version[1], log=log)


class FakeCoordinator:
    """A hostile PC's coordinator: it welcomes every peer that reports, and sends any message."""

    def __init__(self, host: HostileMember, term: int) -> None:
        """It leads in ``term`` at ``host``."""
        self.keys, self._host, self.term = KeyPair.generate(), host, term
        #: Messages to each PC after its welcome, with payloads.
        self.script: list[tuple[ControlMessage, bytes | None]] = []
        #: Peers that have reported, by id.
        self.reported: dict[str, PeerReport] = {}
        self._server = host.loop.run(self._bind())

    async def _bind(self) -> Server[ControlMessage]:
        host = self._host
        server: Server[ControlMessage] = Server(
            host.context, self.keys, control_codec(), host.authenticator, self._on_message
        )
        server.bind(HOST, (0, 1))
        return server

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens."""
        return (f"{HOST}:{self._server.port}",)

    def close(self) -> None:
        """Stop listening."""
        self._host.loop.run(self._server.close())

    def _on_message(
        self, sender: MessageSender, message: ControlMessage, _payload: memoryview | None
    ) -> None:
        if not isinstance(message, PeerReport):
            return
        is_new = sender.peer_id not in self.reported
        self.reported[sender.peer_id] = message
        self._server.send(sender.identity, self._heartbeat())
        if is_new:
            welcome = Welcome(swarm=self._host.record.swarm, peer=sender.peer_id)
            self._server.send(sender.identity, welcome)
            for said, payload in self.script:
                self._server.send(sender.identity, said, payload)

    def _heartbeat(self) -> LeaderHeartbeat:
        version = own_version()
        return LeaderHeartbeat(
            term=self.term,
            leader=self._host.peer,
            version=version.version,
            protocol=version.protocol,
            lease=self._host.issue_lease(self.term),
            verify_key=self._host.leases.verify_key,
        )


def can_connect(loop: LoopThread, keys: KeyPair, server_key: str, addresses: Sequence[str]) -> bool:
    """Whether a server accepts the holder of ``keys``."""

    async def connect() -> bool:
        context = zmq.asyncio.Context()
        client: Client[ControlMessage] = Client(
            context, keys, control_codec(), server_key, tuple(addresses)
        )
        client.start()
        try:
            await client.wait_connected(START_S)
        except Unavailable:
            raise  # nobody listens: neither accepted nor refused
        except MolinkError:
            return False
        else:
            return True
        finally:
            await client.close()
            context.destroy(linger=0)

    return loop.run(connect())


def is_served(
    loop: LoopThread,
    keys: KeyPair,
    server_key: str,
    addresses: Sequence[str],
    question: ControlMessage,
) -> bool:
    """Whether a server answers ``question`` of the holder of ``keys``."""

    async def ask() -> bool:
        context = zmq.asyncio.Context()
        client: Client[ControlMessage] = Client(
            context, keys, control_codec(), server_key, tuple(addresses)
        )
        client.start()
        try:
            await client.send_request(question, timeout=3.0)
        except MolinkError:
            return False
        else:
            return True
        finally:
            await client.close()
            context.destroy(linger=0)

    return loop.run(ask())
