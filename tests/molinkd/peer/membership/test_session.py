"""The coordinator session, with a fake coordinator."""

from typing import Any

import msgspec
import pytest

from molink import __version__
from molink.errors import PortInUse, RequestError, StateError, Unavailable, UsageError
from molink.facts.device import Device
from molink.swarm.membership.join_token import JoinToken
from molink.wire.messages.admin import (
    AppendEntries,
    InviteReply,
    InviteRequest,
    LogReply,
    LogRequest,
    RevokeRequest,
    SwitchModel,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import DoneReply
from molink.wire.messages.election import LeaderHeartbeat
from molink.wire.messages.instructions import PeerInfo, Welcome
from molink.wire.messages.load import MAX_REQUESTS, PeerLoad, RequestLoad, SchedulerLoad
from molink.wire.messages.peer_reports import Goodbye, PeerReport, StageReady
from molink.wire.protocol import PROTOCOL
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender, Server
from molinkd.peer.membership import session as session_module
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.membership.session import CoordinatorSession
from tests.support.membership import LogBuilder, TestPeer
from tests.support.net import Net

REPORT = PeerReport(
    name="pc",
    version="0",
    addresses=("127.0.0.1",),
    control_port=1,
    api_address="",
    daemon_pid=1,
    stage="auto",
    device=Device(kind="cpu", name="x", memory=1),
    models=(),
)
READY = StageReady(pipeline="p1", epoch=1, stage=0)


class FakeCoordinator:
    """Welcomes every peer that reports, and records its messages."""

    def __init__(self, net: Net) -> None:
        self.got: list[object] = []
        self.identity, self.term, self.protocol = b"", 0, PROTOCOL
        #: The membership log, and the error with which entries are rejected.
        self.members, self.failure = LogBuilder(), ""
        self.server = net.server(control_codec(), self._handle)

    def _handle(self, sender: MessageSender, message: Any, _payload: memoryview | None) -> None:
        self.got.append(message)
        if isinstance(message, PeerReport) and sender.identity != self.identity:
            self.identity = sender.identity
            noted = LeaderHeartbeat(
                term=self.term, leader="first", version="2", protocol=self.protocol
            )
            self.server.send(sender.identity, noted)
            self.server.send(sender.identity, Welcome(swarm="s", peer=sender.peer_id))
        elif isinstance(message, Goodbye):
            self.server.send(sender.identity, DoneReply(ref=message.ref))
        elif isinstance(message, LogRequest):
            text = msgspec.msgpack.encode(self.members.log.entries)
            reply = LogReply(
                ref=message.ref, payload=Payload("u8", (len(text),)), addresses=("10.0.0.1:5466",)
            )
            self.server.send(sender.identity, reply, text)
        elif isinstance(message, AppendEntries):
            if self.failure:
                raise Unavailable(self.failure)
            self.members.log = self.members.log.with_entries(message.entries)
            self.server.send(sender.identity, DoneReply(ref=message.ref))
        elif isinstance(message, SwitchModel):
            if not message.model:
                raise RequestError("no model has that name", "model")
            self.server.send(sender.identity, DoneReply(ref=message.ref))


def make_session(
    net: Net, keys: KeyPair, port: int, recorder: list[object], term: int = 0, swarm: str = "s"
) -> CoordinatorSession:
    """A session that ignores coordinators of terms before ``term``."""
    membership = MembershipRecord(
        swarm=swarm, coordinator_key=net.keys.public, addresses=(f"127.0.0.1:{port}",)
    )
    return CoordinatorSession(
        net.context,
        keys,
        membership,
        lambda: REPORT,
        lambda message, _: recorder.append(message),
        lambda: recorder.append("welcome"),
        recorder.append,
        lambda said: said.term >= term,
        lambda: recorder.append("cut"),
    )


async def test_reports_are_sent_periodically(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "REPORT_INTERVAL_S", 0.02)
    coordinator, recorder = FakeCoordinator(net), []
    session = make_session(net, net.member(), coordinator.server.port, recorder)
    session.send_message(READY)
    assert session.failure_reason
    session.start()
    await net.until(lambda: len(coordinator.got) >= 3)
    assert coordinator.got[:3] == [REPORT, REPORT, REPORT]
    await net.until(lambda: recorder == ["welcome"])
    assert session.failure_reason == ""
    session.send_message(READY)
    await net.until(lambda: READY in coordinator.got)
    await session.close()


async def test_an_incompatible_coordinator_is_not_followed(net: Net) -> None:
    coordinator, recorder = FakeCoordinator(net), []
    coordinator.protocol = PROTOCOL + 1
    session = make_session(net, net.member(), coordinator.server.port, recorder)
    session.start()
    await net.until(lambda: recorder)
    for part in (
        f"molink {__version__} (protocol {PROTOCOL})",
        f"the swarm molink 2 (protocol {PROTOCOL + 1})",
    ):
        assert part in recorder[0]
    coordinator.server.send(
        coordinator.identity, LeaderHeartbeat(term=0, leader="first", protocol=PROTOCOL + 1)
    )
    await net.until(lambda: "of an unknown version" in session.failure_reason)
    assert not session.is_welcomed
    assert "welcome" not in recorder
    # The coordinator was updated, too.
    coordinator.identity, coordinator.protocol = b"", PROTOCOL
    await net.until(lambda: session.is_welcomed)
    assert session.failure_reason == ""
    await session.close()


async def test_an_oversized_report_is_sent_without_its_load(net: Net) -> None:
    """An oversized report loses its load, which is only displayed, and the peer stays online."""
    coordinator, recorder = FakeCoordinator(net), []
    long = msgspec.structs.replace(REPORT, models=("m" * 250,) * 14)
    requests = (RequestLoad("o" * 32, "decode", 1),) * MAX_REQUESTS
    load = PeerLoad((), (SchedulerLoad("p1", requests=requests),))
    session = make_session(net, net.member(), coordinator.server.port, recorder)
    session._report = lambda: msgspec.structs.replace(long, load=load)
    session.start()
    await net.until(lambda: len(coordinator.got) >= 1)
    assert coordinator.got[0] == long
    await session.close()


async def test_messages_and_requests(net: Net) -> None:
    coordinator, recorder = FakeCoordinator(net), []
    session = make_session(net, net.member(), coordinator.server.port, recorder)
    session.start()
    await net.until(lambda: session.is_welcomed)
    member = PeerInfo(peer="p", name="n", public_key=net.keys.public, addresses=(), control_port=0)
    coordinator.server.send(coordinator.identity, member)
    await net.until(lambda: recorder == ["welcome", member])
    reply = await session.request(SwitchModel(ref=0, model="m"))
    assert isinstance(reply, DoneReply)
    with pytest.raises(RequestError, match="no model"):
        await session.request(SwitchModel(ref=0, model=""))
    await session.close()


async def test_requests_about_members_are_signed(net: Net) -> None:
    """The coordinator stores what this PC signs, and never sees the user's request."""
    coordinator, owner = FakeCoordinator(net), TestPeer(net.member())
    coordinator.members = LogBuilder(owner)
    log = coordinator.members.log
    session = make_session(net, owner.keys, coordinator.server.port, [], swarm=log.swarm)
    session.start()
    await net.until(lambda: session.is_welcomed)
    reply, payload = await session.request_payload(InviteRequest(ref=0, ttl=60.0, uses=2))
    assert isinstance(reply, InviteReply)
    assert payload == b""
    (invitation,) = coordinator.members.log.invitations
    assert (invitation.creator, invitation.entry.max_uses) == (owner.peer, 2)
    token = JoinToken.parse(reply.token, 0.0)
    assert (token.swarm, token.coordinator_key) == (log.swarm, net.keys.public)
    assert token.addresses == ("10.0.0.1:5466",)
    assert KeyPair.from_seed(token.secret_key).signer.verify_key == invitation.entry.verify_key
    guest = TestPeer()
    coordinator.members.join(KeyPair.from_seed(token.secret_key), guest)
    await session.request(RevokeRequest(ref=0, target=guest.peer))
    assert coordinator.members.standing(guest) == ["revoked"]
    asked = {type(one) for one in coordinator.got} - {PeerReport}
    assert asked == {LogRequest, AppendEntries}
    # Errors found here and at the coordinator reach the user.
    with pytest.raises(UsageError, match="-1"):
        await session.request(InviteRequest(ref=0, ttl=-1.0))
    coordinator.failure = "the log is full"
    with pytest.raises(Unavailable, match="the log is full"):
        await session.request(InviteRequest(ref=0))
    await session.close()


async def test_the_log_of_another_swarm_is_not_signed_for(net: Net) -> None:
    """A coordinator that shows another swarm's log gets no signature for its own."""
    coordinator, owner = FakeCoordinator(net), TestPeer(net.member())
    coordinator.members = LogBuilder(owner, TestPeer(name="another"))
    mine = LogBuilder(owner).log
    session = make_session(net, owner.keys, coordinator.server.port, [], swarm=mine.swarm)
    session.start()
    await net.until(lambda: session.is_welcomed)
    with pytest.raises(StateError, match="founding of another swarm"):
        await session.request(InviteRequest(ref=0))
    assert not any(isinstance(one, AppendEntries) for one in coordinator.got)
    await session.close()


async def test_nothing_is_sent_after_the_goodbye(net: Net) -> None:
    coordinator, recorder = FakeCoordinator(net), []
    session = make_session(net, net.member(), coordinator.server.port, recorder)
    session.start()
    await net.until(lambda: session.is_welcomed)
    await session.send_goodbye()
    assert isinstance(coordinator.got[-1], Goodbye)
    said = len(coordinator.got)
    session.report_now()
    session.send_message(READY)
    await session.request(SwitchModel(ref=0, model="m"))
    assert not {type(one) for one in coordinator.got[said:]} & {PeerReport, StageReady}
    await session.close()


async def test_an_ignored_coordinator_with_a_higher_term_is_reconnected(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "REPORT_INTERVAL_S", 0.02)
    coordinator, recorder = FakeCoordinator(net), []
    session = make_session(net, net.member(), coordinator.server.port, recorder, term=2)
    session.start()
    await net.until(lambda: len(coordinator.got) >= 3)
    assert not session.is_welcomed
    first, coordinator.term = coordinator.identity, 2
    coordinator.server.send(first, LeaderHeartbeat(term=2, leader="first", protocol=PROTOCOL))
    await net.until(lambda: session.is_welcomed)
    assert coordinator.identity != first
    await session.close()


async def test_a_welcome_of_a_replaced_connection_is_ignored(net: Net) -> None:
    coordinator, recorder = FakeCoordinator(net), []
    session = make_session(net, net.member(), coordinator.server.port, recorder)
    session.start()
    await net.until(lambda: session.is_welcomed)
    session._client._on_disconnected()
    session._handle_message(Welcome(swarm="s", peer="pc"), None)
    assert not session.is_welcomed
    assert recorder == ["welcome", "cut"]
    await session.close()


async def test_it_reconnects(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "REPORT_INTERVAL_S", 0.05)
    coordinator, recorder = FakeCoordinator(net), []
    session = make_session(net, net.member(), coordinator.server.port, recorder)
    session.start()
    await net.until(lambda: session.is_welcomed)
    port = coordinator.server.port
    await coordinator.server.close()
    await net.until(lambda: not session.is_welcomed)
    assert session.failure_reason
    again = FakeCoordinator.__new__(FakeCoordinator)
    again.got, again.identity, again.term, again.protocol = [], b"", 0, PROTOCOL
    again.server = Server(net.context, net.keys, control_codec(), net.authenticator, again._handle)
    await _bind(net, again.server, port)
    await net.until(lambda: recorder == ["welcome", "cut", "welcome"])
    await session.close()
    await again.server.close()


async def _bind(net: Net, server: Server, port: int) -> None:
    def bound() -> bool:
        try:
            server.bind("127.0.0.1", (port, port + 1))
        except PortInUse:
            return False
        return True

    await net.until(bound)


async def test_a_rejected_peer_is_told(net: Net) -> None:
    coordinator, recorder = FakeCoordinator(net), []
    session = make_session(net, KeyPair.generate(), coordinator.server.port, recorder)
    for number in range(session_module.MAX_REFUSALS):
        assert recorder == []
        session._on_refusal(f"{number}")
    session._on_refusal("more")
    assert recorder == ["3"], "once, when it lasts"
    session.start()
    await net.until(lambda: "doesn't know this PC" in session.failure_reason)
    await session.close()


async def test_a_coordinator_of_an_earlier_term_is_not_followed(net: Net) -> None:
    coordinator, recorder = FakeCoordinator(net), []
    session = make_session(net, net.member(), coordinator.server.port, recorder, term=5)
    session.start()
    await net.until(lambda: len(coordinator.got) >= 2)
    assert (recorder, session.is_welcomed) == ([], False)
    await session.close()


async def test_it_follows_the_coordinator_to_a_new_address(net: Net) -> None:
    first, second, recorder = FakeCoordinator(net), FakeCoordinator(net), []
    session = make_session(net, net.member(), first.server.port, recorder)
    session.start()
    await net.until(lambda: session.is_welcomed)
    place = MembershipRecord(
        swarm="s",
        coordinator_key=net.keys.public,
        addresses=(f"127.0.0.1:{second.server.port}",),
    )
    session.follow_coordinator(place)
    await net.until(lambda: session.is_welcomed)
    assert REPORT in second.got
    session.follow_coordinator(place)  # it is connected there already
    assert session.is_welcomed
    await session.close()
