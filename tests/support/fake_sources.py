"""Sources of a model's files, without sockets."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from molink.checkpoint.manifest import CHUNK_BYTES
from molink.errors import Unavailable
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.artifacts.sources import Source


class RepositorySource:
    """A peer that serves a repository's files, chunk by chunk."""

    def __init__(self, library: ModelRepository) -> None:
        self.library = library

    async def read_manifest(self, root: str, offset: int) -> tuple[int, bytes]:
        raw = self.library.require_model(root).manifest.raw
        return len(raw), raw[offset : offset + CHUNK_BYTES]

    async def read_parts(self, root: str) -> bytes:
        held = self.library.require_model(root)
        return held.manifest.encode_bitfield(held.ranges)

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        return self.library.require_model(root).read_chunk(part, index)

    async def read_slice(self, root: str, part: str, index: int, begin: int, length: int) -> bytes:
        return (await self.read_chunk(root, part, index))[begin : begin + length]


def connect_to(
    peers: Mapping[str, Source], connected: list[str]
) -> Callable[[str], AbstractAsyncContextManager[Source]]:
    """How a store connects to ``peers``; ``connected`` has whom it asked for, in order."""

    @asynccontextmanager
    async def connect(peer: str) -> AsyncIterator[Source]:
        connected.append(peer)
        if peer not in peers:
            raise Unavailable(f"{peer} is offline")
        yield peers[peer]

    return connect
