"""The connections of an outgoing link, as ZeroMQ clients."""

from collections.abc import Callable, Sequence

import zmq.asyncio

from molink.wire.messages.codec import data_codec
from molink.wire.messages.data import Lane
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.congestion import avoid_bbr
from molink.wire.sockets.curve import KeyPair
from molinkd.worker.outlink import Channel, ChannelEvents


def dial(
    context: zmq.asyncio.Context, keys: KeyPair, server_key: str, addresses: Sequence[str]
) -> Callable[[Lane, ChannelEvents], Channel]:
    """Makes the connections of an :class:`OutLink` to the worker that holds ``server_key``.

    ``addresses`` are ``tcp://host:port``, tried in turn.
    """

    def connect(lane: Lane, events: ChannelEvents) -> Channel:
        return Client(
            context,
            keys,
            data_codec(),
            server_key,
            addresses,
            name=f"the next stage ({lane.name.lower()} lane)",
            events=ClientEvents(
                on_message=events.on_message,
                on_connect=events.on_connect,
                on_disconnect=events.on_disconnect,
                on_drained=events.on_drained,
                on_open=avoid_bbr if lane is Lane.DECODE else None,
            ),
        )

    return connect
