"""The control socket: files for peers, everything else for this PC's user only."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from molink.checkpoint.manifest import manifest_root
from molink.errors import ModelNotFound, NotAuthorized, RequestError
from molink.facts.identity import derive_peer_id
from molink.swarm.membership.address_book import AddressBook
from molink.wire.messages.admin import (
    ApplyFile,
    ApplyReply,
    DrainRequest,
    InvitationsReply,
    InvitationsRequest,
    InviteReply,
    InviteRequest,
    LoadModel,
    LoadModelReply,
    RevokeRequest,
    ShutdownRequest,
    StatusReply,
    StatusRequest,
    StopServing,
    UnrevokeRequest,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage, DoneReply, JoinRequest
from molink.wire.messages.election import LeaderReply, LeaderRequest, LeaderView
from molink.wire.messages.instructions import PeerInfo
from molink.wire.messages.worker_pipe import PeerKey
from molink.wire.protocol import PROTOCOL
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import Server
from molinkd.peer.artifacts.model_repository import ModelFiles, ModelRepository
from molinkd.peer.artifacts.source_clients import PeerConnector, PeerSource
from molinkd.peer.control_service import ControlService, LeaderQueries, UserCommands
from tests.support.models import write_tensors
from tests.support.net import Net


class Commands:
    """Records the requested commands."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    async def query_status(self, outlook: bool) -> bytes:
        return b'{"swarm": "s", "scale_out": {}}' if outlook else b'{"swarm": "s"}'

    async def forward_request(self, message: ControlMessage) -> tuple[ControlMessage, bytes]:
        match message:
            case InviteRequest(ttl=ttl) if ttl < 0:
                raise NotAuthorized("not you")
            case InviteRequest(ttl=ttl, uses=uses):
                return InviteReply(ref=99, token=f"token {ttl:g} {uses}"), b""
            case InvitationsRequest():
                return InvitationsReply(ref=99, payload=Payload("u8", (2,))), b"[]"
        self.asked.append(message)
        return DoneReply(ref=99), b""

    def set_drained(self, drain: bool, device: str) -> None:
        self.asked.append(("drain", drain, device))

    async def load_model(self, model: str) -> LoadModelReply:
        self.asked.append(model)
        return LoadModelReply(ref=0, state="hashing", name="m", done=1, total=2)

    async def apply_file(self, order: ApplyFile) -> tuple[LoadModelReply | ApplyReply, bytes]:
        self.asked.append(order)
        if order.dry_run:
            return ApplyReply(ref=0, payload=Payload("u8", (3,))), b"+ m"
        return LoadModelReply(ref=0, state="hashing"), b""

    async def shutdown(self, leave: bool) -> None:
        self.asked.append(leave)


@pytest.fixture
def library(tmp_path: Path) -> ModelRepository:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    write_tensors(tmp_path / "model.safetensors", {"t": bytes(range(256)) * 1000})
    repository = ModelRepository()
    repository.add_model("m", tmp_path)
    return repository


def root(library: ModelRepository) -> str:
    model_files = library.get_model("m")
    assert model_files is not None
    return model_files.manifest.root


def start(net: Net, library: ModelRepository, me: str) -> tuple[Server, Commands]:
    commands = Commands()
    service = ControlService(
        me,
        library,
        UserCommands(
            commands.query_status,
            commands.forward_request,
            commands.shutdown,
            commands.set_drained,
            commands.load_model,
            commands.apply_file,
        ),
        LeaderQueries(
            lambda peer, request: LeaderReply(
                ref=request.ref, view=msgspec.structs.replace(request.view, leader=peer)
            ),
            lambda: ("k" * 40, ("h:1",), "leader"),
        ),
    )
    server = net.server(control_codec(), service.handle_message, permits=service.is_permitted)
    service.send = server.send
    return server, commands


async def test_peers_read_files(net: Net, library: ModelRepository) -> None:
    server, _ = start(net, library, "me")
    source = PeerSource(net.client(control_codec(), net.member(), server.port))
    size, raw = await source.read_manifest(root(library), 0)
    assert size == len(raw)
    assert manifest_root(raw) == root(library)
    assert await source.read_manifest(root(library), size - 3) == (size, raw[-3:])
    assert await source.read_chunk(root(library), "config.json", 0) == b"{}"
    whole = await source.read_chunk(root(library), "t", 0) + await source.read_chunk(
        root(library), "t", 1
    )
    assert whole == bytes(range(256)) * 1000
    for part, index, why in (("../x", 0, "no part"), ("t", 2, "has 2 chunks")):
        with pytest.raises(RequestError, match=why):
            await source.read_chunk(root(library), part, index)
    with pytest.raises(ModelNotFound):
        await source.read_manifest(f"{0:064}:1", 0)


async def test_peers_query_available_parts(net: Net, library: ModelRepository) -> None:
    server, _ = start(net, library, "me")
    source = PeerSource(net.client(control_codec(), net.member(), server.port))
    whole = library.require_model(root(library))
    manifest = whole.manifest
    everything = manifest.decode_bitfield(await source.read_parts(root(library)))
    assert everything == {*manifest.files, *manifest.tensors}
    some = {name: place for name, place in whole.ranges.items() if name != "t"}
    parts = ModelRepository()
    parts.set_partial_models({manifest.root: replace(whole, ranges=some)})
    server, _ = start(net, parts, "me")
    source = PeerSource(net.client(control_codec(), net.member(), server.port))
    assert manifest.decode_bitfield(await source.read_parts(manifest.root)) == everything - {"t"}
    with pytest.raises(ModelNotFound, match="does not have t of that model"):
        await source.read_chunk(manifest.root, "t", 0)
    with pytest.raises(ModelNotFound):
        await source.read_parts(f"{0:064}:1")


async def test_a_source_is_connected_by_id(net: Net, library: ModelRepository) -> None:
    server, _ = start(net, library, "me")
    mine = net.member()
    book = AddressBook(PeerKey(peer=derive_peer_id(mine.public), public_key=mine.public))
    me = derive_peer_id(net.keys.public)
    book.add_peer(
        PeerInfo(
            peer=me,
            name="n",
            public_key=net.keys.public,
            addresses=("127.0.0.1",),
            control_port=server.port,
        )
    )
    sources = PeerConnector(net.context, mine, book)
    async with sources.connect_peer(me) as source:
        assert (await source.read_manifest(root(library), 0))[0] > 0


async def test_slices_of_a_chunk_read_the_disk_once(
    net: Net, library: ModelRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = start(net, library, "me")
    source = PeerSource(net.client(control_codec(), net.member(), server.port))
    made = root(library)
    whole = await source.read_chunk(made, "t", 0)
    reads: list[int] = []
    read = ModelFiles.read_chunk

    def counted(self: ModelFiles, name: str, index: int) -> bytes:
        reads.append(index)
        return read(self, name, index)

    monkeypatch.setattr(ModelFiles, "read_chunk", counted)
    places = [(0, 100), (100, 1000), (len(whole) - 5, 5)]
    got = await asyncio.gather(*(source.read_slice(made, "t", 0, *place) for place in places))
    assert got == [whole[begin : begin + length] for begin, length in places]
    assert reads == [0]
    for index in range(2):
        with pytest.raises(RequestError, match="no number 7"):
            await source.read_slice(made, "t", 7, 0, 10)
        assert len(reads) == 2 + index


async def test_the_user_may_send_every_request(net: Net, library: ModelRepository) -> None:
    keys = net.member()
    server, commands = start(net, library, derive_peer_id(keys.public))
    client = net.client(control_codec(), keys, server.port)
    reply, payload = await client.send_request(StatusRequest(ref=0))
    assert isinstance(reply, StatusReply)
    assert payload is not None
    assert bytes(payload) == b'{"swarm": "s"}'
    _, payload = await client.send_request(StatusRequest(ref=0, scale_out=True))
    assert bytes(payload or b"") == b'{"swarm": "s", "scale_out": {}}'
    reply, _ = await client.send_request(InviteRequest(ref=0, ttl=5.0, uses=3))
    assert isinstance(reply, InviteReply)
    assert reply.token == "token 5 3"
    reply, payload = await client.send_request(InvitationsRequest(ref=0))
    assert isinstance(reply, InvitationsReply)
    assert payload is not None
    assert bytes(payload) == b"[]"
    with pytest.raises(NotAuthorized, match="not you"):
        await client.send_request(InviteRequest(ref=0, ttl=-1.0))
    await client.send_request(RevokeRequest(ref=0, target="p"))
    await client.send_request(UnrevokeRequest(ref=0, target="p"))
    await client.send_request(DrainRequest(ref=0, drain=True))
    far, _ = await client.send_request(LoadModel(ref=0, model="owner/m"))
    assert (far.state, far.name, far.done, far.total) == ("hashing", "m", 1, 2)
    far, payload = await client.send_request(ApplyFile(ref=0, models=()))
    assert (far.state, payload) == ("hashing", None)
    done, payload = await client.send_request(ApplyFile(ref=0, models=(), dry_run=True))
    assert (isinstance(done, ApplyReply), bytes(payload or b"")) == (True, b"+ m")
    await client.send_request(StopServing(ref=0))
    await client.send_request(ShutdownRequest(ref=0, leave=True))
    revoke, unrevoke, drain, bring, _, _, stop, leave = commands.asked
    assert bring == "owner/m"
    assert isinstance(stop, StopServing)
    assert isinstance(revoke, RevokeRequest)
    assert isinstance(unrevoke, UnrevokeRequest)
    assert drain == ("drain", True, "")
    assert leave is True


async def test_other_peers_may_not(net: Net, library: ModelRepository) -> None:
    server, commands = start(net, library, "me")
    client = net.client(control_codec(), net.member(), server.port)
    await client.wait_connected(60)
    client.send(ShutdownRequest(ref=1))
    client.send(StatusRequest(ref=2))
    client.send(InviteRequest(ref=3))
    client.send(RevokeRequest(ref=4, target="p"))
    client.send(InvitationsRequest(ref=5))
    client.send(UnrevokeRequest(ref=6, target="p"))
    client.send(DrainRequest(ref=9, drain=True))
    client.send(LoadModel(ref=7, model="/etc"))
    client.send(StopServing(ref=8))
    client.send(ApplyFile(ref=10, models=()))
    await net.until(lambda: server.counters.forbidden == 10)
    assert commands.asked == []


async def test_peers_query_the_leader(net: Net, library: ModelRepository) -> None:
    server, _ = start(net, library, "me")
    keys = net.member()
    view = LeaderView(
        term=3, leader="", is_leader=False, hears_leader=True, can_lead=True, replica=(0, 1)
    )
    reply, _ = await net.client(control_codec(), keys, server.port).send_request(
        LeaderRequest(ref=0, swarm="s", view=view)
    )
    assert reply.view == msgspec.structs.replace(view, leader=derive_peer_id(keys.public))


async def test_a_guest_is_only_redirected_to_the_coordinator(
    net: Net, library: ModelRepository
) -> None:
    server, _ = start(net, library, "me")
    keys = KeyPair.generate()
    net.authenticator.allow_peer(keys.public, "invite:1")
    guest = net.client(control_codec(), keys, server.port)
    wish = JoinRequest(ref=0, public_key=keys.public, name="x", version="1", protocol=PROTOCOL)
    reply, _ = await guest.send_request(wish)
    assert (reply.coordinator_key, reply.addresses) == ("k" * 40, ("h:1",))
    assert server._permits("invite:1", wish)
    assert not server._permits("invite:1", StatusRequest(ref=0))
    assert not server._permits("some peer", wish)
