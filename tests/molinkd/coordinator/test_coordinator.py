import asyncio
import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Never

import pytest

from molink.errors import (
    ModelNotFound,
    NotAuthorized,
    PortInUse,
    StateError,
    TokenError,
    UsageError,
)
from molink.swarm.controller import registry
from molink.wire.messages.admin import (
    InviteRequest,
    ShutdownRequest,
    StatusRequest,
    StopServing,
)
from molink.wire.messages.election import LeaderHeartbeat
from molink.wire.messages.instructions import (
    Assign,
    PeerInfo,
    Route,
    RouteRemoved,
    Welcome,
)
from molink.wire.messages.peer_reports import (
    StageFailed,
    StageLoaded,
)
from molink.wire.sockets.key_pair import KeyPair
from molinkd.coordinator import coordinator as module
from tests.support.coordinator_scene import Scene, serve, wish
from tests.support.fake_fleet import Kit


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
