import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from molink import __version__
from molink.swarm.election.leases import LeaseChecker
from molink.swarm.election.replica import Replica
from molink.swarm.election.terms import next_term
from molink.swarm.membership.invitations import (
    JoinRateLimiter,
)
from molink.swarm.membership.membership_log import MembershipLog
from molink.util.token_bucket import RateLimit
from molink.wire.messages.base import Payload
from molink.wire.messages.election import LeaderHeartbeat, StateReplica, StateRequest
from molink.wire.messages.instructions import (
    Welcome,
)
from molink.wire.messages.membership import (
    AdmissionEntry,
    OwnershipEntry,
    RevocationEntry,
    SignedEntry,
    sign_entry,
)
from molink.wire.protocol import PROTOCOL
from molink.wire.sockets.key_pair import KeyPair
from tests.support.coordinator_scene import Peer, Scene

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
