"""The coordinator on real sockets, in this process."""

import asyncio
import contextlib
import json
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Never, Self

import msgspec
import pytest
import zmq.asyncio
from zmq.asyncio import Context

from molink import __version__
from molink.errors import (
    InvariantError,
    ModelNotFound,
    MolinkError,
    NotAuthorized,
    Overloaded,
    PeerBanned,
    PortInUse,
    RequestError,
    StateError,
    TokenError,
    Unavailable,
    UsageError,
    VersionMismatch,
)
from molink.facts.identity import derive_peer_id
from molink.facts.profile import Profile
from molink.swarm.controller import registry
from molink.swarm.controller.records import PipelineRecord
from molink.swarm.election.leases import LeaseChecker
from molink.swarm.election.replica import Replica, decode_replica
from molink.swarm.election.terms import next_term
from molink.swarm.membership import duplicate_peers as duplicates
from molink.swarm.membership.discovery import DiscoveredSwarm
from molink.swarm.membership.invitations import (
    MAX_INVITATIONS,
    PER_INVITATION_LIMIT,
    JoinRateLimiter,
)
from molink.swarm.membership.join_token import JoinToken
from molink.swarm.membership.membership_log import MembershipLog
from molink.util.token_bucket import RateLimit
from molink.wire.messages.admin import (
    AddOwnerRequest,
    AppendEntries,
    ApplyModels,
    DesiredModels,
    InvitationsReply,
    InvitationsRequest,
    InviteReply,
    InviteRequest,
    LeaveRequest,
    LogRequest,
    ModelSpec,
    PairingDecisionReply,
    PairingDecisionRequest,
    Rebalance,
    RenameRequest,
    RevokeReply,
    RevokeRequest,
    ServeModel,
    ShutdownRequest,
    StatusRequest,
    StopServing,
    SwitchModel,
    UnrevokeRequest,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import JoinReply, JoinRequest
from molink.wire.messages.election import LeaderHeartbeat, StateReplica, StateRequest
from molink.wire.messages.instructions import (
    Assign,
    DuplicatePeer,
    FormPipeline,
    PeerInfo,
    PeerRemoved,
    PendingPairings,
    Prefetch,
    Revoked,
    Route,
    RouteRemoved,
    Welcome,
)
from molink.wire.messages.membership import (
    AdmissionEntry,
    JoinEntry,
    OwnershipEntry,
    RevocationEntry,
    SignedEntry,
    sign_entry,
)
from molink.wire.messages.peer_reports import (
    Goodbye,
    PrefetchState,
    StageFailed,
    StageLoaded,
    StageReady,
)
from molink.wire.protocol import PROTOCOL
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.key_pair import KeyPair
from molinkd.coordinator import coordinator as module
from molinkd.coordinator.coordinator import Coordinator
from molinkd.coordinator.membership import MAX_NAMES
from molinkd.coordinator.options import CoordinatorOptions
from molinkd.coordinator.state_store import StateStore
from molinkd.peer.membership.membership_requests import MembershipRequest, send_membership_request
from molinkd.peer.membership.pairing_client import PairingCode, request_pairing
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
        before = owner.connections
        reply = await owner.ask(RevokeRequest(ref=0, target=target))
        await self.until(lambda: owner.connections > before)
        return reply

    async def status(self, peer: Peer) -> dict[str, Any]:
        _, payload = await peer.client.send_request(StatusRequest(ref=0), timeout=30)
        return json.loads(bytes(payload))

    async def until(self, condition: Callable[..., Any], *reporters: Peer) -> None:
        """Wait for a condition while these peers keep reporting."""
        async with asyncio.timeout(8):
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


@pytest.fixture
async def scene(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(module, "TIMER_INTERVAL", 0.02)
    async with contextlib.AsyncExitStack() as stack:
        scene = Scene(kit, tmp_path / "state", stack)
        stack.push_async_callback(scene.stop)
        yield await scene.start()


def serve(kit: Kit, **changes: int | str) -> ServeModel:
    return ServeModel(ref=0, model=kit.facts, **changes)


async def test_join_serve_and_route(scene: Scene, kit: Kit) -> None:
    owner = await scene.peer()
    await owner.ask(serve(kit, min_peers=2))
    guest = await scene.join(await scene.token(owner))
    await scene.until(
        lambda: all(p.last(Route) and p.last(Route).is_ready for p in (owner, guest)), owner, guest
    )
    assert list(map(type, owner.told[:2])) == [LeaderHeartbeat, Welcome]
    assert owner.last(PeerInfo).peer == guest.id
    head = owner.last(Route).scheduler
    assert (head.peer, head.port) == (owner.id, 5468)
    status = await scene.status(guest)
    assert "scale_out" not in status
    _, asked = await guest.client.send_request(StatusRequest(ref=0, scale_out=True), timeout=30)
    (found,) = json.loads(bytes(asked))["scale_out"].values()
    assert found["now"]["stages"] == len(status["pipelines"][0]["stages"])
    assert len(found["more"]) == 1
    assert status["swarm"] == scene.coordinator.swarm.id
    assert [(p["id"], p["state"]) for p in status["peers"]] == [
        (owner.id, "online"),
        (guest.id, "online"),
    ]
    assert [s["layers"] for s in status["pipelines"][0]["stages"]] == [[0, 3], [3, 6]]
    assert status["pipelines"][0]["ready"] is True


async def test_quantization_reaches_the_stage_and_survives_a_restart(
    scene: Scene, kit: Kit
) -> None:
    owner = await scene.peer()
    await owner.ask(serve(kit, quantize="nf4"))
    await scene.until(lambda: owner.last(Route) and owner.last(Route).is_ready, owner)
    assert owner.last(Assign).quantize == "nf4"
    assert (await scene.status(owner))["quantize"] == "nf4"
    await scene.stop()
    await scene.start(port=None)
    assert scene.coordinator.fleet.models[0].quantize == "nf4"


async def test_restart_adopts_running_pipelines(scene: Scene, kit: Kit) -> None:
    owner = await scene.peer()
    await owner.ask(serve(kit))
    await scene.until(lambda: owner.last(Route) and owner.last(Route).is_ready, owner)
    await scene.stop()
    owner.told.clear()
    await scene.start(port=None)
    await scene.until(lambda: owner.last(Route), owner)
    assert owner.last(Route).is_ready
    assert owner.last(Route).epoch == 1
    assert owner.last(Assign) is None
    assert scene.coordinator.fleet.deployments[0].is_ready


async def test_single_use_token_admits_one_of_250_peers(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner)
    async with scene.guest(token) as guest:
        asked = [
            guest.send_request(wish(KeyPair.generate(), token), timeout=60) for _ in range(250)
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [one for one in answers if isinstance(one, BaseException)]
    assert len(scene.state.read_log().members) == 2
    assert Counter(type(one) for one in refused) == {TokenError: 249}
    assert {str(one) for one in refused} == {
        "this join token was for 1 PC, which has joined. `molink invite` on a PC of the swarm "
        "prints another"
    }


async def test_vanished_pc_is_lost_with_its_connection(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "PEER_TIMEOUT", 1000.0)
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    guest.report()
    live = scene.coordinator.fleet.registry.is_live
    await scene.until(lambda: live(guest.id), owner)
    await guest.client.close()
    await scene.until(lambda: not live(guest.id), owner)
    assert live(owner.id)
    assert "disconnected" in scene.coordinator.fleet.story[-1]


async def test_lost_join_reply_does_not_use_up_the_token(scene: Scene) -> None:
    """A member may use its token again."""
    owner = await scene.peer()
    token = await scene.token(owner)
    first = await scene.join(token)
    assert (await scene.join(token, first.keys)).id == first.id
    await scene.stop()
    await scene.start(port=None)
    assert (await scene.join(token, first.keys)).id == first.id
    async with scene.guest(token) as guest:
        with pytest.raises(TokenError, match="was for 1 PC"):
            await guest.send_request(wish(KeyPair.generate(), token), timeout=30)


async def test_invitations_are_listed_and_revoked(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner, uses=2)
    first = await scene.join(token)
    await scene.token(first)

    async def listed(peer: Peer) -> list[dict[str, Any]]:
        reply, payload = await peer.client.send_request(InvitationsRequest(ref=0), timeout=30)
        assert isinstance(reply, InvitationsReply)
        return json.loads(bytes(payload))

    owners, theirs = await listed(owner)
    assert (owners["uses"], owners["left"]) == (2, 1)
    assert [use["peer"] for use in owners["used"]] == [first.id]
    assert theirs["creator"]["peer"] == first.id
    assert await listed(first) == [theirs]

    ids = [f"invite:{one['id']}" for one in (owners, theirs)]
    with pytest.raises(NotAuthorized, match="another PC's invitation"):
        await first.ask(RevokeRequest(ref=0, target=ids[0]))
    ended = await first.ask(RevokeRequest(ref=0, target=ids[1]))
    assert ended == RevokeReply(ref=ended.ref)
    ended = await owner.ask(RevokeRequest(ref=0, target=ids[0]))
    (name,) = ended.kept_peers
    assert name == "guest"
    assert await listed(owner) == []
    with pytest.raises(NotAuthorized):
        await scene.join(token)
    with pytest.raises(RequestError, match="no invitation"):
        await owner.ask(RevokeRequest(ref=0, target=ids[0]))
    assert (await scene.status(first))["swarm"], "members that joined by it stay"


async def test_expired_invitation_is_rejected(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await scene.peer()
    token = await scene.token(owner, ttl=60)
    real = time.time()
    monkeypatch.setattr(module.time, "time", lambda: real + 61)
    await scene.until(lambda: not scene.coordinator.membership.invitations)
    with pytest.raises(NotAuthorized):
        await scene.join(token)
    assert scene.state.read_log().invitations == ()


@pytest.mark.parametrize("jump", [86400.0, -86400.0])
async def test_wall_clock_that_jumps_ends_only_what_expires(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """Members and leases stay, rate limits hold, and an expired invitation stays expired."""
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    revoked = await scene.join(await scene.token(owner))
    await scene.revoke(owner, revoked.id)
    short, lasting = await scene.token(owner), await scene.token(owner, ttl=0.0)
    await scene.until(lambda: guest.last(LeaderHeartbeat), guest)
    before = guest.last(LeaderHeartbeat).lease
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    await scene.until(lambda: guest.last(LeaderHeartbeat).lease.clock > before.clock, guest)
    after = guest.last(LeaderHeartbeat).lease
    assert (after.term, after.clock < before.clock + 60_000) == (before.term, True)
    states = {one["id"]: one["state"] for one in (await scene.status(owner))["peers"]}
    assert states == {owner.id: "online", guest.id: "online"}
    assert not scene.state.read_log().is_member(revoked.id)
    # The jump lets no more peers join at once.
    check = scene.coordinator.membership._check_rate
    for _ in range(PER_INVITATION_LIMIT.burst):
        check(lasting.swarm)
    with pytest.raises(Overloaded):
        check(lasting.swarm)
    monkeypatch.setattr(time, "time", lambda: real() + 86400.0)
    # After a jump forward the invitation has ended already.

    def is_over() -> bool:
        known = scene.coordinator.membership.invitations.values()
        return all(one.used_by or not one.expires_at for one in known)

    await scene.until(is_over)
    for back in (0.0, -86400.0):
        monkeypatch.setattr(time, "time", lambda back=back: real() + back)
        with pytest.raises(NotAuthorized):
            await scene.join(short)
    assert not scene.state.read_log().is_member(revoked.id)


async def test_invitation_secret_is_not_stored(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner)
    await scene.stop()
    for path in scene.folder.iterdir():
        assert token.secret_key.encode() not in path.read_bytes()


async def test_invitation_key_may_only_join(scene: Scene) -> None:
    owner = await scene.peer()
    token, elsewhere = await scene.token(owner), await scene.token(owner)
    guest = Client(
        scene.context,
        KeyPair.from_seed(token.secret_key),
        control_codec(),
        scene.keys.public,
        [f"tcp://127.0.0.1:{scene.port}"],
    )
    guest.start()
    try:
        for message in (InviteRequest(ref=0), StatusRequest(ref=0)):
            with pytest.raises(Unavailable):
                await guest.send_request(message, timeout=0.3)
        for key in (token.coordinator_key, KeyPair.from_seed(token.secret_key).public, "#" * 40):
            with pytest.raises(RequestError):
                await guest.send_request(
                    msgspec.structs.replace(wish(KeyPair.generate(), token), public_key=key),
                    timeout=30,
                )
        for entry in (None, wish(KeyPair.generate(), elsewhere).entry):
            with pytest.raises((RequestError, StateError)):
                await guest.send_request(
                    msgspec.structs.replace(wish(KeyPair.generate(), token), entry=entry),
                    timeout=30,
                )
    finally:
        await guest.close()
    assert len(scene.coordinator.fleet.registry.members) == 1


async def test_invalid_requests_are_rejected(scene: Scene, kit: Kit) -> None:
    owner = await scene.peer()
    stranger = scene.make_peer(KeyPair.generate())
    with pytest.raises(NotAuthorized):
        await stranger.connect()
    await scene.until(lambda: scene.coordinator._server.counters.unauthenticated)
    with pytest.raises(UsageError, match="can't be valid for"):
        await owner.ask(InviteRequest(ref=0, ttl=-1.0))
    owner.client.send(ShutdownRequest(ref=1))
    owner.client.send(StageLoaded(pipeline="p9", epoch=0, stage=2**31 - 1, port=0, max_blocks=0))
    await scene.until(lambda: scene.coordinator._server.counters.forbidden)
    assert (await scene.status(owner))["counters"]["strangers"] >= 1


async def test_peer_leaves_and_rejoins(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner)
    guest = await scene.join(token)
    await scene.until(lambda: owner.last(PeerInfo), owner, guest)
    await guest.ask(LeaveRequest(ref=0))
    await scene.until(lambda: owner.last(PeerRemoved), owner)
    assert owner.last(PeerRemoved).peer == guest.id
    await guest.client.close()
    assert (await scene.join(token, guest.keys)).id == guest.id


async def test_goodbye_ends_the_session_but_not_the_membership(scene: Scene) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    await scene.until(lambda: owner.last(PeerInfo), owner, guest)
    await guest.ask(Goodbye(ref=0))
    registry = scene.coordinator.fleet.registry
    assert guest.id in registry.members
    assert not registry.is_live(guest.id)


async def test_revoked_peer_stays_disconnected(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner, uses=3)
    guest, other = await scene.join(token), await scene.join(token)
    await scene.until(lambda: other.last(PeerInfo), owner, guest, other)
    ended = await owner.ask(RevokeRequest(ref=0, target=guest.id))
    assert ended.kept_peers == ("guest-2",)
    await scene.until(lambda: guest.last(Revoked))
    await scene.until(lambda: not guest.client.is_connected)
    await scene.until(lambda: owner.client.is_connected)
    # Its token admits neither its own key nor a new one.
    with pytest.raises(NotAuthorized):
        await scene.join(token, guest.keys)
    with pytest.raises(NotAuthorized):
        await scene.join(token)
    with pytest.raises(PeerBanned, match="un-revoke"):
        await scene.join(await scene.token(owner), guest.keys)
    for target in (owner.id, guest.id, "nobody"):
        with pytest.raises(RequestError, match="has no other member"):
            await owner.ask(RevokeRequest(ref=0, target=target))
    assert other.id in scene.coordinator.fleet.registry.members


async def test_pcs_of_one_name_are_told_apart_for_good(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner, uses=3)
    guests = [await scene.join(token) for _ in range(2)]

    async def names() -> list[str]:
        shown = {one["id"]: one["name"] for one in (await scene.status(owner))["peers"]}
        return [shown.get(one.id, "gone") for one in guests]

    await scene.until(lambda: all(one.last(Welcome) for one in guests), *guests)
    assert await names() == ["guest", "guest-2"]
    assert {one.name for one in owner.told if isinstance(one, PeerInfo)} == {"guest", "guest-2"}
    # A join request dated before the first guest's doesn't make the late PC the first.
    async with scene.guest(token) as late:
        with pytest.raises(RequestError, match="guest has this name, and the clocks"):
            await late.send_request(wish(KeyPair.generate(), token, 0.0), timeout=30)
    await scene.stop()
    await scene.start()
    owner, *guests = [await scene.peer(one.keys) for one in (owner, *guests)]
    assert await names() == ["guest", "guest-2"]
    await guests[0].ask(LeaveRequest(ref=0))
    assert await names() == ["gone", "guest-2"]
    await owner.ask(AddOwnerRequest(ref=0, target="guest-2"))
    assert guests[1].id in scene.coordinator.membership.log.owners
    await guests[1].ask(RenameRequest(ref=0, name="desk"))
    await scene.until(lambda: owner.last(PeerInfo).name == "desk", owner, guests[1])
    assert await names() == ["gone", "desk"]
    for number in range(MAX_NAMES - 1):
        await guests[1].ask(RenameRequest(ref=0, name=f"pc {number}"))
    with pytest.raises(Unavailable, match="too many names"):
        await guests[1].ask(RenameRequest(ref=0, name="one more"))
    await owner.ask(RevokeRequest(ref=0, target=f"pc {MAX_NAMES - 2}"))
    assert await names() == ["gone", "gone"]


@pytest.mark.parametrize("how", ["revoked", "left"])
async def test_devices_of_a_pc_are_removed_with_it(scene: Scene, how: str) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    await scene.until(lambda: guest.last(Welcome), guest)
    device = await scene.join(await scene.token(guest))
    device.pc = guest.id
    other = await scene.join(await scene.token(guest))
    registry = scene.coordinator.fleet.registry
    await scene.until(
        lambda: registry.primary_peer(device.id) == guest.id and other.last(Welcome), device
    )
    members = registry.members
    if how == "left":
        await guest.ask(LeaveRequest(ref=0, devices=(device.id,)))
        await scene.until(lambda: set(members) == {owner.id, other.id})
        return
    # All PCs that descend from a revoked one are out.
    ended = await scene.revoke(owner, guest.id)
    assert len(ended.ended_peers) == 2
    await scene.until(lambda: device.last(Revoked) and other.last(Revoked))
    await scene.until(lambda: set(members) == {owner.id})
    await owner.ask(UnrevokeRequest(ref=0, target=guest.id))
    assert set(members) == {owner.id, other.id, guest.id, device.id}


async def test_one_descendant_of_a_revoked_pc_is_readmitted(scene: Scene) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    child = await scene.join(await scene.token(guest))
    await scene.revoke(owner, guest.id)
    members = scene.coordinator.fleet.registry.members
    assert set(members) == {owner.id}
    await owner.ask(UnrevokeRequest(ref=0, target=child.id))
    assert set(members) == {owner.id, child.id}


async def test_members_sign_only_for_themselves(scene: Scene) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    planted, swarm = KeyPair.generate(), scene.coordinator.swarm.id
    key, own = planted.signer.verify_key, guest.keys.signer.verify_key
    for by, entry in (
        (planted, AdmissionEntry(key, key, "x", 0.0)),
        (guest.keys, RevocationEntry(own, owner.id, 0.0)),
        (guest.keys, OwnershipEntry(own, guest.id)),
        (guest.keys, JoinEntry(own, key, "x", 0.0)),
    ):
        signed = sign_entry(swarm, by.signer, entry)
        with pytest.raises(NotAuthorized):
            await guest.ask(AppendEntries(ref=0, entries=(signed,)))
    stolen = AdmissionEntry(owner.keys.signer.verify_key, key, "x", 0.0)
    signed = SignedEntry(msgspec.msgpack.encode(stolen), guest.keys.signer.sign(b"x", b""))
    with pytest.raises(StateError, match="false"):
        await guest.ask(AppendEntries(ref=0, entries=(signed,)))
    members = scene.coordinator.membership.log
    assert set(members.members) == {owner.id, guest.id}
    assert members.owners == {owner.id}


async def test_only_owners_rebalance(scene: Scene) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    with pytest.raises(NotAuthorized, match="only an owner of the swarm"):
        await guest.ask(Rebalance(ref=0))
    with pytest.raises(ModelNotFound, match="serves no model"):
        await owner.ask(Rebalance(ref=0))
    await owner.ask(serve(scene.kit))
    await owner.ask(Rebalance(ref=0))
    await scene.until(lambda: "rebalancing all models" in "".join(scene.coordinator.fleet.story))


async def test_offline_pc_learns_of_its_revocation(scene: Scene) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    await guest.client.close()
    await owner.ask(RevokeRequest(ref=0, target=guest.id))
    await scene.stop()
    await scene.start(port=None)
    back = await scene.peer(guest.keys)
    await scene.until(lambda: back.last(Revoked))
    (told,) = back.told
    assert (type(told), told.swarm) == (Revoked, scene.coordinator.swarm.id)
    with pytest.raises(Unavailable):
        await back.client.send_request(StatusRequest(ref=0), timeout=0.3)
    # After one reply, handshakes are refused for a while.
    again = scene.make_peer(guest.keys)
    with pytest.raises(NotAuthorized):
        await again.connect()
    scene.coordinator.membership._notify_at[guest.id] = time.monotonic()
    await scene.until(lambda: again.last(Revoked))
    assert guest.id not in scene.coordinator.fleet.registry.members


async def test_requests_of_a_revoked_pc_are_refused(scene: Scene) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    await guest.client.close()
    await scene.revoke(owner, guest.id)
    client = Client(
        scene.context,
        guest.keys,
        control_codec(),
        scene.keys.public,
        [f"tcp://127.0.0.1:{scene.port}"],
    )
    scene.stack.push_async_callback(client.close)
    client.start()
    with pytest.raises(PeerBanned):
        await client.send_request(LogRequest(ref=0), timeout=30)


async def test_revoked_peer_is_readmitted(scene: Scene) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    await scene.until(lambda: owner.last(PeerInfo), owner, guest)
    await scene.revoke(owner, guest.id)
    await guest.client.close()
    (shown,) = (await scene.status(owner))["revoked"]
    assert shown["id"] == guest.id
    member = await scene.join(await scene.token(owner))
    with pytest.raises(NotAuthorized, match="only an owner of the swarm"):
        await member.ask(UnrevokeRequest(ref=0, target=guest.id))
    await owner.ask(UnrevokeRequest(ref=0, target=guest.id))
    back = await scene.peer(guest.keys)
    await scene.until(lambda: back.last(Welcome), back)
    assert (await scene.status(back))["revoked"] == []
    with pytest.raises(RequestError, match="was not revoked"):
        await owner.ask(UnrevokeRequest(ref=0, target=guest.id))
    await scene.stop()
    await scene.start(port=None)
    await scene.until(lambda: scene.coordinator.fleet.registry.is_live(guest.id), back)


async def test_number_of_members_is_bounded(scene: Scene) -> None:
    await scene.stop()
    await scene.start(max_peers=2)
    owner = await scene.peer()
    token = await scene.token(owner, uses=2)
    guest = await scene.join(token)
    await scene.stop()
    await scene.start(port=None)
    async with scene.guest(token) as client:
        with pytest.raises(Unavailable, match=r"full with 2 PCs.*molink revoke.*max_peers"):
            await client.send_request(wish(KeyPair.generate(), token), timeout=30)
    await scene.revoke(owner, guest.id)
    await scene.join(await scene.token(owner))
    with pytest.raises(Unavailable, match="full with 2 PCs"):
        await owner.ask(UnrevokeRequest(ref=0, target=guest.id))


async def test_joins_are_rate_limited(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner, uses=5)
    scene.coordinator.membership._join_limiter = JoinRateLimiter(
        time.monotonic(), RateLimit(2, 1e-6), RateLimit(9, 9.0)
    )
    async with scene.guest(token) as guest:
        asked = [guest.send_request(wish(KeyPair.generate(), token), timeout=60) for _ in range(5)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = Counter(type(one) for one in answers if isinstance(one, BaseException))
    assert refused == {Overloaded: 3}
    (invitation,) = scene.coordinator.membership.invitations.values()
    assert invitation.uses_left == 3, "rejected joins use nothing"


@pytest.mark.parametrize("kind", [StateError, InvariantError])
async def test_state_error_ends_the_run(
    scene: Scene,
    kit: Kit,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[InvariantError] | type[StateError],
) -> None:
    owner = await scene.peer()

    def full(_pipeline: PipelineRecord) -> Never:
        raise kind("disk full")

    monkeypatch.setattr(scene.state, "commit_pipeline", full)
    await owner.ask(serve(kit))
    with pytest.raises(kind, match="disk full"):
        async with asyncio.timeout(8):
            await scene.coordinator.wait_for_failure()
    assert owner.last(Assign) is None


async def test_a_term_that_can_not_be_stored_ends_the_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await scene.peer()
    await scene.until(lambda: owner.last(LeaderHeartbeat), owner)

    def full(_term: int) -> Never:
        raise StateError("disk full")

    monkeypatch.setattr(scene.state, "begin_term", full)
    scene.coordinator.raise_term(5 << 16)
    with pytest.raises(StateError, match="disk full"):
        async with asyncio.timeout(8):
            await scene.coordinator.wait_for_failure()
    assert scene.coordinator.term == scene.state.read_version()[0] < 5 << 16


async def test_wrong_key_is_detected(scene: Scene) -> None:
    await scene.stop()
    scene.keys = KeyPair.generate()
    with pytest.raises(StateError, match="another key"):
        await scene.start()
    scene.state.close()
    scene.own_context.destroy(linger=0)


async def test_port_in_use(scene: Scene, tmp_path: Path, kit: Kit) -> None:
    async with contextlib.AsyncExitStack() as stack:
        other = Scene(kit, tmp_path / "other", stack)
        stack.push_async_callback(other.stop)
        await other.start(port=scene.port)
        assert scene.port < other.port < scene.port + 12 or other.port >= module.DEFAULT_PORT
        await other.stop()
        with pytest.raises(PortInUse, match=f"port {scene.port} is in use"):
            await other.start(port=scene.port, only_port=True)
    assert issubclass(PortInUse, UsageError)


async def test_only_owners_replace_the_model(scene: Scene, kit: Kit) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    other = await scene.join(await scene.token(owner))
    bad = msgspec.structs.replace(kit.facts, name="toy\x1b[31m")
    with pytest.raises(RequestError, match="printable"):
        await owner.ask(ServeModel(ref=0, model=bad))
    await guest.ask(serve(kit))
    await guest.ask(serve(kit, min_peers=2))
    for peer, name in ((guest, "evil"), (other, "evil"), (other, "toy")):
        model = msgspec.structs.replace(kit.facts, name=name)
        with pytest.raises(NotAuthorized, match="may serve another model than toy"):
            await peer.ask(ServeModel(ref=0, model=model))
    assert scene.state.read_models()[0].facts.name == "toy"
    new = msgspec.structs.replace(kit.facts, name="new")
    await owner.ask(ServeModel(ref=0, model=new))
    assert scene.state.read_models()[0].source == owner.id
    with pytest.raises(NotAuthorized):
        await guest.ask(serve(kit))


async def test_serving_stops_on_request(scene: Scene, kit: Kit) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    with pytest.raises(ModelNotFound, match="serves no model"):
        await owner.ask(StopServing(ref=0))
    await owner.ask(serve(kit))
    await scene.until(lambda: guest.last(Route) and guest.last(Route).is_ready, owner, guest)
    with pytest.raises(NotAuthorized, match="may unload toy, or the PC that loaded it"):
        await guest.ask(StopServing(ref=0))
    await owner.ask(StopServing(ref=0))
    await scene.until(lambda: guest.last(RouteRemoved), owner, guest)
    assert (scene.state.read_models(), scene.state.read_pipelines()) == ((), ())
    status = await scene.status(owner)
    assert (status["model"], status["pipelines"]) == (None, [])
    assert "molink run" in status["trouble"]


def asked_for(kit: Kit, *names: str, **changes: Any) -> bytes:
    models = [
        ModelSpec(model=msgspec.structs.replace(kit.facts, name=name), **changes) for name in names
    ]
    return msgspec.msgpack.encode(DesiredModels(models=tuple(models)))


async def apply(peer: Peer, desired: bytes, *, dry: bool = False) -> list[str]:
    message = ApplyModels(ref=0, payload=Payload("u8", (len(desired),)), dry_run=dry)
    _, text = await peer.client.send_request(message, desired, timeout=30)
    return bytes(text).decode().splitlines()


async def test_only_owners_apply_a_file_of_models(scene: Scene, kit: Kit) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    for peer in (owner, guest):
        peer.models = ("toy", "other")
    await scene.until(lambda: len(scene.coordinator.fleet.registry.sessions) == 2, owner, guest)
    both = asked_for(kit, "toy", "other")
    with pytest.raises(NotAuthorized, match="only an owner"):
        await apply(guest, both)
    lines = ["+ toy: 1 replica, for latency", "+ other: 1 replica, for latency"]
    assert await apply(owner, both, dry=True) == lines
    assert scene.state.read_models() == ()
    assert await apply(owner, both) == lines
    version = scene.state.read_version()
    assert await apply(owner, both) == []
    assert scene.state.read_version() == version

    def ready() -> bool:
        return all(one.is_ready for one in scene.coordinator.fleet.deployments)

    await scene.until(ready, owner, guest)
    status = await scene.status(guest)
    assert [one["name"] for one in status["models"]] == ["toy", "other"]
    used = [{stage["peer"] for stage in one["stages"]} for one in status["pipelines"]]
    assert used in ([{owner.id}, {guest.id}], [{guest.id}, {owner.id}])
    # A restarted daemon's request changes nothing, and `run` can't change one model of a file.
    await owner.ask(serve(kit, is_retry=True, min_peers=2))
    assert [one.min_peers for one in scene.state.read_models()] == [1, 1]
    with pytest.raises(RequestError, match="come from a file"):
        await owner.ask(serve(kit))
    for bad in (asked_for(kit, "toy", "toy"), asked_for(kit, "toy", "other", replicas=8), b"x"):
        with pytest.raises(RequestError):
            await apply(owner, bad)
    assert [(one.facts.name, one.replicas) for one in scene.state.read_models()] == [
        ("toy", 1),
        ("other", 1),
    ]
    with pytest.raises(NotAuthorized, match="may stop other, or the PC that loaded it"):
        await guest.ask(SwitchModel(ref=0, model="other"))
    await owner.ask(SwitchModel(ref=0, model="other"))
    await scene.until(ready, owner, guest)
    status = await scene.status(guest)
    assert [one["stopped"] for one in status["models"]] == [False, True]
    assert [one["model"] for one in status["pipelines"]] == ["toy"]
    await owner.ask(SwitchModel(ref=0, model="other", served=True))
    await scene.until(ready, owner, guest)
    epochs = [one.epoch for one in scene.state.read_pipelines()]
    await scene.stop()
    await scene.start(port=None)
    assert [one.facts.name for one in scene.coordinator.fleet.models] == ["toy", "other"]
    await scene.until(ready, owner, guest)
    assert [one.epoch for one in scene.state.read_pipelines()] == epochs
    await owner.ask(StopServing(ref=0))
    assert scene.state.read_models() == ()


@pytest.mark.parametrize("how", ["revoked", "left"])
async def test_invitations_end_with_their_creator(scene: Scene, how: str) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    with pytest.raises(NotAuthorized, match="more than 30 days"):
        await scene.token(guest, ttl=0.0)
    token = await scene.token(guest)
    if how == "revoked":
        await owner.ask(RevokeRequest(ref=0, target=guest.id))
    else:
        await guest.ask(LeaveRequest(ref=0))
    # The invitation by which a revoked peer joined is void too.
    left = [] if how == "revoked" else [owner.id]
    found = scene.coordinator.membership.invitations.values()
    assert [one.creator for one in found] == left
    assert [one.creator for one in scene.state.read_log().list_invitations()] == left
    with pytest.raises(NotAuthorized):
        await scene.join(token)


async def test_flood_of_invitations_leaves_the_owners(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner, uses=2)
    guest = await scene.join(token)
    for _ in range(MAX_INVITATIONS + 4):
        await scene.token(guest)
    creators = Counter(one.creator for one in scene.coordinator.membership.invitations.values())
    assert creators == {owner.id: 1, guest.id: MAX_INVITATIONS}
    await scene.join(token)


async def test_peer_cannot_rename_another(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner)
    assert (await scene.join(token, owner.keys)).id == owner.id
    record = scene.coordinator.membership.records[owner.id]
    assert record.is_owner
    assert record.name in ("owner", "A")
    assert next(iter(scene.state.read_log().members.values())).name in ("owner", "A")
    assert not any("guest" in line for line in scene.coordinator.fleet.story)


async def test_stage_messages_are_sanitized(scene: Scene, kit: Kit) -> None:
    owner = await scene.peer()
    await owner.ask(serve(kit))
    await scene.until(lambda: owner.last(Route) and owner.last(Route).is_ready, owner)
    owner.obeys = False
    owner.client.send(StageFailed(pipeline="p1", epoch=1, stage=0, reason="\x1b]0;PWNED\x07"))
    await scene.until(lambda: any("PWNED" in line for line in scene.coordinator.fleet.story), owner)
    assert all(map(str.isprintable, scene.coordinator.fleet.story))


# --- replication ------------------------------------------------------------------------------


async def test_every_report_is_answered_with_the_term(scene: Scene) -> None:
    await scene.stop()
    term = next_term(0, "x")
    await scene.start(term=term, leader="x")
    owner = await scene.peer()
    await scene.until(lambda: owner.last(Welcome))

    def noted(term: int) -> list[LeaderHeartbeat]:
        beats = [one for one in owner.told if isinstance(one, LeaderHeartbeat)]
        return [one for one in beats if one.term == term]

    (first, *_) = noted(term)
    assert owner.told[0] == first
    assert (first.leader, first.version, first.protocol) == ("x", __version__, PROTOCOL)
    count = len(noted(term))
    owner.report()
    await scene.until(lambda: len(noted(term)) > count)
    scene.coordinator.raise_term(next_term(term, "x"))
    await scene.until(lambda: noted(next_term(term, "x")), owner)
    checker = LeaseChecker()
    now = time.monotonic()
    assert first.lease is not None
    checker.on_heartbeat("x", first.lease, first.verify_key, now)
    later = noted(next_term(term, "x"))[-1]
    assert checker.check_lease("another peer", later.lease, term, now)


async def test_peers_are_sent_the_state_once(scene: Scene) -> None:
    owner = await scene.peer()
    await scene.until(lambda: owner.shared is not None, owner)
    owner.replica, owner.log_digest = owner.shared.version, owner.shared.log.digest
    guest = await scene.join(await scene.token(owner))
    await scene.until(
        lambda: owner.shared.order == (owner.id, guest.id) and len(owner.shared.announced) == 2,
        owner,
    )
    owner.replica, owner.log_digest = owner.shared.version, owner.shared.log.digest
    told = sum(isinstance(one, StateReplica) for one in owner.told)
    for _ in range(3):
        noted = sum(isinstance(one, LeaderHeartbeat) for one in owner.told)
        owner.report()
        await scene.until(
            lambda: sum(isinstance(one, LeaderHeartbeat) for one in owner.told) > noted  # noqa: B023
        )
    assert scene.state.read_version() == owner.replica
    assert sum(isinstance(one, StateReplica) for one in owner.told) == told


def other_part(scene: Scene, *entries: SignedEntry) -> Replica:
    """Build the state of a part of the swarm with another leader."""
    ours = scene.state.to_replica()
    return replace(ours, term=7, revision=99, log=ours.log.with_entries(entries))


async def send_state(scene: Scene, peer: Peer, state: Replica) -> None:
    """Report another part's state, and send it when asked for it."""
    peer.replica, peer.log_digest = state.version, state.log.digest
    await scene.until(lambda: peer.last(StateRequest), peer)
    data = state.encode()
    peer.client.send(StateReplica(payload=Payload("u8", (len(data),))), data)
    version = scene.state.read_version()
    await scene.until(lambda: scene.state.read_version() > version)


def sign(scene: Scene, by: KeyPair, kind: Any, *fields: Any) -> SignedEntry:
    return sign_entry(scene.coordinator.swarm.id, by.signer, kind(by.signer.verify_key, *fields))


async def test_members_of_another_part_are_imported(scene: Scene) -> None:
    owner = await scene.peer()
    await scene.until(lambda: owner.last(Welcome))
    keys = KeyPair.generate()
    new = sign(scene, owner.keys, AdmissionEntry, keys.signer.verify_key, "new", 1.0)
    await send_state(scene, owner, other_part(scene, new))
    guest = await scene.peer(keys)
    await scene.until(lambda: guest.last(Welcome))
    assert not scene.coordinator.membership.records[guest.id].is_owner


@pytest.mark.parametrize("owner_says_so", [True, False])
async def test_revocations_are_believed_from_owners_only(
    scene: Scene, *, owner_says_so: bool
) -> None:
    """The signature counts, not the peer that brings the state."""
    owner = await scene.peer()
    first = await scene.join(await scene.token(owner))
    second = await scene.join(await scene.token(owner))
    await scene.until(lambda: second.last(Welcome))
    by = owner if owner_says_so else second
    out = [sign(scene, by.keys, RevocationEntry, one.id, 1.0) for one in (first, owner)]
    await send_state(scene, second, other_part(scene, *out))
    members = scene.state.read_log().members
    assert members[owner.id].standing == "member"
    assert members[first.id].standing == ("revoked" if owner_says_so else "member")


async def test_a_forged_state_plants_nobody(scene: Scene) -> None:
    """A member reports a later state and is asked for it, but its forged entries admit no peer."""
    owner = await scene.peer()
    bad = await scene.join(await scene.token(owner))
    await scene.until(lambda: bad.last(Welcome))
    log = scene.state.read_log()
    planted = [KeyPair.generate() for _ in range(5)]
    forged = [
        SignedEntry(msgspec.msgpack.encode(entry), bad.keys.signer.sign(b"membership", b"x"))
        for entry in (
            *(
                AdmissionEntry(owner.keys.signer.verify_key, one.signer.verify_key, "\x1b[2J", 1.0)
                for one in planted
            ),
            OwnershipEntry(owner.keys.signer.verify_key, bad.id),
        )
    ]
    entries = {one.hash: one for one in (*log.entries, *forged)}
    state = replace(scene.state.to_replica(), revision=99, log=MembershipLog(log.swarm, entries))
    bad.replica = state.version
    await scene.until(lambda: bad.last(StateRequest), bad)
    data = state.encode()
    bad.client.send(StateReplica(payload=Payload("u8", (len(data),))), data)
    assert await scene.status(bad), "the state was read before"
    assert scene.coordinator.membership.log.members == log.members
    assert scene.coordinator.membership.log.owners == {owner.id}


async def test_invented_pcs_of_a_member_come_at_the_rate_of_joins(scene: Scene) -> None:
    """A revocation of the member also ends all PCs that it invented."""
    owner = await scene.peer()
    bad = await scene.join(await scene.token(owner))
    await scene.until(lambda: bad.last(Welcome))
    scene.coordinator.membership._join_limiter = JoinRateLimiter(
        time.monotonic(), RateLimit(3, 1e-6), RateLimit(9, 9.0)
    )
    few = [
        sign(scene, bad.keys, AdmissionEntry, KeyPair.generate().signer.verify_key, "x", 1.0)
        for _ in range(3)
    ]
    await send_state(scene, bad, other_part(scene, *few))
    assert len(scene.state.read_log().branches) == 5
    more = sign(scene, bad.keys, AdmissionEntry, KeyPair.generate().signer.verify_key, "x", 1.0)
    again = await scene.peer(bad.keys)
    await send_state(scene, again, other_part(scene, more))
    assert len(scene.state.read_log().branches) == 5
    await scene.revoke(owner, bad.id)
    assert set(scene.state.read_log().branches) == {owner.id}


async def test_unrequested_state_is_rejected(scene: Scene) -> None:
    owner = await scene.peer()
    await scene.until(lambda: owner.last(Welcome))
    new = sign(scene, owner.keys, AdmissionEntry, KeyPair.generate().signer.verify_key, "new", 1.0)
    data = other_part(scene, new).encode()
    owner.client.send(StateReplica(payload=Payload("u8", (len(data),))), data)
    assert await scene.status(owner)
    assert len(scene.state.read_log().members) == 1


# --- pairing ---------------------------------------------------------------------------------


async def start_pairing(scene: Scene, keys: KeyPair, name: str = "pc") -> tuple[asyncio.Task, str]:
    """Start pairing; returns its task and the shown code."""
    codes: list[PairingCode] = []
    port = scene.coordinator.pairing_port
    nearby = DiscoveredSwarm("", "", "", ("127.0.0.1",), port)
    task = asyncio.create_task(request_pairing(nearby, keys, name, codes.append))
    await scene.until(lambda: codes or task.done())
    return task, codes[0].code if codes else ""


async def test_paired_pc_becomes_a_member(scene: Scene) -> None:
    """Any member may approve it, and the approver is stored."""
    await scene.stop()
    await scene.start(pairing_port=0)
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    await scene.until(lambda: owner.last(Welcome) and guest.last(Welcome), owner, guest)
    keys = KeyPair.generate()
    task, code = await start_pairing(scene, keys, "attic\x1b")
    await scene.until(
        lambda: owner.last(PendingPairings) and owner.last(PendingPairings).pairings, owner
    )
    (request,) = owner.last(PendingPairings).pairings
    assert (request.name, request.code, request.address) == ("attic", code, "127.0.0.1")
    assert guest.last(PendingPairings) is None, "only owners are notified"
    (shown,) = (await scene.status(guest))["pairing_requests"]
    assert (shown["name"], shown["code"]) == ("attic", code)
    assert abs(shown["since"] - time.time()) < 3600
    with pytest.raises(RequestError, match="no waiting PC"):
        await guest.ask(PairingDecisionRequest(ref=0, code="0000-0001"))
    assert (await guest.ask(PairingDecisionRequest(ref=0, code=code))).name == "attic"
    member = await task
    assert (member.swarm, member.coordinator_key) == (
        scene.coordinator.swarm.id,
        scene.keys.public,
    )
    assert f"127.0.0.1:{scene.port}" in member.addresses
    await scene.until(lambda: owner.last(PendingPairings).pairings == (), owner)
    back = await scene.peer(keys)
    await scene.until(lambda: back.last(Welcome), back)
    log = scene.state.read_log()
    assert log.members[back.id].branch == log.members[guest.id].branch, "its approver signed"
    # A copy of its state folder pairs while the PC runs.
    with pytest.raises(UsageError, match=r"peer\.key"):
        await (await start_pairing(scene, keys))[0]
    await owner.ask(RevokeRequest(ref=0, target=back.id))
    with pytest.raises(PeerBanned):
        await (await start_pairing(scene, keys))[0]


async def test_pairing_while_the_leader_changes(scene: Scene) -> None:
    """Waiting PCs are told to ask again. Approvals from before are void, unless they are stored."""
    await scene.stop()
    await scene.start(pairing_port=0)
    owner, keys = await scene.peer(), [KeyPair.generate() for _ in range(2)]
    (waiting, code), (stored, other) = [await start_pairing(scene, one) for one in keys]
    found = await owner.send(PairingDecisionRequest(ref=0, code=code))
    # The leader stores the approval of the second PC, and ends before it tells any peer.
    scene.coordinator.membership.append_entries([admission(scene, keys[1])], owner.id)
    await scene.stop()
    for one in (waiting, stored):
        with pytest.raises(Unavailable, match="run `molink join` again"):
            await one
    await scene.start(pairing_port=0)
    again = await scene.peer()
    late = AppendEntries(ref=0, entries=(admission(scene, keys[0]),), code=code)
    with pytest.raises(RequestError, match="no waiting PC"):
        await again.send(late)
    assert isinstance(found[0], PairingDecisionReply)
    assert not scene.state.read_log().is_member(derive_peer_id(keys[0].public))
    assert scene.state.read_log().is_member(derive_peer_id(keys[1].public))
    for one in keys:
        task, code = await start_pairing(scene, one)
        with pytest.raises(RequestError, match="no waiting PC"):
            await again.ask(PairingDecisionRequest(ref=0, code=other))
        await again.ask(PairingDecisionRequest(ref=0, code=code))
        assert (await task).swarm == scene.coordinator.swarm.id
    log = scene.state.read_log()
    entries = [one.decode() for one in log.entries]
    admitted = [one.verify_key for one in entries if isinstance(one, AdmissionEntry)]
    assert sorted(admitted) == sorted(one.signer.verify_key for one in keys), "each once"


def admission(scene: Scene, keys: KeyPair) -> SignedEntry:
    """The entry that the owner signs to admit a PC."""
    signer = scene.owner_keys.signer
    entry = AdmissionEntry(signer.verify_key, keys.signer.verify_key, "pc", time.time())
    return sign_entry(scene.coordinator.swarm.id, signer, entry)


async def test_full_swarm_rejects_pairing(scene: Scene) -> None:
    await scene.stop()
    await scene.start(pairing_port=0, max_peers=2)
    owner = await scene.peer()
    (task, code), (other, _) = [await start_pairing(scene, KeyPair.generate()) for _ in range(2)]
    await owner.ask(PairingDecisionRequest(ref=0, code=code))
    await task
    (left,) = (await scene.status(owner))["pairing_requests"]
    with pytest.raises(Unavailable, match="the swarm is full"):
        await owner.ask(PairingDecisionRequest(ref=0, code=left["code"]))
    with pytest.raises(Unavailable):
        await other
    with pytest.raises(Unavailable):
        await (await start_pairing(scene, KeyPair.generate()))[0]
    assert len(scene.state.read_log().members) == 2


async def test_pairing_does_not_use_up_a_token(scene: Scene) -> None:
    await scene.stop()
    await scene.start(pairing_port=0)
    owner = await scene.peer()
    tokens = [await scene.token(owner) for _ in range(MAX_INVITATIONS)]
    task, code = await start_pairing(scene, KeyPair.generate())
    await owner.ask(PairingDecisionRequest(ref=0, code=code))
    await task
    await scene.join(tokens[0])


async def test_pairing_needs_discovery(scene: Scene) -> None:
    owner = await scene.peer()
    assert scene.coordinator.pairing_port == 0
    with pytest.raises(RequestError, match="discovery"):
        await owner.ask(PairingDecisionRequest(ref=0, code="0000-0001"))
    assert (await scene.status(owner))["pairing_requests"] == []


async def test_duplicate_pc_is_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two PCs run with copies of one state folder; one of them is told."""
    monkeypatch.setattr(duplicates, "ALTERNATION_INTERVAL_S", 0.0)
    owner = await scene.peer()
    first = await scene.join(await scene.token(owner))
    await scene.until(lambda: first.last(Welcome), first)
    second = await scene.peer(first.keys)
    await scene.until(lambda: second.last(DuplicatePeer), first, second, owner)
    assert first.last(DuplicatePeer) is None
    told = len(first.told)
    await scene.until(lambda: len(first.told) > told + 2, first, second)
    assert scene.coordinator.fleet.registry.is_live(first.id)


async def test_swarm_is_updated_pc_by_pc(scene: Scene, kit: Kit) -> None:
    """Compatible versions share a ring: each PC leaves and comes back updated."""
    owner = await scene.peer()
    await owner.ask(serve(kit, min_peers=3, min_stages=3))
    others = [await scene.join(await scene.token(owner)) for _ in range(2)]
    (reconciler,) = scene.coordinator.fleet.deployments

    def stands(*peers: Peer) -> bool:
        holds = reconciler.formation.peers if reconciler.is_ready else ()
        return set(holds) == {peer.id for peer in peers}

    everybody = [owner, *others]
    await scene.until(lambda: stands(*everybody), *everybody)
    for number, old in enumerate(list(others)):
        rest = [peer for peer in everybody if peer is not old]
        old.stage = "none"  # molink drain
        await scene.until(lambda rest=rest: stands(*rest), *everybody)
        await old.ask(Goodbye(ref=0))
        await old.client.close()
        new = await scene.peer(old.keys)
        new.version = "2"
        everybody[everybody.index(old)] = new
        await scene.until(lambda: stands(*everybody), *everybody)
        versions = [peer["version"] for peer in (await scene.status(owner))["peers"]]
        assert sorted(versions) == sorted(["1", *["2"] * (number + 1), *["1"] * (1 - number)])


async def test_incompatible_peer_is_excluded(
    scene: Scene, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await scene.peer()
    await owner.ask(serve(kit))
    guest = await scene.join(await scene.token(owner))
    await guest.client.close()
    newer = scene.make_peer(guest.keys)
    scene.stack.push_async_callback(newer.client.close)
    newer.version, newer.protocol = "2.0", PROTOCOL + 1
    await newer.connect()

    def refused(peer: Peer) -> bool:
        return len(peer.told) > 2 and {type(one) for one in peer.told} == {LeaderHeartbeat}

    await scene.until(lambda: refused(newer), owner, newer)
    assert (newer.last(LeaderHeartbeat).version, newer.last(LeaderHeartbeat).protocol) == (
        __version__,
        PROTOCOL,
    )
    live = scene.coordinator.fleet.registry.is_live
    await scene.until(lambda: not live(newer.id), owner, newer)
    (shown,) = [p for p in (await scene.status(owner))["peers"] if p["id"] == newer.id]
    assert (shown["state"], shown["version"]) == ("refused", "2.0")
    ours = f"molink {__version__} (protocol {PROTOCOL})"
    assert (
        shown["reason"]
        == f"refused: it runs molink 2.0 (protocol {PROTOCOL + 1}), the swarm runs {ours}"
    )
    # Once the coordinator's PC is updated, the others are incompatible until they are updated.
    await scene.stop()
    monkeypatch.setattr("molink.swarm.membership.versions.PROTOCOL", PROTOCOL + 1)
    for peer in (owner, newer):
        peer.told.clear()
    await scene.start(port=None)
    await scene.until(lambda: newer.last(Welcome) and refused(owner), owner, newer)
    owner.protocol = PROTOCOL + 1
    await scene.until(lambda: owner.last(Welcome), owner, newer)
    assert (await scene.status(owner))["peers"][0]["state"] == "online"


async def test_incompatible_pc_cannot_join(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner)
    strange = wish(KeyPair.generate(), token)
    async with scene.guest(token) as guest:
        with pytest.raises(VersionMismatch) as refusal:
            await guest.send_request(
                msgspec.structs.replace(strange, version="0.0.1", protocol=0), timeout=30
            )
        assert "this PC runs molink 0.0.1 (protocol 0)" in str(refusal.value)
        assert f"the swarm molink {__version__} (protocol {PROTOCOL})" in str(refusal.value)
        assert "Update this PC with" in str(refusal.value)
        # The token is unused.
        reply, _ = await guest.send_request(strange, timeout=30)
    assert isinstance(reply, JoinReply)
