"""The Hugging Face hub as one more source of a model's tensors, where the model is from there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from molink.checkpoint.hub_reader import HubReader
from molink.errors import Unavailable


class HubSource:
    """A model on the hub at one commit. What a root stands for only peers know."""

    def __init__(self, place: str) -> None:
        """``place`` is ``OWNER/NAME@COMMIT``."""
        self._parts = HubReader.open_place(place)

    async def read_manifest(self, root: str, offset: int) -> tuple[int, bytes]:
        """Only peers have one."""
        raise Unavailable("the hub has no list of hashes")

    async def read_parts(self, root: str) -> bytes:
        """It has all tensors, and is not asked."""
        raise Unavailable("the hub has no list of hashes")

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        """A chunk of a tensor."""
        return await asyncio.to_thread(self._parts.read_chunk, part, index)

    async def read_slice(self, root: str, part: str, index: int, offset: int, length: int) -> bytes:
        """``length`` bytes of a chunk from ``offset`` on."""
        return await asyncio.to_thread(self._parts.read_chunk, part, index, offset, length)


@asynccontextmanager
async def open_hub_source(place: str) -> AsyncIterator[HubSource]:
    """The hub, which is connected to with each request."""
    yield HubSource(place)
