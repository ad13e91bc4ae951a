import asyncio
import time
from collections import Counter
from typing import Never

import msgspec
import pytest

from molink.errors import (
    InvariantError,
    ModelNotFound,
    NotAuthorized,
    Overloaded,
    PeerBanned,
    RequestError,
    StateError,
    Unavailable,
)
from molink.swarm.controller.records import PipelineRecord
from molink.swarm.membership.invitations import (
    JoinRateLimiter,
)
from molink.util.token_bucket import RateLimit
from molink.wire.messages.admin import (
    AddOwnerRequest,
    AppendEntries,
    LeaveRequest,
    LogRequest,
    Rebalance,
    RenameRequest,
    RevokeRequest,
    StatusRequest,
    UnrevokeRequest,
)
from molink.wire.messages.codec import control_codec
from molink.wire.messages.instructions import (
    Assign,
    PeerInfo,
    PeerRemoved,
    Revoked,
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
)
from molink.wire.sockets.client import Client
from molink.wire.sockets.key_pair import KeyPair
from molinkd.coordinator.membership import MAX_NAMES
from tests.support.coordinator_scene import Scene, serve, wish
from tests.support.fake_fleet import Kit


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
        async with asyncio.timeout(60):
            await scene.coordinator.wait_for_failure()
    assert owner.last(Assign) is None
