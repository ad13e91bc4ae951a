import msgspec
import pytest

from molink import __version__
from molink.errors import (
    VersionMismatch,
)
from molink.wire.messages.control_plane import JoinReply
from molink.wire.messages.election import LeaderHeartbeat
from molink.wire.messages.instructions import (
    Welcome,
)
from molink.wire.messages.peer_reports import (
    Goodbye,
)
from molink.wire.protocol import PROTOCOL
from molink.wire.sockets.key_pair import KeyPair
from tests.support.coordinator_scene import Peer, Scene, serve, wish
from tests.support.fake_fleet import Kit


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
