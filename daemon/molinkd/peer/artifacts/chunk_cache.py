"""Chunks of model files that are sent slice by slice: each is read and checked once."""

import asyncio
from collections import OrderedDict

from molink.wire.messages.transfer import ReadRequest
from molinkd.peer.artifacts.model_repository import ModelFiles

#: Chunks that are kept: those of a few transfers.
MAX_CHUNKS = 16


class ChunkCache:
    """The chunks that slices were asked of last."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[tuple[str, str, int], asyncio.Task[bytes]] = OrderedDict()

    async def read_chunk(self, model_files: ModelFiles, request: ReadRequest) -> bytes:
        """The chunk that ``request`` is about.

        Raises:
            RequestError: there is no such chunk.
            BrokenModel: the file has changed since it was added.
        """
        if not request.length:
            return await asyncio.to_thread(model_files.read_chunk, request.part, request.index)
        key = request.root, request.part, request.index
        task = self._chunks.get(key)
        if task is None:
            reading = asyncio.to_thread(model_files.read_chunk, request.part, request.index)
            task = self._chunks[key] = asyncio.create_task(reading)
            while len(self._chunks) > MAX_CHUNKS:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(key)
        try:
            return await asyncio.shield(task)
        except Exception:
            self._chunks.pop(key, None)
            raise
