"""Asks the daemon on this PC again and again, on one connection."""

from pathlib import Path

import zmq.asyncio

from molink.errors import MolinkError, Unavailable
from molink.swarm.controller.told_status import Status, read_status
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control import ControlMessage
from molink.wire.messages.requests import StatusRequest
from molink.wire.sockets.client import Client
from molink.wire.sockets.endpoints import endpoints
from molinkd.cli.local_daemon import CONNECT_S, Found, need_daemon

#: Seconds for an answer, for which the daemon may have to ask the coordinator (3 s at most).
ANSWER_S = 5.0


class StatusFeed:
    """The status of the swarm, for as long as it is asked for.

    The daemon may go and come back, as another process with another port: it is looked for each
    time, and connected to anew if it is not the one of before.
    """

    def __init__(self, home: Path | None) -> None:
        self._home = home
        self._context = zmq.asyncio.Context()
        self._found: Found | None = None
        self._client: Client[ControlMessage] | None = None

    async def ask(self) -> tuple[Status, bool]:
        """The status now, and whether it is that of a demo.

        Raises:
            Unavailable: no daemon runs, or it doesn't answer.
            MolinkError: the daemon's refusal.
        """
        try:
            found = need_daemon(self._home)
            client = await self._connected(found)
            _, payload = await client.request(StatusRequest(ref=0), timeout=ANSWER_S)
        except MolinkError:
            await self.close()
            raise
        return read_status(b"" if payload is None else bytes(payload)), found.demo

    async def tell(self, message: ControlMessage) -> ControlMessage:
        """The daemon's answer to something that its user wants.

        Raises:
            MolinkError: as :meth:`ask`, or it can't be done.
        """
        client = await self._connected(need_daemon(self._home))
        reply, _ = await client.request(message, timeout=ANSWER_S)
        return reply

    async def _connected(self, found: Found) -> Client[ControlMessage]:
        if self._client is not None and found == self._found:
            return self._client
        await self.close()
        keys, note = found.home.keys(), found.note
        name = f"the molink daemon on this PC (process {note.pid})"
        client: Client[ControlMessage] = Client(
            self._context,
            keys,
            control_codec(),
            keys.public,
            endpoints([note.control_host], note.control_port),
            name=name,
        )
        self._client, self._found = client, found
        client.start()
        try:
            await client.wait_connected(CONNECT_S)
        except Unavailable:
            raise Unavailable(f"{name} runs, but did not answer within {CONNECT_S:g} s") from None
        return client

    async def close(self) -> None:
        """Disconnect; it may be asked again."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def end(self) -> None:
        """Give back what all connections share; nothing may be asked any more."""
        self._context.destroy(linger=0)
