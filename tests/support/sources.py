"""Peers that a model's files are fetched from, without sockets."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from molink.checkpoint.manifest import CHUNK_BYTES
from molink.errors import Unavailable
from molinkd.peer.artifacts.library import Library
from molinkd.peer.artifacts.suppliers import Source


class LibrarySource:
    """A peer that answers from a library, chunk by chunk."""

    def __init__(self, library: Library) -> None:
        self.library = library

    async def manifest(self, root: str, offset: int) -> tuple[int, bytes]:
        raw = self.library.held(root).manifest.raw
        return len(raw), raw[offset : offset + CHUNK_BYTES]

    async def parts(self, root: str) -> bytes:
        held = self.library.held(root)
        return held.manifest.marks(held.places)

    async def read(self, root: str, part: str, index: int) -> bytes:
        return self.library.held(root).read(part, index)

    async def read_slice(self, root: str, part: str, index: int, begin: int, length: int) -> bytes:
        return (await self.read(root, part, index))[begin : begin + length]


def connect_to(
    peers: Mapping[str, Source], connected: list[str]
) -> Callable[[str], AbstractAsyncContextManager[Source]]:
    """How a store connects to ``peers``; ``connected`` has whom it asked for, in order."""

    @asynccontextmanager
    async def connect(peer: str) -> AsyncIterator[Source]:
        connected.append(peer)
        if peer not in peers:
            raise Unavailable(f"{peer} is not there")
        yield peers[peer]

    return connect
