"""Reading model files from another peer, over its control socket."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zmq.asyncio

from molink.errors import Unavailable, WireError
from molink.swarm.membership.address_book import AddressBook
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.transfer import (
    ManifestChunk,
    ManifestRequest,
    PartsReply,
    PartsRequest,
    ReadReply,
    ReadRequest,
)
from molink.wire.sockets.client import Client
from molink.wire.sockets.create_socket import endpoints
from molink.wire.sockets.key_pair import KeyPair

#: A source that doesn't answer for so many seconds is left. Well below what a coordinator grants a
#: transfer that stands still.
_CONNECT_S = 10.0
_PARTS_S = 5.0
_READ_S = 15.0


class PeerSource:
    """One peer as the source of model files."""

    def __init__(self, client: Client[ControlMessage]) -> None:
        self._client = client

    async def read_manifest(self, root: str, offset: int) -> tuple[int, bytes]:
        """The size of a model's manifest, and bytes of it from ``offset`` on."""
        request = ManifestRequest(ref=0, root=root, offset=offset)
        reply, payload = await self._client.send_request(request, timeout=_CONNECT_S)
        if not isinstance(reply, ManifestChunk) or payload is None:
            raise WireError(f"a {type(reply).__name__} is no part of a manifest")
        return reply.size, bytes(payload)

    async def read_parts(self, root: str) -> bytes:
        """Which parts of a model it has, as :meth:`Manifest.marks` says it."""
        request = PartsRequest(ref=0, root=root)
        reply, payload = await self._client.send_request(request, timeout=_PARTS_S)
        if not isinstance(reply, PartsReply) or payload is None:
            raise WireError(f"a {type(reply).__name__} doesn't say which parts there are")
        return bytes(payload)

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        """A chunk of one of its parts."""
        return await self.read_slice(root, part, index, 0, 0)

    async def read_slice(self, root: str, part: str, index: int, offset: int, length: int) -> bytes:
        """``length`` bytes of a chunk from ``offset`` on; 0: all of it."""
        request = ReadRequest(
            ref=0, root=root, part=part, index=index, offset=offset, length=length
        )
        reply, payload = await self._client.send_request(request, timeout=_READ_S)
        if not isinstance(reply, ReadReply) or payload is None:
            raise WireError(f"a {type(reply).__name__} is no part of a model")
        return bytes(payload)


class PeerConnector:
    """Connects to peers by their id."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        keys: KeyPair,
        book: AddressBook,
        relayed_route: Callable[[str, int], str] = lambda *_: "",
    ) -> None:
        """``detour(peer, port)`` is where that port is reached if it can't be dialled, or empty."""
        self._context = context
        self._keys = keys
        self._book = book
        self._relayed_endpoint = relayed_route
        self._codec = control_codec()

    @asynccontextmanager
    async def connect_peer(self, peer: str) -> AsyncIterator[PeerSource]:
        """A connection to ``peer``, closed at the end.

        Raises:
            Unavailable: it is no member, or was never there.
        """
        member = self._book.get_peer(peer)
        if member is None or not member.addresses:
            raise Unavailable(f"peer {peer} is not there")
        around = self._relayed_endpoint(peer, member.control_port)
        client: Client[ControlMessage] = Client(
            self._context,
            self._keys,
            self._codec,
            member.public_key,
            [around] if around else endpoints(member.addresses, member.control_port),
            name=member.name,
        )
        client.start()
        try:
            yield PeerSource(client)
        finally:
            await client.close()
