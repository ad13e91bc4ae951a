"""Belonging to a swarm: what is remembered, what a token may do, and joining over the wire."""

import time
from pathlib import Path

import msgspec
import pytest

from molink.errors import TokenError, Unavailable, UsageError
from molink.swarm.token import JoinToken
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control import Joined, JoinRequest
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.server import Sender
from molinkd.peer.membership import Membership, choose, join, read_membership
from tests.support.net import Net

COORDINATOR = KeyPair.generate()
INVITATION = KeyPair.generate()
KNOWN = Membership(
    swarm="s", coordinator_key=COORDINATOR.public, addresses=("10.0.0.1:5466",), model="m"
)


def make_token(address: str = "10.0.0.9:5466", key: str = COORDINATOR.public) -> JoinToken:
    return JoinToken("s", (address,), key, INVITATION.secret, int(time.time()) + 60)


def test_it_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "swarm.json"
    assert read_membership(path) is None
    KNOWN.save(path)
    assert read_membership(path) == KNOWN
    assert KNOWN.endpoints == ("tcp://10.0.0.1:5466",)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match=r"swarm\.json"):
        read_membership(path)


def test_a_new_peer_needs_a_token() -> None:
    assert choose(None, str(make_token())) == make_token()
    with pytest.raises(UsageError, match="in no swarm"):
        choose(None, None)


def test_a_member_returns_without_one() -> None:
    assert choose(KNOWN, None) == KNOWN
    with pytest.raises(UsageError, match="molink up"):
        choose(msgspec.structs.replace(KNOWN, own=True), None)


def test_a_token_of_the_same_swarm_brings_new_addresses() -> None:
    moved = choose(KNOWN, str(make_token()))
    assert isinstance(moved, Membership)
    assert moved.addresses == ("10.0.0.9:5466",)


def test_a_member_does_not_change_swarms_by_accident() -> None:
    with pytest.raises(UsageError, match="molink leave"):
        choose(KNOWN, str(make_token(key=KeyPair.generate().public)))


def test_an_expired_token() -> None:
    token = msgspec.structs.replace(make_token(), expires=1)
    with pytest.raises(TokenError, match="expired"):
        choose(None, str(token))


async def test_joining(net: Net) -> None:
    seen: list[JoinRequest] = []

    def handle(sender: Sender, message: JoinRequest, _payload: memoryview | None) -> None:
        seen.append(message)
        server.send(sender.identity, Joined(ref=message.ref, swarm="s2", peer="p"))

    net.gatekeeper.allow(INVITATION.public, "invite:1")
    server = net.server(control_codec(), handle)
    token = make_token(f"127.0.0.1:{server.port}", net.keys.public)
    mine = KeyPair.generate()
    membership = await join(net.context, mine, token, "pc")
    assert membership.swarm == "s2"
    assert membership.coordinator_key == net.keys.public
    assert (seen[0].public_key, seen[0].name) == (mine.public, "pc")


async def test_an_invitation_that_is_not_known(net: Net) -> None:
    server = net.server(control_codec(), lambda *_: None)
    token = make_token(f"127.0.0.1:{server.port}", net.keys.public)
    with pytest.raises(TokenError, match="withdrawn"):
        await join(net.context, KeyPair.generate(), token, "pc")


async def test_a_coordinator_with_another_key(net: Net) -> None:
    server = net.server(control_codec(), lambda *_: None)
    token = make_token(f"127.0.0.1:{server.port}", KeyPair.generate().public)
    with pytest.raises(TokenError, match="another swarm"):
        await join(net.context, KeyPair.generate(), token, "pc")


async def test_nobody_there(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molinkd.peer.membership._JOIN_S", 0.2)
    with pytest.raises(Unavailable, match="can't join"):
        await join(net.context, KeyPair.generate(), make_token("127.0.0.1:9"), "pc")
