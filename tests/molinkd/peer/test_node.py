"""A peer in its swarm, with a fake coordinator."""

import json
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from molink.facts.device import Device
from molink.facts.identity import derive_peer_id
from molink.swarm.membership.banned_peers import BannedPeers
from molink.wire.messages.admin import RevokeRequest, StatusReply, StatusRequest
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage, DoneReply
from molink.wire.messages.election import LeaderHeartbeat
from molink.wire.messages.instructions import (
    Notice,
    PeerInfo,
    PeerRemoved,
    Revoked,
    Route,
    Welcome,
)
from molink.wire.messages.peer_reports import PeerReport
from molink.wire.messages.worker_pipe import PeerBlocked
from molink.wire.protocol import PROTOCOL
from molink.wire.sockets.key_pair import KeyPair
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
from tests.support.models import MakeModel
from tests.support.net import Net

OTHER = KeyPair.generate()
STATUS = {
    "peers": [{"id": derive_peer_id(OTHER.public), "name": "tv"}],
    "trouble": "1 of 2 are there",
}


class Scene:
    """A node, its coordinator, and what was asked of that."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.revoked: list[str] = []
        self.coordinator = net.server(control_codec(), self._handle)
        self.events: list[AnyDaemonEvent] = []
        keys = net.member()
        self.control = net.server(control_codec(), lambda *_: None)
        resources = Resources(
            settings=Settings(name="pc", stage="none"),
            home=Home(folder).create_folders(),
            keys=keys,
            context=net.context,
            authenticator=net.gatekeeper,
            server=self.control,
            repository=ModelRepository(),
            banned_peers=BannedPeers(),
            announce=self.events.append,
        )
        address = f"127.0.0.1:{self.coordinator.port}"
        membership = MembershipRecord(
            swarm="s", coordinator_key=net.keys.public, addresses=(address,)
        )
        self.shut_out = 0
        replica = ReplicaFile(resources.home.replica, "s")
        self.leadership = Leadership(resources, replica, membership)
        self.node = Node(resources, self.leadership, lambda: "http://e", self._revoked)
        self.node.start(MeasuredDevice(Device(kind="cpu", name="x", memory=0), bf16=False))
        self.identity = b""

    def _revoked(self) -> None:
        self.shut_out += 1

    def _handle(
        self,
        sender: MessageSender,
        message: PeerReport | RevokeRequest | StatusRequest,
        _payload: memoryview | None,
    ) -> None:
        send = self.coordinator.send
        match message:
            case PeerReport() if sender.identity != self.identity:
                self.identity = sender.identity
                send(sender.identity, LeaderHeartbeat(term=0, leader="first", protocol=PROTOCOL))
                send(sender.identity, Welcome(swarm="s", peer=sender.peer_id))
            case StatusRequest():
                text = json.dumps(STATUS).encode()
                payload = Payload("u8", (len(text),))
                send(sender.identity, StatusReply(ref=message.ref, payload=payload), text)
            case RevokeRequest():
                self.revoked.append(message.target)
                send(sender.identity, DoneReply(ref=message.ref))


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
    peer = derive_peer_id(OTHER.public)
    told = PeerBlocked(epoch=1, peer=peer, reason="nonsense", is_previous_stage=False)
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


async def test_a_pipeline_missing_in_a_new_session_is_removed(scene: Scene, net: Net) -> None:
    """A coordinator that restarted doesn't know what ended meanwhile."""

    def pipelines() -> set[str]:
        return {route.pipeline for route in scene.node._schedulers.routes}

    for pipeline in ("p1", "p2"):
        route = Route(
            pipeline=pipeline, epoch=1, model="m", is_ready=False, scheduler=None, max_model_len=0
        )
        scene.coordinator.send(scene.identity, route)
    await net.until(lambda: pipelines() == {"p1", "p2"})
    scene.coordinator.send(scene.identity, Welcome(swarm="s", peer="x"))
    scene.coordinator.send(scene.identity, structs.replace(route, is_ready=True))
    await net.until(lambda: pipelines() == {"p2"})


async def test_revoking_leaves_time_for_the_reply(scene: Scene, net: Net) -> None:
    """The one who is shut out counts for nothing at once; connections are cut a little later."""
    reply, _ = await scene.node.forward_request(RevokeRequest(ref=0, target="x"))
    assert isinstance(reply, DoneReply)
    assert scene.revoked == ["x"]
    peer = derive_peer_id(OTHER.public)
    member = PeerInfo(peer=peer, name="tv", public_key=OTHER.public, addresses=(), control_port=0)
    scene.coordinator.send(scene.identity, member)
    await net.until(lambda: net.gatekeeper.is_allowed(peer))
    scene.coordinator.send(scene.identity, PeerRemoved(peer=peer))
    await net.until(lambda: not net.gatekeeper.is_allowed(peer))
    assert scene.control.counters.rebuilds == 0
    await net.until(lambda: scene.control.counters.rebuilds == 1)


async def test_notices_of_the_coordinator_are_reported(scene: Scene, net: Net) -> None:
    for text in ("--stage 6:99 is odd", ""):
        scene.coordinator.send(scene.identity, Notice(text=text))
    scene.coordinator.send(scene.identity, Revoked(swarm="s"))
    await net.until(lambda: scene.shut_out == 1)
    told = [event.text for event in scene.events if isinstance(event, ProblemReportedEvent)]
    assert told == ["--stage 6:99 is odd"]


async def test_the_sweep_restarts_with_each_session(scene: Scene, net: Net) -> None:
    first = scene.node._peers._sweep
    assert first is not None
    scene.coordinator.send(scene.identity, Welcome(swarm="s", peer="x"))
    await net.until(lambda: scene.node._peers._sweep is not first)
    assert first.cancelled()


class AlteredFiles(ModelFiles):
    """Has the right manifest, and says something else than the chat template."""

    def read_chunk(self, name: str, index: int) -> bytes:
        data = super().read_chunk(name, index)
        return data.replace(b"im_start", b"im_evil_")


def serve_files(net: Net, folder: Path, kind: type[ModelFiles]) -> tuple[PeerInfo, ModelFiles]:
    """A peer with the model in ``folder``, on a control socket of its own."""
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
        net.gatekeeper,
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
    return member, model_files


async def test_a_source_that_alters_the_chat_template_is_banned(
    scene: Scene, net: Net, tmp_path: Path, make_model: MakeModel
) -> None:
    folder = make_model(tmp_path / "model")
    liar, model_files = serve_files(net, folder, AlteredFiles)
    honest, _ = serve_files(net, folder, ModelFiles)
    for member in (liar, honest):
        scene.coordinator.send(scene.identity, member)
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
    """Sends weights once it may."""

    may = threading.Event()

    def read_chunk(self, name: str, index: int) -> bytes:
        if name == "tokenizer.json":
            self.may.wait()
        return super().read_chunk(name, index)


async def test_transfers_are_announced_and_reported(
    scene: Scene, net: Net, tmp_path: Path, make_model: MakeModel
) -> None:
    slow, model_files = serve_files(net, make_model(tmp_path / "model"), SlowFiles)
    scene.coordinator.send(scene.identity, slow)
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
