"""A coordinator on a real socket, and peers around it that a test directs."""

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq.asyncio
from zmq.asyncio import Context

from molink.errors import (
    MolinkError,
)
from molink.facts.identity import derive_peer_id
from molink.facts.profile import Profile
from molink.swarm.election.replica import decode_replica
from molink.swarm.membership.join_token import JoinToken
from molink.wire.messages.admin import (
    InviteReply,
    InviteRequest,
    RevokeReply,
    RevokeRequest,
    ServeModel,
    StatusRequest,
)
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import JoinReply, JoinRequest
from molink.wire.messages.election import StateReplica
from molink.wire.messages.instructions import (
    Assign,
    FormPipeline,
    Prefetch,
)
from molink.wire.messages.membership import (
    JoinEntry,
    sign_entry,
)
from molink.wire.messages.peer_reports import (
    PrefetchState,
    StageLoaded,
    StageReady,
)
from molink.wire.protocol import PROTOCOL
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.key_pair import KeyPair
from molinkd.coordinator.coordinator import Coordinator
from molinkd.coordinator.options import CoordinatorOptions
from molinkd.coordinator.state_store import StateStore
from molinkd.peer.membership.membership_requests import MembershipRequest, send_membership_request
from tests.support.fake_fleet import Kit


class Peer:
    """A daemon's control connection; records messages, and follows instructions if ``obeys``."""

    def __init__(
        self, kit: Kit, context: Context, keys: KeyPair, server_key: str, port: int, swarm: str
    ) -> None:
        self.kit, self.keys, self.id = kit, keys, derive_peer_id(keys.public)
        self.server_key, self.swarm, self.log_digest = server_key, swarm, ""
        self.told = []
        self.obeys = True
        self.workers = {}
        self.stage, self.models, self.pc = "auto", (), ""
        self.version, self.protocol = "1", PROTOCOL
        self.prefetch: PrefetchState | None = None
        self.replica, self.shared = (0, 0), None
        self.client = Client(
            context,
            keys,
            control_codec(),
            server_key,
            [f"tcp://127.0.0.1:{port}"],
            events=ClientEvents(on_message=self.take, on_connect=self.greet),
        )
        self.connections = 0

    async def connect(self, timeout: float = 60.0) -> Self:
        self.client.start()
        await self.client.wait_connected(timeout)
        return self

    def greet(self) -> None:
        self.connections += 1
        self.report()

    def report(self) -> None:
        report = self.kit.report(
            "a",
            *self.workers.values(),
            stage=self.stage,
            models=self.models or ("toy",),
            pc=self.pc,
        )
        said = {
            "replica": self.replica,
            "log_digest": self.log_digest,
            "version": self.version,
            "protocol": self.protocol,
            "prefetch": self.prefetch,
        }
        self.client.send(msgspec.structs.replace(report, **said))

    def take(self, message: Any, payload: memoryview | None) -> None:
        self.told.append(message)
        if isinstance(message, StateReplica) and payload is not None:
            self.shared = decode_replica(payload)
        if not self.obeys:
            return
        if isinstance(message, Prefetch):
            self.prefetch = PrefetchState(number=message.number, state="done")
        elif isinstance(message, Assign):
            ids = (message.epoch, message.stage, message.layers, message.pipeline)
            self.workers[message.pipeline] = self.kit.worker("loaded", *ids)
            self.client.send(
                StageLoaded(
                    pipeline=message.pipeline,
                    epoch=message.epoch,
                    stage=message.stage,
                    port=5468,
                    max_blocks=10,
                    profile=Profile(decode=((1, 0.1),)),
                )
            )
        elif isinstance(message, FormPipeline):
            worker = self.workers[message.pipeline]
            ids = (message.epoch, worker.stage, worker.layers, message.pipeline)
            self.workers[message.pipeline] = self.kit.worker("ready", *ids)
            self.client.send(
                StageReady(pipeline=message.pipeline, epoch=message.epoch, stage=worker.stage)
            )

    def last(self, kind: Any) -> Any:
        return next((m for m in reversed(self.told) if isinstance(m, kind)), None)

    async def ask(self, message: Any) -> Any:
        """Send one of this peer's user's requests; returns the reply."""
        if isinstance(message, MembershipRequest):
            return await send_membership_request(
                message, self.keys, self.swarm, self.server_key, self.send
            )
        return (await self.send(message))[0]

    async def send(self, message: Any) -> tuple[Any, bytes]:
        reply, payload = await self.client.send_request(message, timeout=30)
        return reply, bytes(payload or b"")


def lasting_port() -> int:
    """A port outside of the ephemeral range, which stays free while the coordinator is down."""
    while True:
        port = random.randrange(12_000, 32_000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


class Scene:
    """A coordinator that can be restarted, and peers around it."""

    def __init__(self, kit: Kit, folder: Path, stack: AsyncExitStack) -> None:
        self.kit, self.folder, self.stack = kit, folder, stack
        self.context = zmq.asyncio.Context()
        stack.callback(self.context.destroy, linger=0)
        self.keys, self.owner_keys = KeyPair.generate(), KeyPair.generate()
        self.coordinator = self.state = None
        self.port = lasting_port()

    async def start(self, **changes: int | None) -> Self:
        options = CoordinatorOptions(
            self.folder,
            **{
                "host": "127.0.0.1",
                "port": self.port,
                "name": "test",
                "members": ((self.owner_keys.signer.verify_key, "owner"),),
                **changes,
            },
        )
        self.state = StateStore.open(self.folder)
        self.own_context = zmq.asyncio.Context()
        self.coordinator = Coordinator(self.own_context, self.state, self.keys, options)
        self.port = await self.coordinator.start()
        return self

    async def stop(self) -> None:
        if self.coordinator is not None:
            await self.coordinator.close()
            self.state.close()
            self.own_context.destroy(linger=0)
            self.coordinator = None

    async def peer(self, keys: KeyPair | None = None) -> Peer:
        return await self.make_peer(keys or self.owner_keys).connect()

    def make_peer(self, keys: KeyPair) -> Peer:
        swarm = self.coordinator.swarm.id
        peer = Peer(self.kit, self.context, keys, self.keys.public, self.port, swarm)
        self.stack.push_async_callback(peer.client.close)
        return peer

    async def token(self, owner: Peer, ttl: float = 3600.0, **more: int) -> JoinToken:
        reply = await owner.ask(InviteRequest(ref=0, ttl=ttl, **more))
        assert isinstance(reply, InviteReply)
        return JoinToken.parse(reply.token, time.time())

    @contextlib.asynccontextmanager
    async def guest(self, token: JoinToken) -> AsyncIterator[Client]:
        """A connection with the invitation's key."""
        guest = Client(
            self.context,
            KeyPair.from_seed(token.secret_key),
            control_codec(),
            token.coordinator_key,
            [f"tcp://{address}" for address in token.addresses],
        )
        guest.start()
        try:
            yield guest
        finally:
            await guest.close()

    async def join(self, token: JoinToken, keys: KeyPair | None = None) -> Peer:
        keys = keys or KeyPair.generate()
        async with self.guest(token) as guest:
            reply, _ = await guest.send_request(wish(keys, token), timeout=30)
        assert reply == JoinReply(
            ref=reply.ref, swarm=self.coordinator.swarm.id, peer=derive_peer_id(keys.public)
        )
        return await self.peer(keys)

    async def revoke(self, owner: Peer, target: str) -> RevokeReply:
        """Revoke a PC, and wait until all others have reconnected."""
        await owner.client.wait_connected(60.0)  # it may still reconnect after a restart
        before = owner.connections
        reply = await owner.ask(RevokeRequest(ref=0, target=target))
        await self.until(lambda: owner.connections > before)
        return reply

    async def status(self, peer: Peer) -> dict[str, Any]:
        _, payload = await peer.client.send_request(StatusRequest(ref=0), timeout=30)
        return json.loads(bytes(payload))

    async def until(self, condition: Callable[..., Any], *reporters: Peer) -> None:
        """Wait for a condition while these peers keep reporting."""
        async with asyncio.timeout(60):
            while not condition():
                for peer in reporters:
                    with contextlib.suppress(MolinkError):
                        peer.report()
                await asyncio.sleep(0.02)


def wish(keys: KeyPair, token: JoinToken, at: float | None = None) -> JoinRequest:
    signer, at = KeyPair.from_seed(token.secret_key).signer, time.time() if at is None else at
    entry = JoinEntry(signer.verify_key, keys.signer.verify_key, "guest\x1b", at)
    return JoinRequest(
        ref=0,
        public_key=keys.public,
        name="guest\x1b",
        version="1",
        protocol=PROTOCOL,
        entry=sign_entry(token.swarm, signer, entry),
    )


def serve(kit: Kit, **changes: int | str) -> ServeModel:
    return ServeModel(ref=0, model=kit.facts, **changes)
