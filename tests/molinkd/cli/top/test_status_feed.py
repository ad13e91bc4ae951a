"""The connection of ``molink top`` to a daemon that restarts."""

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from molink.errors import Unavailable, WireError
from molink.wire.messages.admin import DrainRequest, StatusReply
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import DoneReply
from molink.wire.sockets.server import MessageSender, Server
from molinkd.cli.top import status_feed
from molinkd.cli.top.status_feed import StatusFeed
from molinkd.peer.home import Home, RunFile
from tests.molinkd.cli.top import swarms
from tests.support.net import Net


class FakeDaemon:
    """Answers with ``status`` and records the connections of requests."""

    def __init__(self, net: Net, place: Home, status: bytes) -> None:
        self.status = status
        self.asked: list[bytes] = []
        net.keys = place.load_keys()
        net.authenticator.allow_peer(net.keys.public)
        self.server: Server[Any] = net.server(control_codec(), self._handle)
        RunFile.of_this_process(self.server.port, "http://e").save_file(place.run_file)

    def _handle(self, sender: MessageSender, message: Any, _payload: memoryview | None) -> None:
        self.asked.append(sender.identity)
        if isinstance(message, DrainRequest):
            self.server.send(sender.identity, DoneReply(ref=message.ref))
            return
        reply = StatusReply(ref=message.ref, payload=Payload("u8", (len(self.status),)))
        self.server.send(sender.identity, reply, self.status)


async def test_one_connection_per_daemon(net: Net, tmp_path: Path) -> None:
    place = Home(tmp_path)
    place.create_folders()
    feed = StatusFeed(tmp_path)
    try:
        with pytest.raises(Unavailable, match="molink is not running here"):
            await feed.fetch_status()
        first = FakeDaemon(net, place, msgspec.json.encode(swarms.serving()))
        for _ in range(3):
            status, demo = await feed.fetch_status()
            assert (status.swarm, demo) == ("home", False)
        assert isinstance(await feed.send_request(DrainRequest(ref=0, drain=True)), DoneReply)
        assert len(set(first.asked)) == 1
        place.run_file.unlink()
        with pytest.raises(Unavailable):
            await feed.fetch_status()
        second = FakeDaemon(net, place, msgspec.json.encode(swarms.alone()))
        status, _ = await feed.fetch_status()
        assert len(status.peers) == len(second.asked) == 1
        assert len(first.asked) == 4
        second.status = b"{"
        with pytest.raises(WireError):
            await feed.fetch_status()
    finally:
        await feed.close()
        feed.destroy_context()


async def test_an_unresponsive_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_feed, "CONNECT_TIMEOUT_S", 0.2)
    place = Home(tmp_path)
    place.create_folders()
    feed = StatusFeed(tmp_path)
    # Like a suspended process: the kernel accepts connections, but nothing replies.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        RunFile.of_this_process(silent.getsockname()[1], "http://e").save_file(place.run_file)
        try:
            for _ in range(2):
                with pytest.raises(Unavailable, match="did not respond within"):
                    await feed.fetch_status()
        finally:
            await feed.close()
            feed.destroy_context()
