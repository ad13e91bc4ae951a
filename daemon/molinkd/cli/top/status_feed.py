"""Polls the daemon on this PC over one connection."""

from pathlib import Path

import zmq.asyncio

from molink.errors import MolinkError, Unavailable
from molink.swarm.controller.status_schema import SwarmStatus, decode_status
from molink.wire.messages.admin import StatusRequest
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.sockets.client import Client
from molink.wire.sockets.create_socket import endpoints
from molinkd.cli.daemon_client import CONNECT_TIMEOUT_S, RunningDaemon, require_daemon

#: Reply timeout in seconds; the daemon may ask the coordinator for up to 3 s.
REPLY_TIMEOUT_S = 5.0


class StatusFeed:
    """Fetches the status of the swarm.

    The daemon may restart with another port, so it is looked up each time and reconnected if it
    changed.
    """

    def __init__(self, home: Path | None) -> None:
        self._home = home
        self._context = zmq.asyncio.Context()
        self._daemon: RunningDaemon | None = None
        self._client: Client[ControlMessage] | None = None

    async def fetch_status(self) -> tuple[SwarmStatus, bool]:
        """Return the status and whether it is a demo's.

        Raises:
            Unavailable: no daemon runs, or it does not respond.
            MolinkError: the daemon's error.
        """
        try:
            found = require_daemon(self._home)
            client = await self._connect_client(found)
            _, payload = await client.send_request(StatusRequest(ref=0), timeout=REPLY_TIMEOUT_S)
        except MolinkError:
            await self.close()
            raise
        return decode_status(b"" if payload is None else bytes(payload)), found.is_demo

    async def send_request(self, message: ControlMessage) -> ControlMessage:
        """Send a request and return the reply.

        Raises:
            MolinkError: as :meth:`fetch_status`, or the action failed.
        """
        client = await self._connect_client(require_daemon(self._home))
        reply, _ = await client.send_request(message, timeout=REPLY_TIMEOUT_S)
        return reply

    async def _connect_client(self, found: RunningDaemon) -> Client[ControlMessage]:
        if self._client is not None and found == self._daemon:
            return self._client
        await self.close()
        keys, run_file = found.home.load_keys(), found.run_file
        name = f"the molink daemon on this PC (process {run_file.pid})"
        client: Client[ControlMessage] = Client(
            self._context,
            keys,
            control_codec(),
            keys.public,
            endpoints([run_file.control_host], run_file.control_port),
            name=name,
        )
        self._client, self._daemon = client, found
        client.start()
        try:
            await client.wait_connected(CONNECT_TIMEOUT_S)
        except Unavailable:
            raise Unavailable(f"{name} did not respond within {CONNECT_TIMEOUT_S:g} s") from None
        return client

    async def close(self) -> None:
        """Disconnect; the next request reconnects."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def destroy_context(self) -> None:
        """Release the context; no more requests are possible."""
        self._context.destroy(linger=0)
