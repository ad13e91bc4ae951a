"""A peer in its swarm, with a fake coordinator."""

import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import msgpack, structs

from molink.facts.device import Device
from molink.facts.identity import derive_peer_id
from molink.swarm.election.replica import Replica
from molink.swarm.membership.banned_peers import BannedPeers
from molink.wire.messages.admin import (
    AppendEntries,
    LogReply,
    LogRequest,
    RevokeReply,
    RevokeRequest,
    StatusReply,
    StatusRequest,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage, DoneReply
from molink.wire.messages.election import LeaderHeartbeat, StateReplica
from molink.wire.messages.instructions import (
    Notice,
    PeerInfo,
    PeerRemoved,
    Revoked,
    Route,
    StageAddress,
    Welcome,
)
from molink.wire.messages.peer_reports import PeerReport
from molink.wire.messages.worker_pipe import PeerBlocked
from molink.wire.protocol import PROTOCOL
from molink.wire.sockets.server import MessageSender, Server
from molinkd.peer.agent import readiness
from molinkd.peer.agent.device_probe import MeasuredDevice
from molinkd.peer.artifacts.model_repository import ModelFiles, ModelRepository
from molinkd.peer.control_service import ControlService
from molinkd.peer.election.leadership import Leadership, ReplicaFile
from molinkd.peer.home import Home
from molinkd.peer.launch import (
    AnyDaemonEvent,
    ModelUnavailableEvent,
    ProblemReportedEvent,
    TransfersChangedEvent,
)
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.node import Node
from molinkd.peer.resources import Resources
from molinkd.peer.settings import Settings
from tests.support.membership import LogBuilder, TestPeer
from tests.support.models import MakeModel
from tests.support.net import Net

OTHER = TestPeer(name="tv")
STATUS = {
    "peers": [{"id": OTHER.peer, "name": "tv"}],
    "trouble": "1 of 2 are there",
}


class Scene:
    """A node whose PC the founder has made an owner, and a coordinator with the log."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.coordinator = net.server(control_codec(), self._handle)
        self.events: list[AnyDaemonEvent] = []
        keys = net.member()
        self.founder, self.me = TestPeer(name="founder"), TestPeer(keys)
        self.members, self.revision = LogBuilder(self.founder), 0
        self.members.admit(self.founder, self.me)
        self.members.own(self.founder, self.me)
        self.swarm = self.members.log.swarm
        self.control = net.server(control_codec(), lambda *_: None)
        resources = Resources(
            settings=Settings(name="pc", stage="none"),
            home=Home(folder).create_folders(),
            keys=keys,
            context=net.context,
            authenticator=net.authenticator,
            server=self.control,
            repository=ModelRepository(),
            banned_peers=BannedPeers(),
            announce=self.events.append,
        )
        address = f"127.0.0.1:{self.coordinator.port}"
        membership = MembershipRecord(
            swarm=self.swarm, coordinator_key=net.keys.public, addresses=(address,)
        )
        self.shut_out = 0
        replica = ReplicaFile(resources.home.replica, self.swarm)
        self.leadership = Leadership(resources, replica, membership)
        self.node = Node(resources, self.leadership, lambda: "http://e", self._revoked)
        self.node.start(MeasuredDevice(Device(kind="cpu", name="x", memory=0), bf16=False))
        self.identity = b""

    def _revoked(self) -> None:
        self.shut_out += 1

    def _handle(
        self,
        sender: MessageSender,
        message: PeerReport | LogRequest | AppendEntries | StatusRequest,
        _payload: memoryview | None,
    ) -> None:
        send = self.coordinator.send
        match message:
            case PeerReport() if sender.identity != self.identity:
                self.identity = sender.identity
                send(sender.identity, LeaderHeartbeat(term=0, leader="first", protocol=PROTOCOL))
                send(sender.identity, Welcome(swarm=self.swarm, peer=sender.peer_id))
                self.send_state()
            case StatusRequest():
                text = json.dumps(STATUS).encode()
                payload = Payload("u8", (len(text),))
                send(sender.identity, StatusReply(ref=message.ref, payload=payload), text)
            case LogRequest():
                text = msgpack.encode(self.members.log.entries)
                payload = Payload("u8", (len(text),))
                send(sender.identity, LogReply(ref=message.ref, payload=payload), text)
            case AppendEntries():
                self.members.log = self.members.log.with_entries(message.entries)
                send(sender.identity, DoneReply(ref=message.ref))

    def send_state(self) -> None:
        """Send a replica with the log as it is now."""
        self.revision += 1
        log = self.members.log
        replica = Replica(self.swarm, "s", 8, 0, self.revision, (), log, (), (), (), (0, 0))
        data = replica.encode()
        payload = Payload("u8", (len(data),))
        self.coordinator.send(self.identity, StateReplica(payload=payload), data)

    def introduce(self, peer: TestPeer, info: PeerInfo) -> None:
        """Admit a peer, and announce it."""
        self.members.admit(self.founder, peer)
        self.send_state()
        self.coordinator.send(self.identity, info)

    def claim_revoked(self, proof: bytes) -> None:
        """Tell the node that it was revoked."""
        message = Revoked(swarm=self.swarm, payload=Payload("u8", (len(proof),)))
        self.coordinator.send(self.identity, message, proof)


@pytest.fixture
async def scene(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(readiness, "REASON_DELAY_S", 0.01)
    scene = Scene(net, tmp_path)
    await net.until(lambda: scene.node.session.is_welcomed)
    yield scene
    await scene.node.close()
    await scene.leadership.close()


async def test_the_status_shows_banned_peers(scene: Scene, net: Net) -> None:
    assert json.loads(await scene.node.query_status()) == STATUS
    told = PeerBlocked(epoch=1, peer=OTHER.peer, reason="nonsense", is_previous_stage=False)
    scene.node._stages.supervisor._on_message(1, told)
    (shown,) = json.loads(await scene.node.query_status())["banned_peers"]
    assert (shown["name"], shown["banned_by"], shown["reason"]) == (
        "tv",
        "a stage of this PC",
        "nonsense",
    )
    assert "control_members_blocked" in scene.node.backend.collect_metrics().counters


async def test_the_reason_of_an_unready_pipeline_is_logged(
    scene: Scene, net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    route = Route(
        pipeline="p1", epoch=1, model="m", is_ready=False, scheduler=None, max_model_len=0
    )
    scene.coordinator.send(scene.identity, route)
    await net.until(lambda: "m is not ready: 1 of 2 are there" in caplog.text)


async def test_an_unavailable_model_is_reported_once(scene: Scene, net: Net) -> None:
    route = Route(
        pipeline="p1", epoch=1, model="m", is_ready=False, scheduler=None, max_model_len=0
    )
    for reason in ("one", "one", "", "two"):
        scene.coordinator.send(scene.identity, structs.replace(route, reason=reason))
    await net.until(lambda: ModelUnavailableEvent(model="m", reason="two") in scene.events)
    told = [event.reason for event in scene.events if isinstance(event, ModelUnavailableEvent)]
    assert told == ["one", "two"]
    assert scene.node._schedulers.unready_reason("m") == "two"


async def test_requests_go_to_members_only(scene: Scene, net: Net) -> None:
    """The coordinator names a PC that no member admitted, and a member with another PC's key."""
    planted, member = TestPeer(), TestPeer()
    scene.members.admit(scene.founder, member)
    scene.send_state()

    def send_route(pipeline: str, peer: TestPeer, key: str) -> None:
        stage = StageAddress(peer=peer.peer, public_key=key, addresses=("127.0.0.1",), port=1)
        route = Route(
            pipeline=pipeline, epoch=1, model="m", is_ready=True, scheduler=stage, max_model_len=8
        )
        scene.coordinator.send(scene.identity, route)

    send_route("p1", planted, planted.keys.public)
    send_route("p2", member, planted.keys.public)
    send_route("p3", member, member.keys.public)
    await net.until(lambda: scene.node._schedulers.routes)
    assert [route.pipeline for route in scene.node._schedulers.routes] == ["p3"]
    # The member's entry arrives after the route.
    scene.members.admit(scene.founder, planted)
    scene.send_state()
    await net.until(lambda: len(scene.node._schedulers.routes) == 2)
    assert {route.pipeline for route in scene.node._schedulers.routes} == {"p1", "p3"}


async def test_a_pipeline_missing_in_a_new_session_is_removed(scene: Scene, net: Net) -> None:
    """A restarted coordinator doesn't know which pipelines ended meanwhile."""

    def pipelines() -> set[str]:
        return {route.pipeline for route in scene.node._schedulers.routes}

    for pipeline in ("p1", "p2"):
        route = Route(
            pipeline=pipeline, epoch=1, model="m", is_ready=False, scheduler=None, max_model_len=0
        )
        scene.coordinator.send(scene.identity, route)
    await net.until(lambda: pipelines() == {"p1", "p2"})
    scene.coordinator.send(scene.identity, Welcome(swarm=scene.swarm, peer="x"))
    scene.coordinator.send(scene.identity, structs.replace(route, is_ready=True))
    await net.until(lambda: pipelines() == {"p2"})


async def test_revoking_leaves_time_for_the_reply(scene: Scene, net: Net) -> None:
    """A revoked peer's messages are ignored at once; its connections are closed a little later."""
    peer, key = OTHER.peer, OTHER.keys.public
    member = PeerInfo(peer=peer, name="tv", public_key=key, addresses=(), control_port=0)
    scene.introduce(OTHER, member)
    await net.until(lambda: net.authenticator.is_allowed(peer))
    reply, _ = await scene.node.forward_request(RevokeRequest(ref=0, target=peer))
    assert isinstance(reply, RevokeReply)
    assert scene.members.standing(OTHER) == ["revoked"]
    scene.coordinator.send(scene.identity, PeerRemoved(peer=peer))
    await net.until(lambda: not net.authenticator.is_allowed(peer))
    assert scene.control.counters.rebuilds == 0
    await net.until(lambda: scene.control.counters.rebuilds == 1)


async def test_notices_of_the_coordinator_are_reported(scene: Scene, net: Net) -> None:
    for text in ("--stage 7-99 is odd", ""):
        scene.coordinator.send(scene.identity, Notice(text=text))
    scene.members.revoke(scene.founder, scene.me)
    scene.claim_revoked(msgpack.encode(scene.members.log.entries))
    await net.until(lambda: scene.shut_out == 1)
    told = [event.text for event in scene.events if isinstance(event, ProblemReportedEvent)]
    assert told == ["--stage 7-99 is odd"]


def proof_of(members: LogBuilder) -> bytes:
    return msgpack.encode(members.log.entries)


def _no_log(_: Scene) -> bytes:
    return b""


def _no_entries(_: Scene) -> bytes:
    return msgpack.encode(())


def _nobody_revoked(scene: Scene) -> bytes:
    return proof_of(scene.members)


def _another_revoked(scene: Scene) -> bytes:
    scene.members.admit(scene.founder, OTHER)
    scene.members.revoke(scene.founder, OTHER)
    return proof_of(scene.members)


def _by_a_member(scene: Scene) -> bytes:
    scene.members.admit(scene.founder, OTHER)
    scene.members.revoke(OTHER, scene.me)
    return proof_of(scene.members)


def _by_an_owner_below(scene: Scene) -> bytes:
    scene.members.admit(scene.founder, OTHER)
    scene.members.own(scene.me, OTHER)
    scene.members.revoke(OTHER, scene.me)
    return proof_of(scene.members)


def _in_another_swarm(scene: Scene) -> bytes:
    other = LogBuilder(OTHER)
    other.admit(OTHER, scene.me)
    other.revoke(OTHER, scene.me)
    return proof_of(other)


def _without_a_signature(scene: Scene) -> bytes:
    said = scene.members.revoke(scene.founder, scene.me)
    entries = [one for one in scene.members.log.entries if one != said]
    return msgpack.encode([*entries, structs.replace(said, signature=bytes(64))])


def _without_the_readmission(scene: Scene) -> bytes:
    """A log in which this PC is revoked, although a later entry readmits it."""
    said = scene.members.revoke(scene.founder, scene.me)
    before = proof_of(scene.members)
    scene.members.readmit(scene.founder, said)
    scene.send_state()
    return before


@pytest.mark.parametrize(
    "make_proof",
    [
        _no_log,
        _no_entries,
        _nobody_revoked,
        _another_revoked,
        _by_a_member,
        _by_an_owner_below,
        _in_another_swarm,
        _without_a_signature,
        _without_the_readmission,
    ],
)
async def test_a_coordinator_shuts_nobody_out(
    scene: Scene, net: Net, make_proof: Callable[[Scene], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Only a log with an owner's revocation of this PC ends its membership."""
    scene.claim_revoked(make_proof(scene))
    scene.coordinator.send(scene.identity, Notice(text="read by now"))
    await net.until(lambda: ProblemReportedEvent(text="read by now") in scene.events)
    assert scene.shut_out == 0
    assert "the coordinator claims that this PC was shut out" in caplog.text
    assert scene.node.session.is_welcomed


async def test_whoever_a_revoked_pc_let_in_is_shut_out_too(scene: Scene, net: Net) -> None:
    parent = TestPeer(name="parent")
    swarm = LogBuilder(scene.founder)
    swarm.admit(scene.founder, parent)
    swarm.admit(parent, scene.me)
    swarm.revoke(scene.founder, parent)
    scene.leadership.replica.replica = None  # as on a PC that the founder itself admitted
    scene.claim_revoked(proof_of(swarm))
    await net.until(lambda: scene.shut_out == 1)


async def test_a_join_that_the_coordinator_hides_does_not_end(scene: Scene, net: Net) -> None:
    """An entry that ends an invitation lists those that joined by it, from this PC's own log."""
    guest = TestPeer(name="guest")
    invited, _ = scene.members.invite(scene.me, uses=2)
    hiding = scene.members.log
    scene.members.join(invited, guest)
    whole = scene.members.log
    scene.send_state()
    held = scene.leadership.replica
    await net.until(lambda: held.replica is not None and held.replica.log.is_member(guest.peer))
    scene.members.log = hiding
    (invitation,) = hiding.invitations
    await scene.node.forward_request(RevokeRequest(ref=0, target=invitation.id))
    after = whole.merge_log(scene.members.log)
    assert [one.is_ended for one in after.invitations] == [True]
    assert after.is_member(guest.peer)


async def test_the_sweep_restarts_with_each_session(scene: Scene, net: Net) -> None:
    first = scene.node._peers._sweep
    assert first is not None
    scene.coordinator.send(scene.identity, Welcome(swarm=scene.swarm, peer="x"))
    await net.until(lambda: scene.node._peers._sweep is not first)
    assert first.cancelled()


class AlteredFiles(ModelFiles):
    """Has the right manifest, but an altered chat template."""

    def read_chunk(self, name: str, index: int) -> bytes:
        data = super().read_chunk(name, index)
        return data.replace(b"im_start", b"im_evil_")


def serve_files(
    scene: Scene, net: Net, folder: Path, kind: type[ModelFiles]
) -> tuple[PeerInfo, ModelFiles]:
    """A member that offers the model in ``folder`` on its own control socket."""
    repository = ModelRepository()
    made = repository.add_model("m", folder)
    model_files = kind(made.folder, made.manifest, made.ranges, made.stamps)
    repository.require_model = lambda root: model_files  # type: ignore[method-assign]
    keys = net.member()
    me = derive_peer_id(keys.public)
    commands: Any = None
    leader: Any = None
    service = ControlService(me, repository, commands, leader)
    server: Server[ControlMessage] = Server(
        net.context,
        keys,
        control_codec(),
        net.authenticator,
        service.handle_message,
        permits=service.is_permitted,
    )
    service.send = server.send
    net.at_end(server.close)
    server.bind("127.0.0.1", (0, 1))
    member = PeerInfo(
        peer=me,
        name=kind.__name__,
        public_key=keys.public,
        addresses=("127.0.0.1",),
        control_port=server.port,
    )
    scene.introduce(TestPeer(keys), member)
    return member, model_files


async def test_a_source_that_alters_the_chat_template_is_banned(
    scene: Scene, net: Net, tmp_path: Path, make_model: MakeModel
) -> None:
    folder = make_model(tmp_path / "model")
    liar, model_files = serve_files(scene, net, folder, AlteredFiles)
    honest, _ = serve_files(scene, net, folder, ModelFiles)
    route = Route(
        pipeline="p1",
        epoch=1,
        model="m",
        root=model_files.manifest.root,
        sources=(liar.peer, honest.peer),
        is_ready=False,
        scheduler=None,
        max_model_len=0,
    )
    scene.coordinator.send(scene.identity, route)
    await net.until(lambda: scene.node.backend.list_models())
    (model,) = scene.node.backend.list_models()
    for name in ("tokenizer_config.json", "tokenizer.json"):
        assert (model.folder / name).read_bytes() == (folder / name).read_bytes()
    (shown,) = json.loads(await scene.node.query_status())["banned_peers"]
    assert (shown["peer"], shown["banned_by"]) == (liar.peer, "this PC, as a source of models")
    assert "is not what the model's owner has there" in shown["reason"]
    scene.coordinator.send(scene.identity, PeerRemoved(peer=liar.peer))
    await net.until(lambda: scene.node._peers.book.get_peer(liar.peer) is None)
    assert "banned_peers" not in json.loads(await scene.node.query_status())


class SlowFiles(ModelFiles):
    """Sends the tokenizer once ``may`` is set."""

    may = threading.Event()

    def read_chunk(self, name: str, index: int) -> bytes:
        if name == "tokenizer.json":
            self.may.wait()
        return super().read_chunk(name, index)


async def test_transfers_are_announced_and_reported(
    scene: Scene, net: Net, tmp_path: Path, make_model: MakeModel
) -> None:
    slow, model_files = serve_files(scene, net, make_model(tmp_path / "model"), SlowFiles)
    route = Route(
        pipeline="p1",
        epoch=1,
        model="m",
        root=model_files.manifest.root,
        sources=(slow.peer,),
        is_ready=False,
        scheduler=None,
        max_model_len=0,
    )
    scene.coordinator.send(scene.identity, route)
    told = [TransfersChangedEvent()]

    def coming() -> bool:
        told[:] = [
            event for event in scene.events if isinstance(event, TransfersChangedEvent)
        ] or told
        return bool(told[-1].transfers) and told[-1].transfers[0].done > 0

    await net.until(coming)
    try:
        (state,) = told[-1].transfers
        assert (state.model, state.source) == ("m", "SlowFiles")
        assert state.done < state.total
        (reported,) = scene.node._build_report().transfers
        assert reported.source == "SlowFiles"
    finally:
        SlowFiles.may.set()
    await net.until(lambda: scene.events[-1] == TransfersChangedEvent())
