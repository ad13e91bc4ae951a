"""No message is missed on plain sockets, even if other uses consume the descriptor's signal."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import zmq
import zmq.asyncio

from molink.wire.sockets.socket_pump import SocketPump


class End:
    """One socket of a pair, and its events."""

    def __init__(self, socket: zmq.asyncio.Socket, answers: bool = False) -> None:
        self.got: list[tuple[list[bytes], int]] = []
        self.rooms = 0
        self.errors: list[Exception] = []
        self._answers = answers
        self.pump = SocketPump(socket, 2, self._take, self._room, self.errors.append)

    def _take(self, frames: list[zmq.Frame], parts: int) -> None:
        if frames[0].bytes == b"bad":
            raise ValueError("bad")
        self.got.append(([frame.bytes for frame in frames], parts))
        if self._answers:
            self.pump.send_parts([frames[0].bytes])

    def _room(self) -> None:
        self.rooms += 1


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]]:
    with zmq.asyncio.Context() as context:
        one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for socket in (one, other):
            socket.set(zmq.SNDHWM, 4)
            socket.set(zmq.RCVHWM, 4)
        one.bind("inproc://traffic")
        other.connect("inproc://traffic")
        with one, other:
            yield one, other


async def test_all_arrives_while_both_sides_send(net: Any, sockets: Any) -> None:
    one, other = End(sockets[0]), End(sockets[1], answers=True)
    for number in range(300):
        await net.until(partial(one.pump.send_parts, [b"%d" % number]))
    want = [([b"%d" % number], 1) for number in range(300)]
    await net.until(lambda: one.got == want)
    assert other.got == want
    one.pump.close()
    other.pump.close()


async def test_earlier_messages_are_read(net: Any, sockets: Any) -> None:
    sender = End(sockets[1])
    assert sender.pump.send_parts([b"early"])
    reader = End(sockets[0])
    await net.until(lambda: reader.got == [([b"early"], 1)])
    sender.pump.close()
    reader.pump.close()


async def test_unread_since_tracks_the_backlog(net: Any, sockets: Any) -> None:
    sender, reader = End(sockets[1]), End(sockets[0])
    await net.until(lambda: reader.pump.unread_since is None)
    assert sender.pump.send_parts([b"x"])
    await net.until(lambda: bool(reader.got) or reader.pump.unread_since is not None)
    await net.until(lambda: reader.got == [([b"x"], 1)] and reader.pump.unread_since is None)
    sender.pump.close()
    reader.pump.close()


async def test_surplus_frames_are_counted(net: Any, sockets: Any) -> None:
    sender, reader = End(sockets[1]), End(sockets[0])
    assert sender.pump.send_parts([b"x"] * 1000)
    assert sender.pump.send_parts([b"after"])
    await net.until(lambda: reader.got == [([b"x", b"x"], 1000), ([b"after"], 1)])
    sender.pump.close()
    reader.pump.close()


async def test_room_is_reported_once(net: Any, sockets: Any) -> None:
    sender = End(sockets[1])
    while sender.pump.send_parts([b"x"]):
        pass
    await asyncio.sleep(0)
    assert not sender.rooms
    reader = End(sockets[0])
    await net.until(lambda: sender.rooms)
    assert sender.pump.send_parts([b"x"])
    sender.pump.close()
    reader.pump.close()


async def test_error_stops_the_pump(net: Any, sockets: Any) -> None:
    sender, reader = End(sockets[1]), End(sockets[0])
    assert sender.pump.send_parts([b"bad"])
    assert sender.pump.send_parts([b"good"])
    await net.until(lambda: reader.errors)
    await asyncio.sleep(0)
    assert isinstance(reader.errors[0], ValueError)
    assert not reader.got
    sender.pump.close()
