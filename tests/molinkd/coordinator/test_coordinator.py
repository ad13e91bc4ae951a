"""The coordinator on real sockets, in this process."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Never, Self

import msgspec
import pytest
import zmq.asyncio
from zmq.asyncio import Context

from molink.errors import (
    InvariantError,
    MolinkError,
    NotAuthorized,
    PortInUse,
    RequestError,
    StateError,
    Unavailable,
    UsageError,
)
from molink.facts.identity import peer_id
from molink.facts.profile import Profile
from molink.swarm.invitations import MAX_INVITATIONS
from molink.swarm.records import PipelineRecord
from molink.swarm.token import JoinToken
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control import (
    Assign,
    Done,
    Form,
    Goodbye,
    Invite,
    InviteRequest,
    Joined,
    JoinRequest,
    LeaveRequest,
    Member,
    MemberGone,
    RevokeRequest,
    Route,
    ServeModel,
    ShutdownRequest,
    StageFailed,
    StageLoaded,
    StageReady,
    StatusRequest,
    Welcome,
)
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.curve import KeyPair
from molinkd.coordinator import coordinator as module
from molinkd.coordinator.arguments import Options
from molinkd.coordinator.coordinator import Coordinator
from molinkd.coordinator.state import State
from tests.support.swarm import Kit


class Peer:
    """A daemon's side of the control plane; keeps what it was told and obeys it if asked to."""

    def __init__(
        self, kit: Kit, context: Context, keys: KeyPair, server_key: str, port: int
    ) -> None:
        self.kit, self.keys, self.id = kit, keys, peer_id(keys.public)
        self.told = []
        self.obeys = True
        self.workers = {}
        self.stage, self.models = "auto", ()
        self.client = Client(
            context,
            keys,
            control_codec(),
            server_key,
            [f"tcp://127.0.0.1:{port}"],
            events=ClientEvents(on_message=self.take, on_connect=self.report),
        )

    async def connect(self, timeout: float = 60.0) -> Self:
        self.client.start()
        await self.client.wait_connected(timeout)
        return self

    def report(self) -> None:
        report = self.kit.report(
            "a", *self.workers.values(), stage=self.stage, models=self.models or ("toy",)
        )
        self.client.send(report)

    def take(self, message: Any, _payload: memoryview | None) -> None:
        self.told.append(message)
        if not self.obeys:
            return
        if isinstance(message, Assign):
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
        elif isinstance(message, Form):
            worker = self.workers[message.pipeline]
            ids = (message.epoch, worker.stage, worker.layers, message.pipeline)
            self.workers[message.pipeline] = self.kit.worker("ready", *ids)
            self.client.send(
                StageReady(pipeline=message.pipeline, epoch=message.epoch, stage=worker.stage)
            )

    def last(self, kind: Any) -> Any:
        return next((m for m in reversed(self.told) if isinstance(m, kind)), None)

    async def ask(self, message: Any) -> Done | Invite:
        return (await self.client.request(message, timeout=30))[0]


class Scene:
    """A coordinator that can be restarted, and peers around it."""

    def __init__(self, kit: Kit, folder: Path, stack: AsyncExitStack) -> None:
        self.kit, self.folder, self.stack = kit, folder, stack
        self.context = zmq.asyncio.Context()
        stack.callback(self.context.destroy, linger=0)
        self.keys, self.owner_keys = KeyPair.generate(), KeyPair.generate()
        self.coordinator = self.state = None
        self.port = 0

    async def start(self, **changes: int | None) -> Self:
        options = Options(
            self.folder,
            **{
                "host": "127.0.0.1",
                "port": self.port,
                "name": "test",
                "members": ((self.owner_keys.public, "owner"),),
                **changes,
            },
        )
        self.state = State.open(self.folder)
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
        peer = Peer(self.kit, self.context, keys or self.owner_keys, self.keys.public, self.port)
        self.stack.push_async_callback(peer.client.close)
        return await peer.connect()

    async def token(self, owner: Peer, ttl: float = 3600.0) -> JoinToken:
        reply = await owner.ask(InviteRequest(ref=0, ttl=ttl))
        assert isinstance(reply, Invite)
        return JoinToken.parse(reply.token, time.time())

    async def join(self, token: JoinToken, keys: KeyPair | None = None) -> Peer:
        guest = Client(
            self.context,
            KeyPair.from_secret(token.secret_key),
            control_codec(),
            token.coordinator_key,
            [f"tcp://{address}" for address in token.addresses],
        )
        guest.start()
        keys = keys or KeyPair.generate()
        request = JoinRequest(ref=0, public_key=keys.public, name="guest\x1b", version="1")
        try:
            reply, _ = await guest.request(request, timeout=30)
        finally:
            await guest.close()
        assert reply == Joined(
            ref=reply.ref, swarm=self.coordinator.swarm.id, peer=peer_id(keys.public)
        )
        return await self.peer(keys)

    async def status(self, peer: Peer) -> dict[str, Any]:
        _, payload = await peer.client.request(StatusRequest(ref=0), timeout=30)
        return json.loads(bytes(payload))

    async def until(self, condition: Callable[..., Any], *reporters: Peer) -> None:
        """Wait for a condition while these peers go on reporting."""
        async with asyncio.timeout(60):
            while not condition():
                for peer in reporters:
                    with contextlib.suppress(MolinkError):
                        peer.report()
                await asyncio.sleep(0.02)


@pytest.fixture
async def scene(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(module, "TICK", 0.02)
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
        lambda: all(p.last(Route) and p.last(Route).ready for p in (owner, guest)), owner, guest
    )
    assert isinstance(owner.told[0], Welcome)
    assert owner.last(Member).peer == guest.id
    head = owner.last(Route).head
    assert (head.peer, head.port) == (owner.id, 5468)
    status = await scene.status(guest)
    assert status["swarm"] == scene.coordinator.swarm.id
    assert [(p["id"], p["state"]) for p in status["peers"]] == [
        (owner.id, "here"),
        (guest.id, "here"),
    ]
    assert [s["layers"] for s in status["pipelines"][0]["stages"]] == [[0, 3], [3, 6]]
    assert status["pipelines"][0]["ready"] is True


async def test_how_weights_are_kept_reaches_the_stage_and_outlives_a_restart(
    scene: Scene, kit: Kit
) -> None:
    owner = await scene.peer()
    await owner.ask(serve(kit, quantize="nf4"))
    await scene.until(lambda: owner.last(Route) and owner.last(Route).ready, owner)
    assert owner.last(Assign).quantize == "nf4"
    assert (await scene.status(owner))["quantize"] == "nf4"
    await scene.stop()
    await scene.start(port=None)
    assert scene.coordinator.reconciler.desired.quantize == "nf4"


async def test_a_restart_adopts_what_runs(scene: Scene, kit: Kit) -> None:
    owner = await scene.peer()
    await owner.ask(serve(kit))
    await scene.until(lambda: owner.last(Route) and owner.last(Route).ready, owner)
    await scene.stop()
    owner.told.clear()
    await scene.start(port=None)
    await scene.until(lambda: owner.last(Route), owner)
    assert owner.last(Route).ready
    assert owner.last(Route).epoch == 1
    assert owner.last(Assign) is None
    assert scene.coordinator.reconciler.ready


async def test_an_invitation_is_good_for_many_until_it_is_revoked(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner)
    first = await scene.join(token)
    again = await scene.join(token, first.keys)
    assert again.id == first.id
    (invitation,) = scene.coordinator.door.invitations
    with pytest.raises(NotAuthorized, match="only the PC that runs the swarm"):
        await first.ask(RevokeRequest(ref=0, target=invitation.id))
    await owner.ask(RevokeRequest(ref=0, target=invitation.id))
    with pytest.raises(NotAuthorized):
        await scene.join(token)
    with pytest.raises(RequestError, match="no invitation"):
        await owner.ask(RevokeRequest(ref=0, target=invitation.id))


async def test_an_expired_invitation_opens_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await scene.peer()
    token = await scene.token(owner, ttl=60)
    real = time.time()
    monkeypatch.setattr(module.time, "time", lambda: real + 61)
    await scene.until(lambda: not list(scene.coordinator.door.invitations))
    with pytest.raises(NotAuthorized):
        await scene.join(token)
    assert scene.state.invitations() == []


async def test_the_secret_is_kept_nowhere(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner)
    await scene.stop()
    for path in scene.folder.iterdir():
        assert token.secret_key.encode() not in path.read_bytes()


async def test_an_invitation_may_do_nothing_but_join(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner)
    guest = Client(
        scene.context,
        KeyPair.from_secret(token.secret_key),
        control_codec(),
        scene.keys.public,
        [f"tcp://127.0.0.1:{scene.port}"],
    )
    guest.start()
    try:
        for message in (InviteRequest(ref=0), StatusRequest(ref=0)):
            with pytest.raises(Unavailable):
                await guest.request(message, timeout=0.3)
        for key in (token.coordinator_key, KeyPair.from_secret(token.secret_key).public, "#" * 40):
            with pytest.raises(RequestError):
                await guest.request(
                    JoinRequest(ref=0, public_key=key, name="x", version="1"), timeout=30
                )
    finally:
        await guest.close()
    assert len(scene.coordinator.reconciler.registry.members) == 1


async def test_strangers_and_odd_requests(scene: Scene, kit: Kit) -> None:
    owner = await scene.peer()
    stranger = Peer(kit, scene.context, KeyPair.generate(), scene.keys.public, scene.port)
    scene.stack.push_async_callback(stranger.client.close)
    with pytest.raises(NotAuthorized):
        await stranger.connect()
    await scene.until(lambda: scene.coordinator._server.counters.strangers)
    with pytest.raises(UsageError, match="can't be valid for"):
        await owner.ask(InviteRequest(ref=0, ttl=-1.0))
    owner.client.send(ShutdownRequest(ref=1))
    owner.client.send(StageLoaded(pipeline="p9", epoch=0, stage=2**31 - 1, port=0, max_blocks=0))
    await scene.until(lambda: scene.coordinator._server.counters.forbidden)
    assert (await scene.status(owner))["counters"]["strangers"] >= 1


async def test_leaving_and_coming_back(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner)
    guest = await scene.join(token)
    await scene.until(lambda: owner.last(Member), owner, guest)
    await guest.ask(LeaveRequest(ref=0))
    await scene.until(lambda: owner.last(MemberGone), owner)
    assert owner.last(MemberGone).peer == guest.id
    await guest.client.close()
    assert (await scene.join(token, guest.keys)).id == guest.id


async def test_a_goodbye_ends_the_session_but_no_membership(scene: Scene) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    await scene.until(lambda: owner.last(Member), owner, guest)
    await guest.ask(Goodbye(ref=0))
    registry = scene.coordinator.reconciler.registry
    assert guest.id in registry.members
    assert not registry.live(guest.id)


async def test_a_revoked_peer_is_cut_off_for_good(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner)
    guest = await scene.join(token)
    await owner.ask(RevokeRequest(ref=0, target=guest.id))
    await scene.until(lambda: not guest.client.connected)
    await scene.until(lambda: owner.client.connected)
    with pytest.raises(NotAuthorized):
        await guest.client.wait_connected(5)
    with pytest.raises(NotAuthorized, match="shut out"):
        await scene.join(token, guest.keys)
    for target in (owner.id, guest.id, "nobody"):
        with pytest.raises(RequestError, match="is no other member"):
            await owner.ask(RevokeRequest(ref=0, target=target))


@pytest.mark.parametrize("kind", [StateError, InvariantError])
async def test_a_state_that_fails_ends_the_run(
    scene: Scene,
    kit: Kit,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[InvariantError] | type[StateError],
) -> None:
    owner = await scene.peer()

    def full(_pipeline: PipelineRecord) -> Never:
        raise kind("disk full")

    monkeypatch.setattr(scene.state, "commit", full)
    await owner.ask(serve(kit))
    with pytest.raises(kind, match="disk full"):
        async with asyncio.timeout(60):
            await scene.coordinator.wait()
    assert owner.last(Assign) is None


async def test_the_wrong_key_is_noticed(scene: Scene) -> None:
    await scene.stop()
    scene.keys = KeyPair.generate()
    with pytest.raises(StateError, match="another key"):
        await scene.start()
    scene.state.close()
    scene.own_context.destroy(linger=0)


async def test_a_port_that_is_taken(scene: Scene, tmp_path: Path, kit: Kit) -> None:
    async with contextlib.AsyncExitStack() as stack:
        other = Scene(kit, tmp_path / "other", stack)
        stack.push_async_callback(other.stop)
        await other.start(port=scene.port)
        assert scene.port < other.port < scene.port + 12 or other.port >= module.DEFAULT_PORT
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
        with pytest.raises(NotAuthorized, match="the swarm serves toy; only the PC that runs it"):
            await peer.ask(ServeModel(ref=0, model=model))
    assert scene.state.desired().facts.name == "toy"
    new = msgspec.structs.replace(kit.facts, name="new")
    await owner.ask(ServeModel(ref=0, model=new))
    assert scene.state.desired().source == owner.id
    with pytest.raises(NotAuthorized):
        await guest.ask(serve(kit))


@pytest.mark.parametrize("how", ["revoked", "left"])
async def test_invitations_end_with_their_maker(scene: Scene, how: str) -> None:
    owner = await scene.peer()
    guest = await scene.join(await scene.token(owner))
    with pytest.raises(NotAuthorized, match="more than 30 days"):
        await scene.token(guest, ttl=0.0)
    token = await scene.token(guest)
    if how == "revoked":
        await owner.ask(RevokeRequest(ref=0, target=guest.id))
    else:
        await guest.ask(LeaveRequest(ref=0))
    assert [one.creator for one in scene.coordinator.door.invitations] == [owner.id]
    assert [one.creator for one in scene.state.invitations()] == [owner.id]
    with pytest.raises(NotAuthorized):
        await scene.join(token)


async def test_a_flood_of_invitations_leaves_the_owners(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner)
    guest = await scene.join(token)
    for _ in range(MAX_INVITATIONS + 4):
        await scene.token(guest)
    creators = Counter(one.creator for one in scene.coordinator.door.invitations)
    assert creators == {owner.id: 1, guest.id: MAX_INVITATIONS}
    await scene.join(token)


async def test_nobody_else_renames_a_member(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner)
    assert (await scene.join(token, owner.keys)).id == owner.id
    record = scene.coordinator.door.records[owner.id]
    assert (record.name, record.owner) == ("owner", True)
    assert scene.state.members()[0].name in ("owner", "A")
    assert not any("guest" in line for line in scene.coordinator.reconciler.story)


async def test_what_stages_say_is_cleaned(scene: Scene, kit: Kit) -> None:
    owner = await scene.peer()
    await owner.ask(serve(kit))
    await scene.until(lambda: owner.last(Route) and owner.last(Route).ready, owner)
    owner.obeys = False
    owner.client.send(StageFailed(pipeline="p1", epoch=1, stage=0, reason="\x1b]0;PWNED\x07"))
    await scene.until(
        lambda: any("PWNED" in line for line in scene.coordinator.reconciler.story), owner
    )
    assert all(map(str.isprintable, scene.coordinator.reconciler.story))
