"""Tries whether other members' ports can be reached from here, before anything depends on it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq.asyncio

from molink.errors import MolinkError, NotAuthorized
from molink.swarm.running_time import STANDSTILL
from molink.wire.messages.codec import Codec, control_codec
from molink.wire.messages.instructions import Member
from molink.wire.sockets.client import Client
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.endpoints import endpoints

#: How long a try may take, in seconds: a handshake takes five round trips.
PATIENCE_S = 3.0
#: Until a member that could not be reached is tried again, in seconds.
RETRY_S = 5.0


async def can_connect(
    context: zmq.asyncio.Context,
    keys: KeyPair,
    codec: Codec[Any],
    server_key: str,
    targets: Sequence[str],
) -> bool:
    """Whether the holder of ``server_key`` answers at any of ``targets`` (``tcp://host:port``).

    One that doesn't know this PC yet has answered too. A try during which this process stood still
    says nothing, and is made again.
    """
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        if await _try(context, keys, codec, server_key, targets):
            return True
        if loop.time() - began <= PATIENCE_S + STANDSTILL:
            return False


async def _try(
    context: zmq.asyncio.Context,
    keys: KeyPair,
    codec: Codec[Any],
    server_key: str,
    targets: Sequence[str],
) -> bool:
    tries = [
        asyncio.ensure_future(_answers(context, keys, codec, server_key, target))
        for target in targets
    ]
    try:
        return any([await done for done in asyncio.as_completed(tries)])
    finally:
        for one in tries:
            one.cancel()
        await asyncio.gather(*tries, return_exceptions=True)


async def _answers(
    context: zmq.asyncio.Context, keys: KeyPair, codec: Codec[Any], server_key: str, target: str
) -> bool:
    client: Client[Any] = Client(context, keys, codec, server_key, [target])
    try:
        client.start()
        await client.wait_connected(PATIENCE_S)
    except NotAuthorized:
        return True
    except MolinkError:
        return False
    finally:
        await client.close()
    return True


class Prober:
    """Tries every member's control port until it answers, and again if its addresses change."""

    def __init__(
        self, context: zmq.asyncio.Context, keys: KeyPair, tell: Callable[[str, bool], None]
    ) -> None:
        """``tell`` is called after each try with the peer, and whether it was reached."""
        self._context = context
        self._keys = keys
        self._tell = tell
        self._codec = control_codec()
        #: Where each member listens, as it was tried.
        self._targets: dict[str, tuple[str, ...]] = {}
        self._reached: dict[str, bool] = {}
        self._tries: dict[str, asyncio.Task[None]] = {}
        #: All that have not ended, those that were given up too.
        self._tasks: set[asyncio.Task[None]] = set()

    def member(self, member: Member) -> None:
        """A member is there, or listens elsewhere."""
        targets = tuple(endpoints(member.addresses, member.control_port))
        if not targets or self._targets.get(member.peer) == targets:
            return
        self.forget(member.peer)
        self._targets[member.peer] = targets
        task = asyncio.get_running_loop().create_task(self._try(member, targets))
        self._tries[member.peer] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, peer: str) -> None:
        """It is no member any more."""
        self._targets.pop(peer, None)
        self._reached.pop(peer, None)
        task = self._tries.pop(peer, None)
        if task is not None:
            task.cancel()

    def repeat(self) -> None:
        """Tell all again, to who may have missed it."""
        for peer, reached in self._reached.items():
            self._tell(peer, reached)

    async def close(self) -> None:
        """Try no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _try(self, member: Member, targets: Sequence[str]) -> None:
        while True:
            reached = await can_connect(
                self._context, self._keys, self._codec, member.public_key, targets
            )
            self._reached[member.peer] = reached
            self._tell(member.peer, reached)
            if reached:
                return
            await asyncio.sleep(RETRY_S)
