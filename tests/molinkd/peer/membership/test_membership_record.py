"""The stored membership, join tokens, and joining over the wire."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from molink.errors import (
    MolinkError,
    Overloaded,
    PeerBanned,
    TokenError,
    Unavailable,
    UsageError,
    WireError,
)
from molink.swarm.membership.join_token import ContactPoint, JoinToken
from molink.wire.messages.admin import StatusReply, StatusRequest
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import JoinRedirect, JoinReply, JoinRequest
from molink.wire.messages.membership import JoinEntry, check_signature
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender
from molinkd.peer.home import Home
from molinkd.peer.membership.joining import join_swarm, renew_membership
from molinkd.peer.membership.membership_record import (
    MembershipRecord,
    choose_membership,
    read_membership,
)
from tests.support.net import Net

HOME = Home(Path("nowhere"))
COORDINATOR = KeyPair.generate()
INVITATION = KeyPair.generate()
KNOWN = MembershipRecord(
    swarm="s", coordinator_key=COORDINATOR.public, addresses=("10.0.0.1:5466",), model="m"
)


def make_token(address: str = "10.0.0.9:5466", key: str = COORDINATOR.public) -> JoinToken:
    return JoinToken("s", (address,), key, INVITATION.seed, int(time.time()) + 60)


def test_the_record_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "swarm.json"
    assert read_membership(path) is None
    KNOWN.save(path)
    assert read_membership(path) == KNOWN
    assert KNOWN.endpoints == ("tcp://10.0.0.1:5466",)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match=r"swarm\.json"):
        read_membership(path)


def test_a_new_peer_needs_a_token() -> None:
    assert choose_membership(HOME, None, str(make_token())) == make_token()
    with pytest.raises(UsageError, match="in no swarm"):
        choose_membership(HOME, None, None)


def test_a_member_returns_without_a_token() -> None:
    assert choose_membership(HOME, KNOWN, None) == KNOWN
    with pytest.raises(UsageError, match="molink up"):
        choose_membership(HOME, msgspec.structs.replace(KNOWN, is_founder=True), None)


def test_a_token_of_the_same_swarm_counts() -> None:
    """The coordinator may have forgotten this PC."""
    assert choose_membership(HOME, KNOWN, str(make_token())) == make_token()
    with pytest.raises(UsageError, match="molink up"):
        choose_membership(HOME, msgspec.structs.replace(KNOWN, is_founder=True), str(make_token()))


def test_a_member_does_not_change_swarms_by_accident() -> None:
    with pytest.raises(UsageError, match="molink leave"):
        choose_membership(HOME, KNOWN, str(msgspec.structs.replace(make_token(), swarm="another")))
    # Another PC, with its own key, may lead the same swarm now.
    moved = make_token(key=KeyPair.generate().public)
    assert choose_membership(HOME, KNOWN, str(moved)) == moved


def test_an_expired_token() -> None:
    token = msgspec.structs.replace(make_token(), expires=1)
    with pytest.raises(TokenError, match="expired"):
        choose_membership(HOME, None, str(token))


async def test_joining(net: Net) -> None:
    seen: list[JoinRequest] = []

    def handle(sender: MessageSender, message: JoinRequest, _payload: memoryview | None) -> None:
        seen.append(message)
        server.send(sender.identity, JoinReply(ref=message.ref, swarm="s", peer="p"))

    net.authenticator.allow_peer(INVITATION.public, "invite:1")
    server = net.server(control_codec(), handle)
    token = make_token(f"127.0.0.1:{server.port}", net.keys.public)
    mine = KeyPair.generate()
    membership = await join_swarm(net.context, mine, token, "pc" * 50)
    assert membership.swarm == "s"
    assert membership.coordinator_key == net.keys.public
    assert (seen[0].public_key, seen[0].name) == (mine.public, "pc" * 50)
    signed = seen[0].entry
    assert signed is not None
    check_signature("s", signed)
    entry = signed.decode()
    assert isinstance(entry, JoinEntry)
    assert entry.signer == INVITATION.signer.verify_key
    assert (entry.verify_key, entry.name) == (mine.signer.verify_key, "pc" * 32)
    assert abs(entry.at - time.time()) < 60.0


async def test_another_swarm_replies(net: Net) -> None:
    """A PC with the coordinator's key answers, but for a swarm other than the token's."""

    def handle(sender: MessageSender, message: JoinRequest, _payload: memoryview | None) -> None:
        server.send(sender.identity, JoinReply(ref=message.ref, swarm="s2", peer="p"))

    net.authenticator.allow_peer(INVITATION.public, "invite:1")
    server = net.server(control_codec(), handle)
    token = make_token(f"127.0.0.1:{server.port}", net.keys.public)
    with pytest.raises(WireError, match="swarm s2 replied to a token of swarm s"):
        await join_swarm(net.context, KeyPair.generate(), token, "pc")


async def test_an_unknown_invitation(net: Net) -> None:
    server = net.server(control_codec(), lambda *_: None)
    token = make_token(f"127.0.0.1:{server.port}", net.keys.public)
    with pytest.raises(TokenError, match="was revoked or has expired"):
        await join_swarm(net.context, KeyPair.generate(), token, "pc")


class Refusing:
    """A coordinator that first answers with these errors, and then admits every PC."""

    def __init__(self, net: Net, *errors: MolinkError) -> None:
        self.errors = list(errors)
        net.authenticator.allow_peer(INVITATION.public, "invite:1")
        self.server = net.server(control_codec(), self._handle)
        self.token = make_token(f"127.0.0.1:{self.server.port}", net.keys.public)

    def _handle(
        self, sender: MessageSender, message: JoinRequest, _payload: memoryview | None
    ) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.server.send(sender.identity, JoinReply(ref=message.ref, swarm="s", peer="p"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TokenError("was for one PC"), TokenError),
        (PeerBanned("was for one PC"), PeerBanned),
        (Unavailable("was for one PC"), Unavailable),
    ],
)
async def test_errors_of_the_coordinator_are_raised(
    net: Net, error: MolinkError, kind: type[MolinkError]
) -> None:
    refusing = Refusing(net, error)
    with pytest.raises(kind, match="was for one PC"):
        await join_swarm(net.context, KeyPair.generate(), refusing.token, "pc")


async def test_an_overloaded_coordinator_is_retried(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("molinkd.peer.membership.joining._RETRY_S", 0.01)
    refusing = Refusing(net, Overloaded("too many"), Overloaded("too many"))
    assert (await join_swarm(net.context, KeyPair.generate(), refusing.token, "pc")).swarm == "s"
    assert refusing.errors == []
    monkeypatch.setattr("molinkd.peer.membership.joining._JOIN_TIMEOUT_S", 0.0)
    refusing.errors = [Overloaded("too many")] * 9
    with pytest.raises(Unavailable, match="can't join"):
        await join_swarm(net.context, KeyPair.generate(), refusing.token, "pc")


async def test_a_connection_that_breaks_before_the_reply(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator revokes another PC at that moment, which breaks connections."""

    def handle(sender: MessageSender, message: JoinRequest, _payload: memoryview | None) -> None:
        seen.append(message)
        if len(seen) == 1:
            server.drop_peer("another")
        else:
            server.send(sender.identity, JoinReply(ref=message.ref, swarm="s", peer="p"))

    monkeypatch.setattr("molinkd.peer.membership.joining._RETRY_S", 0.01)
    seen: list[JoinRequest] = []
    net.authenticator.allow_peer(INVITATION.public, "invite:1")
    server = net.server(control_codec(), handle)
    token = make_token(f"127.0.0.1:{server.port}", net.keys.public)
    assert (await join_swarm(net.context, KeyPair.generate(), token, "pc")).swarm == "s"
    assert len(seen) == 2


async def test_a_coordinator_with_another_key(net: Net) -> None:
    server = net.server(control_codec(), lambda *_: None)
    token = make_token(f"127.0.0.1:{server.port}", KeyPair.generate().public)
    with pytest.raises(TokenError, match="another swarm"):
        await join_swarm(net.context, KeyPair.generate(), token, "pc")


async def test_ways_are_tried_side_by_side(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses that don't answer don't delay the join."""
    monkeypatch.setattr("molinkd.peer.membership.joining._CONNECT_TIMEOUT_S", 1e6)
    monkeypatch.setattr("molinkd.peer.membership.joining._JOIN_TIMEOUT_S", 1e6)
    good = Refusing(net).token
    dead = ("127.77.0.1:9", "127.77.0.2:9", "127.77.0.3:9")
    token = msgspec.structs.replace(good, addresses=(*dead, *good.addresses))
    joined = await join_swarm(net.context, KeyPair.generate(), token, "pc")
    assert joined.addresses == token.addresses


async def test_each_way_says_why_it_failed(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molinkd.peer.membership.joining._JOIN_TIMEOUT_S", 0.2)
    monkeypatch.setattr("molinkd.peer.membership.joining._CONTACT_DELAY_S", 0.0)
    token = msgspec.structs.replace(
        make_token("127.77.0.1:9"),
        contact_points=(ContactPoint(net.keys.public, ("127.77.0.2:9",)),),
    )
    with pytest.raises(Unavailable) as caught:
        await join_swarm(net.context, KeyPair.generate(), token, "pc")
    text = str(caught.value)
    assert "127.77.0.1:9 refuses connections, 127.77.0.2:9 refuses connections" in text
    assert "`molink rendezvous`" in text
    assert "\n" not in text


async def test_no_reply(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molinkd.peer.membership.joining._JOIN_TIMEOUT_S", 0.2)
    with pytest.raises(Unavailable, match="can't join"):
        await join_swarm(net.context, KeyPair.generate(), make_token("127.0.0.1:9"), "pc")


async def test_a_peer_redirects_a_guest_to_the_coordinator(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator that the token names is gone, and another PC leads."""
    monkeypatch.setattr("molinkd.peer.membership.joining._CONTACT_DELAY_S", 0.0)

    def admit(sender: MessageSender, message: JoinRequest, _payload: memoryview | None) -> None:
        coordinator.send(sender.identity, JoinReply(ref=message.ref, swarm="s", peer="me"))

    def send_on(sender: MessageSender, message: JoinRequest, _payload: memoryview | None) -> None:
        where = (f"127.0.0.1:{coordinator.port}",)
        member.send(
            sender.identity,
            JoinRedirect(ref=message.ref, coordinator_key=net.keys.public, addresses=where),
        )

    coordinator = net.server(control_codec(), admit)
    member = net.server(control_codec(), send_on)
    net.authenticator.allow_peer(INVITATION.public, "invite:1")
    token = msgspec.structs.replace(
        make_token("127.0.0.1:1"),
        contact_points=(ContactPoint(net.keys.public, (f"127.0.0.1:{member.port}",)),),
    )
    joined = await join_swarm(net.context, KeyPair.generate(), token, "pc")
    assert joined.addresses == (f"127.0.0.1:{coordinator.port}",)


async def test_a_hostile_contact_point_can_not_answer_for_the_coordinator(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contact point claims that this PC was revoked, before the slow coordinator answers."""
    monkeypatch.setattr("molinkd.peer.membership.joining._CONTACT_DELAY_S", 0.0)

    async def admit(sender: MessageSender, message: JoinRequest, _: memoryview | None) -> None:
        await asked.wait()
        coordinator.send(sender.identity, JoinReply(ref=message.ref, swarm="s", peer="me"))

    def refuse(*_: object) -> None:
        asked.set()
        raise PeerBanned("this PC was removed")

    asked = asyncio.Event()
    coordinator = net.server(control_codec(), admit)
    member = net.server(control_codec(), refuse)
    net.authenticator.allow_peer(INVITATION.public, "invite:1")
    token = msgspec.structs.replace(
        make_token(f"127.0.0.1:{coordinator.port}", net.keys.public),
        contact_points=(ContactPoint(net.keys.public, (f"127.0.0.1:{member.port}",)),),
    )
    joined = await join_swarm(net.context, KeyPair.generate(), token, "pc")
    assert joined.addresses == token.addresses


@pytest.mark.parametrize("answer", [PeerBanned("this PC was removed"), None])
async def test_a_ban_is_checked_again(net: Net, answer: MolinkError | None) -> None:
    def handle(sender: MessageSender, message: StatusRequest, _payload: memoryview | None) -> None:
        if answer is not None:
            raise answer
        server.send(
            sender.identity, StatusReply(ref=message.ref, payload=Payload("u8", (2,))), b"{}"
        )

    mine = net.member("pc")
    server = net.server(control_codec(), handle)
    known = MembershipRecord(
        swarm="s",
        coordinator_key=net.keys.public,
        addresses=(f"127.0.0.1:{server.port}",),
        is_banned=True,
    )
    if answer is None:
        assert not (await renew_membership(net.context, mine, known)).is_banned
        return
    with pytest.raises(PeerBanned, match="was removed"):
        await renew_membership(net.context, mine, known)


async def test_a_ban_by_an_ended_swarm_stays(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molinkd.peer.membership.joining._RENEW_TIMEOUT_S", 0.1)
    known = msgspec.structs.replace(KNOWN, addresses=("127.0.0.1:1",), is_banned=True)
    with pytest.raises(PeerBanned):
        await renew_membership(net.context, KeyPair.generate(), known)
