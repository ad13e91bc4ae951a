"""The Hugging Face hub as a source of tensors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from molink.checkpoint.hub_reader import HubReader
from molink.errors import Unavailable


class HubSource:
    """A model on the hub at one commit. Manifests come from peers only."""

    def __init__(self, place: str) -> None:
        """``place`` is ``OWNER/NAME@COMMIT``."""
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
