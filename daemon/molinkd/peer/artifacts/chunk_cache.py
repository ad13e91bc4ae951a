"""Caches verified chunks of model files that peers read slice by slice."""

import asyncio
from collections import OrderedDict

from molink.wire.messages.transfer import ReadRequest
from molinkd.peer.artifacts.model_repository import ModelFiles

#: Maximum number of cached chunks, enough for a few concurrent transfers.
MAX_CHUNKS = 16


class ChunkCache:
    """LRU cache of verified chunks."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[tuple[str, str, int], asyncio.Task[bytes]] = OrderedDict()

    async def read_chunk(self, model_files: ModelFiles, request: ReadRequest) -> bytes:
        """The chunk that ``request`` reads from.

        Raises:
            RequestError: There is no such chunk.
            BrokenModel: The file changed after it was added.
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
