"""Reading model files from another peer, over its control socket."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import zmq.asyncio

from molink.errors import Unavailable, WireError
from molink.swarm.address_book import AddressBook
from molink.swarm.fetch_plan import FilePiece
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control import ControlMessage
from molink.wire.messages.transfer import FileEntry, FileList, FilesRequest, ReadReply, ReadRequest
from molink.wire.sockets.client import Client
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.endpoints import endpoints

_CONNECT_S = 15.0
_READ_S = 60.0


class PeerSource:
    """One peer as the source of model files."""

    def __init__(self, client: Client[ControlMessage]) -> None:
        self._client = client

    async def files(self, model: str) -> Sequence[FileEntry]:
        """The files of a model."""
        replies = await self._client.request_all(
            FilesRequest(ref=0, model=model), timeout=_CONNECT_S
        )
        entries: list[FileEntry] = []
        for reply, _ in replies:
            if not isinstance(reply, FileList):
                raise WireError(f"a {type(reply).__name__} is no list of files")
            entries += reply.files
        return entries

    async def read(self, model: str, piece: FilePiece) -> bytes:
        """Bytes of one of them."""
        request = ReadRequest(
            ref=0, model=model, file=piece.file, offset=piece.offset, length=piece.length
        )
        reply, payload = await self._client.request(request, timeout=_READ_S)
        if not isinstance(reply, ReadReply) or payload is None:
            raise WireError(f"a {type(reply).__name__} is no part of a file")
        return bytes(payload)


class Sources:
    """Connects to peers by their id."""

    def __init__(self, context: zmq.asyncio.Context, keys: KeyPair, book: AddressBook) -> None:
        self._context = context
        self._keys = keys
        self._book = book
        self._codec = control_codec()

    @asynccontextmanager
    async def connect(self, peer: str) -> AsyncIterator[PeerSource]:
        """A connection to ``peer``, closed at the end.

        Raises:
            Unavailable: it is no member, or was never there.
        """
        member = self._book.get(peer)
        if member is None or not member.addresses:
            raise Unavailable(f"peer {peer} is not there")
        client: Client[ControlMessage] = Client(
            self._context,
            self._keys,
            self._codec,
            member.public_key,
            endpoints(member.addresses, member.control_port),
            name=member.name,
        )
        client.start()
        try:
            yield PeerSource(client)
        finally:
            await client.close()
