"""The control socket: files for members, everything else for the user of this PC alone."""

from pathlib import Path

import pytest

from molink.errors import ModelNotFound, NotAuthorized, RequestError
from molink.facts.identity import peer_id
from molink.swarm.address_book import AddressBook
from molink.swarm.fetch_plan import FilePiece
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control import (
    Invite,
    InviteRequest,
    Member,
    RevokeRequest,
    ShutdownRequest,
    StatusReply,
    StatusRequest,
)
from molink.wire.messages.pipe import MemberKey
from molink.wire.sockets.server import Server
from molinkd.peer.library import Library
from molinkd.peer.service import Service, UserCommands
from molinkd.peer.sources import PeerSource, Sources
from tests.support.net import Net


class Commands:
    """What was asked for."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    async def status(self) -> bytes:
        return b'{"swarm": "s"}'

    async def invite(self, ttl: float) -> str:
        if ttl < 0:
            raise NotAuthorized("not you")
        return f"token {ttl:g}"

    async def revoke(self, target: str) -> None:
        self.asked.append(target)

    async def shutdown(self, leave: bool) -> None:
        self.asked.append(leave)


@pytest.fixture
def library(tmp_path: Path) -> Library:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"0123456789")
    for number in range(20):
        (tmp_path / f"model-{number:05d}-of-00020.safetensors").write_bytes(b"x")
    library = Library()
    library.add("m", tmp_path)
    return library


def start(net: Net, library: Library, me: str) -> tuple[Server, Commands]:
    commands = Commands()
    service = Service(
        me,
        library,
        UserCommands(commands.status, commands.invite, commands.revoke, commands.shutdown),
    )
    server = net.server(control_codec(), service.handle, permits=service.permits)
    service.send = server.send
    return server, commands


async def test_members_read_files(net: Net, library: Library) -> None:
    server, _ = start(net, library, "me")
    source = PeerSource(net.client(control_codec(), net.member(), server.port))
    files = await source.files("m")
    assert len(files) == 22
    assert await source.read("m", FilePiece("model.safetensors", 3, 4, 0)) == b"3456"
    with pytest.raises(RequestError, match="no file"):
        await source.read("m", FilePiece("../x", 0, 1, 0))
    with pytest.raises(ModelNotFound):
        await source.files("other")


async def test_a_source_is_found_by_its_id(net: Net, library: Library) -> None:
    server, _ = start(net, library, "me")
    mine = net.member()
    book = AddressBook(MemberKey(peer=peer_id(mine.public), public_key=mine.public))
    me = peer_id(net.keys.public)
    book.add(
        Member(
            peer=me,
            name="n",
            public_key=net.keys.public,
            addresses=("127.0.0.1",),
            control_port=server.port,
        )
    )
    sources = Sources(net.context, mine, book)
    async with sources.connect(me) as source:
        assert len(await source.files("m")) == 22


async def test_the_user_may_ask_for_everything(net: Net, library: Library) -> None:
    keys = net.member()
    server, commands = start(net, library, peer_id(keys.public))
    client = net.client(control_codec(), keys, server.port)
    reply, payload = await client.request(StatusRequest(ref=0))
    assert isinstance(reply, StatusReply)
    assert payload is not None
    assert bytes(payload) == b'{"swarm": "s"}'
    reply, _ = await client.request(InviteRequest(ref=0, ttl=5.0))
    assert isinstance(reply, Invite)
    assert reply.token == "token 5"
    with pytest.raises(NotAuthorized, match="not you"):
        await client.request(InviteRequest(ref=0, ttl=-1.0))
    await client.request(RevokeRequest(ref=0, target="p"))
    await client.request(ShutdownRequest(ref=0, leave=True))
    assert commands.asked == ["p", True]


async def test_others_may_not(net: Net, library: Library) -> None:
    server, commands = start(net, library, "me")
    client = net.client(control_codec(), net.member(), server.port)
    await client.wait_connected(10.0)
    client.send(ShutdownRequest(ref=1))
    client.send(StatusRequest(ref=2))
    client.send(InviteRequest(ref=3))
    client.send(RevokeRequest(ref=4, target="p"))
    await net.until(lambda: server.counters.forbidden == 4)
    assert commands.asked == []
