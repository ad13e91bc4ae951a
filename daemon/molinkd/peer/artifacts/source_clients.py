"""Reads model files from another peer's control socket."""

import asyncio
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

#: Reply timeouts in seconds, well below the coordinator's limit for a stalled transfer.
_CONNECT_S = 10.0
_PARTS_S = 5.0
_READ_S = 15.0


class PeerSource:
    """A peer as a source of model files."""

    def __init__(self, client: Client[ControlMessage]) -> None:
        self._client = client

    async def read_manifest(self, root: str, offset: int) -> tuple[int, bytes]:
        """Size of a model's manifest, and bytes of it from ``offset`` on."""
        request = ManifestRequest(ref=0, root=root, offset=offset)
        reply, payload = await self._client.send_request(request, timeout=_CONNECT_S)
        if not isinstance(reply, ManifestChunk) or payload is None:
            raise WireError(f"unexpected reply {type(reply).__name__} instead of a manifest")
        return reply.size, bytes(payload)

    async def read_parts(self, root: str) -> bytes:
        """Bitfield of the parts that the peer has."""
        request = PartsRequest(ref=0, root=root)
        reply, payload = await self._client.send_request(request, timeout=_PARTS_S)
        if not isinstance(reply, PartsReply) or payload is None:
            raise WireError(f"unexpected reply {type(reply).__name__} instead of a list of parts")
        return bytes(payload)

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        """A chunk of a part."""
        return await self.read_slice(root, part, index, 0, 0)

    async def read_slice(self, root: str, part: str, index: int, offset: int, length: int) -> bytes:
        """``length`` bytes of a chunk from ``offset`` on; 0 means the whole chunk."""
        request = ReadRequest(
            ref=0, root=root, part=part, index=index, offset=offset, length=length
        )
        reply, payload = await self._client.send_request(request, timeout=_READ_S)
        if not isinstance(reply, ReadReply) or payload is None:
            raise WireError(f"unexpected reply {type(reply).__name__} instead of a chunk")
        return bytes(payload)


class PeerConnector:
    """Connects to peers by id."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        keys: KeyPair,
        book: AddressBook,
        relayed_route: Callable[[str, int], str] = lambda *_: "",
    ) -> None:
        """``relayed_route(peer, port)`` returns a relayed route's local endpoint, or ""."""
        self._context = context
        self._keys = keys
        self._book = book
        self._relayed_endpoint = relayed_route
        self._codec = control_codec()

    @asynccontextmanager
    async def connect_peer(self, peer: str) -> AsyncIterator[PeerSource]:
        """A connection to ``peer``, closed on exit.

        Raises:
            Unavailable: The peer is unknown or has no address.
        """
        info = self._book.get_peer(peer)
        if info is None or not info.addresses:
            raise Unavailable(f"peer {peer} is offline")
        relayed = self._relayed_endpoint(peer, info.control_port)
        client: Client[ControlMessage] = Client(
            self._context,
            self._keys,
            self._codec,
            info.public_key,
            [relayed] if relayed else endpoints(info.addresses, info.control_port),
            name=info.name,
        )
        client.start()
        try:
            yield PeerSource(client)
        finally:
            await client.close()


class HubSource:
    """A model on the hub at one commit. Manifests come from peers only."""

    def __init__(self, place: str) -> None:
        """``place`` is ``OWNER/NAME@COMMIT``."""
        from molink.checkpoint.hub_reader import HubReader

        self._parts = HubReader.open_place(place)

    async def read_manifest(self, root: str, offset: int) -> tuple[int, bytes]:
        """Not available from the hub."""
        raise Unavailable("the hub has no manifest")

    async def read_parts(self, root: str) -> bytes:
        """Not available from the hub, which has all tensors."""
        raise Unavailable("the hub has no manifest")

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        """A chunk of a tensor."""
        return await asyncio.to_thread(self._parts.read_chunk, part, index)

    async def read_slice(self, root: str, part: str, index: int, offset: int, length: int) -> bytes:
        """``length`` bytes of a chunk from ``offset`` on."""
        return await asyncio.to_thread(self._parts.read_chunk, part, index, offset, length)


@asynccontextmanager
async def open_hub_source(place: str) -> AsyncIterator[HubSource]:
    """The hub; each request connects separately."""
    yield HubSource(place)
