"""Bounds the memory that requests with images take in the endpoint."""

from aiohttp import web

from molink.errors import Overloaded

_HELD_BYTES = web.RequestKey("image_bytes", int)


class ImageMemory:
    """Counts large bodies and pixels, from their arrival until their request is answered.

    A small body may decode to many pixels, and requests wait while there is no pipeline.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def add_bytes(self, request: web.BaseRequest, count: int) -> None:
        """Count ``count`` more bytes for ``request``; fewer if it is negative.

        Raises:
            Overloaded: they are too many with those of other requests.
        """
        if count > 0 and self._num_bytes + count > self._max_bytes:
            raise Overloaded("the images of other requests take all memory for images", 1.0)
        self._num_bytes += count
        request[_HELD_BYTES] = request.get(_HELD_BYTES, 0) + count

    def release_request(self, request: web.BaseRequest) -> None:
        """Forget the bytes of a request that is answered."""
        self._num_bytes -= request.pop(_HELD_BYTES, 0)
