"""A request's body: read within bounds of size and time."""

import asyncio

from aiohttp import web

from molink.errors import RequestError
from molinkd.api.api_settings import ApiSettings
from molinkd.api.problem import Problem, ProblemError


class BodyReader:
    """Reads bodies. Each has to come at some pace, and only so many may be under way at once.

    What is late most goes first where there are too many: a client that sends on purpose a byte
    now and then is soon later than any that only has a slow line.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        #: One for each body that has not arrived completely; its time is when that is too late.
        self._deadlines: set[asyncio.Timeout] = set()

    async def read_body(self, request: web.Request) -> bytes:
        """The body of ``request``.

        Raises:
            ProblemError: it is too large, or comes too slowly.
            RequestError: it is damaged.
            ConnectionError: the client has gone.
        """
        settings, content = self._settings, request.content
        if request.transport is None:  # aiohttp would call it a RuntimeError
            raise ConnectionResetError("the client has gone")
        if (request.content_length or 0) > settings.max_body_bytes:
            raise _too_large(settings)
        begin = asyncio.get_running_loop().time() + settings.body_timeout_s
        data = bytearray()
        try:
            async with asyncio.timeout_at(begin) as deadline:
                if not content.is_eof():
                    self._admit_body(deadline)
                async for chunk in content.iter_any():
                    data += chunk
                    if len(data) > settings.max_body_bytes:
                        raise _too_large(settings)
                    deadline.reschedule(begin + len(data) / settings.min_body_rate)
        except TimeoutError:
            text = (
                f"the body came too slowly: send at least {settings.min_body_rate} bytes per second"
            )
            raise ProblemError(Problem(408, text, code="timeout")) from None
        except web.RequestPayloadError as error:
            raise RequestError(f"the body is damaged: {error}") from None
        finally:
            self._deadlines.discard(deadline)
        return bytes(data)

    def drop_slowest(self) -> bool:
        """Give up the body that is late most; ``False`` if none is under way."""
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


def _too_large(settings: ApiSettings) -> ProblemError:
    return ProblemError(
        Problem(
            413,
            f"the body is larger than {settings.max_body_bytes} bytes",
            code="request_too_large",
        )
    )
