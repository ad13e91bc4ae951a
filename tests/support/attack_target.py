"""A process to attack: a server that answers, or a client that dials; it prints its address.

``python -m tests.support.attack_target server`` or ``… client PORT SERVER_KEY``. It ends with its
input. A :class:`Goodbye` has the server hang for a while.
"""

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import DoneReply
from molink.wire.messages.peer_reports import Goodbye
from molink.wire.sockets.event_loop import EventLoop
from molink.wire.sockets.server import MessageSender
from tests.support.net import Net

#: Longer than the interval of ZMTP's heartbeat was.
HANG_S = 2.0


async def _main(role: str, *rest: str) -> None:
    async with AsyncExitStack() as stack:
        net = Net(stack)
        hostile, honest = net.member("hostile"), net.member("honest")
        told = {
            "hostile": [hostile.secret, hostile.public],
            "honest": [honest.secret, honest.public],
            "server": net.keys.public,
            "port": 0,
        }
        if role == "server":

            async def answer(
                sender: MessageSender, message: Any, payload: memoryview | None
            ) -> None:
                if isinstance(message, Goodbye):
                    time.sleep(HANG_S)  # noqa: ASYNC251  the whole event loop
                server.send(sender.identity, DoneReply(ref=message.ref))

            server = net.server(control_codec(), answer)
            told["port"] = server.port
        else:
            net.client(control_codec(), honest, int(rest[0]), server_key=rest[1])
        print(json.dumps(told), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    net.authenticator.close()
    net.context.term()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(_main(*sys.argv[1:]))
