"""Reads request bodies within limits of size, rate and concurrency."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from molink.errors import RequestError
from molinkd.api.api_settings import ApiSettings
from molinkd.api.ignored_fields import IgnoredFieldsReporter
from molinkd.api.image_memory import ImageMemory
from molinkd.api.openai.schema import decode_body
from molinkd.api.problem import Problem, ProblemError

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class BodyReader:
    """Reads bodies at a minimum rate, with a limited number at once.

    Above the limit the body that is furthest behind is dropped. A slowloris client falls behind
    sooner than one on a slow line.
    """

    def __init__(
        self, settings: ApiSettings, image_memory: ImageMemory, sees_images: Callable[[], bool]
    ) -> None:
        """``sees_images`` tells whether a served model takes images, so that bodies are larger.

        These count in ``image_memory``.
        """
        self._settings = settings
        self._sees_images = sees_images
        self._image_memory = image_memory
        #: One timeout for each incomplete body; it expires when the body is too late.
        self._deadlines: set[asyncio.Timeout] = set()
        self._ignored_fields = IgnoredFieldsReporter()

    async def decode_request(self, request: web.Request, kind: type[BodyT]) -> BodyT:
        """Read the body of ``request``, decode it into ``kind`` and report ignored fields.

        Raises:
            RequestError: as :func:`~molinkd.api.openai.schema.decode_body`.
            ProblemError, ConnectionError: as :meth:`read_body`.
        """
        data = await self.read_body(request)
        body = decode_body(data, kind)
        self._ignored_fields.report_fields(request, data, body)
        return body

    async def read_body(self, request: web.Request) -> bytes:
        """Read the body of ``request``.

        Raises:
            ProblemError: the body is too large or arrives too slowly.
            Overloaded: others' images take all memory.
            RequestError: the body is malformed.
            ConnectionError: the client disconnected.
        """
        settings, content = self._settings, request.content
        if request.transport is None:  # aiohttp would raise RuntimeError
            raise ConnectionResetError("the client disconnected")
        limit = self._max_bytes
        if (request.content_length or 0) > limit:
            raise _too_large(limit)
        begin, is_large = asyncio.get_running_loop().time() + settings.body_timeout_s, False
        data = bytearray()
        try:
            async with asyncio.timeout_at(begin) as deadline:
                if not content.is_eof():
                    self._admit_body(deadline)
                async for chunk in content.iter_any():
                    data += chunk
                    if len(data) > limit:
                        raise _too_large(limit)
                    if not is_large and len(data) > settings.max_body_bytes:
                        self._image_memory.add_bytes(request, limit)
                        is_large = True
                    deadline.reschedule(begin + len(data) / settings.min_body_rate)
        except TimeoutError:
            text = (
                f"the body arrived too slowly: send at least {settings.min_body_rate} bytes "
                "per second"
            )
            raise ProblemError(Problem(408, text, code="timeout")) from None
        except web.RequestPayloadError as error:
            raise RequestError(f"the body is malformed: {error}") from None
        finally:
            self._deadlines.discard(deadline)
        if is_large:
            self._image_memory.add_bytes(request, len(data) - limit)
        return bytes(data)

    @property
    def _max_bytes(self) -> int:
        settings = self._settings
        if not self._sees_images():
            return settings.max_body_bytes
        return max(settings.max_body_bytes, settings.max_image_body_bytes)

    def drop_slowest(self) -> bool:
        """Drop the body that is furthest behind; ``False`` if there is none."""
        waiting = (deadline for deadline in self._deadlines if not deadline.expired())
        latest = min(waiting, key=lambda deadline: deadline.when() or 0.0, default=None)
        if latest is None:
            return False
        self._deadlines.discard(latest)
        latest.reschedule(asyncio.get_running_loop().time())
        return True

    def _admit_body(self, deadline: asyncio.Timeout) -> None:
        if len(self._deadlines) >= self._settings.max_concurrent_bodies:
            self.drop_slowest()
        self._deadlines.add(deadline)


def _too_large(limit: int) -> ProblemError:
    return ProblemError(
        Problem(413, f"the body is larger than {limit} bytes", code="request_too_large")
    )
