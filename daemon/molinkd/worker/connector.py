"""The channels of an outgoing link, as ZeroMQ clients."""

from collections.abc import Sequence

import zmq.asyncio

from molink.link.base import OutConnectionEvents
from molink.wire.messages.codec import DataMessage, data_codec
from molink.wire.messages.data_plane import Channel
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.tcp_info import avoid_bbr, enable_pacing


class StageConnector:
    """Makes the channels of an ``OutLink`` to the worker that holds ``server_key``.

    ``addresses`` are ``tcp://host:port``, tried in turn.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        keys: KeyPair,
        server_key: str,
        addresses: Sequence[str],
    ) -> None:
        self._context = context
        self._keys = keys
        self._server_key = server_key
        self._addresses = addresses
        self.clients: list[Client[DataMessage]] = []

    def open_connection(self, channel: Channel, events: OutConnectionEvents) -> Client[DataMessage]:
        """The channel of a lane."""
        client = Client(
            self._context,
            self._keys,
            data_codec(),
            self._server_key,
            self._addresses,
            name=f"the next stage ({channel.name.lower()} lane)",
            events=ClientEvents(
                on_message=events.on_message,
                on_connect=events.on_connect,
                on_disconnect=events.on_disconnect,
                on_lost=events.on_lost,
                on_drained=events.on_drained,
                on_open=avoid_bbr if channel is Channel.DECODE else enable_pacing,
            ),
        )
        self.clients.append(client)
        return client

    async def close(self) -> None:
        """Disconnect them all."""
        for client in self.clients:
            await client.close()
