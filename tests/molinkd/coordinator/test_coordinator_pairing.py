import asyncio
import time

import pytest

from molink.errors import (
    PeerBanned,
    RequestError,
    Unavailable,
    UsageError,
)
from molink.facts.identity import derive_peer_id
from molink.swarm.membership import duplicate_peers as duplicates
from molink.swarm.membership.discovery import DiscoveredSwarm
from molink.swarm.membership.invitations import (
    MAX_INVITATIONS,
)
from molink.wire.messages.admin import (
    AppendEntries,
    PairingDecisionReply,
    PairingDecisionRequest,
    RevokeRequest,
)
from molink.wire.messages.instructions import (
    DuplicatePeer,
    PendingPairings,
    Welcome,
)
from molink.wire.messages.membership import (
    AdmissionEntry,
    SignedEntry,
    sign_entry,
)
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.membership.pairing_client import PairingCode, request_pairing
from tests.support.coordinator_scene import Scene

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
