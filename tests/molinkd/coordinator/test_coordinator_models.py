from typing import Any

import msgspec
import pytest

from molink.errors import (
    NotAuthorized,
    RequestError,
)
from molink.wire.messages.admin import (
    ApplyModels,
    DesiredModels,
    LeaveRequest,
    ModelSpec,
    RevokeRequest,
    ServeModel,
    StopServing,
    SwitchModel,
)
from molink.wire.messages.base import Payload
from tests.support.coordinator_scene import Peer, Scene, serve
from tests.support.fake_fleet import Kit


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
