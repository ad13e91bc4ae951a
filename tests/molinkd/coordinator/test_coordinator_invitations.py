import json
import time
from collections import Counter
from typing import Any

import msgspec
import pytest

from molink.errors import (
    NotAuthorized,
    Overloaded,
    RequestError,
    StateError,
    Unavailable,
)
from molink.swarm.membership.invitations import (
    MAX_INVITATIONS,
    PER_INVITATION_LIMIT,
)
from molink.wire.messages.admin import (
    InvitationsReply,
    InvitationsRequest,
    InviteRequest,
    RevokeReply,
    RevokeRequest,
    StatusRequest,
)
from molink.wire.messages.codec import control_codec
from molink.wire.messages.election import LeaderHeartbeat
from molink.wire.sockets.client import Client
from molink.wire.sockets.key_pair import KeyPair
from molinkd.coordinator import coordinator as module
from tests.support.coordinator_scene import Peer, Scene, wish


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


async def test_flood_of_invitations_leaves_the_owners(scene: Scene) -> None:
    owner = await scene.peer()
    token = await scene.token(owner, uses=2)
    guest = await scene.join(token)
    for _ in range(MAX_INVITATIONS + 4):
        await scene.token(guest)
    creators = Counter(one.creator for one in scene.coordinator.membership.invitations.values())
    assert creators == {owner.id: 1, guest.id: MAX_INVITATIONS}
    await scene.join(token)
