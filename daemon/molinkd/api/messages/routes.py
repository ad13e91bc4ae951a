"""The handlers of ``/v1/messages``."""

from aiohttp import web
from msgspec import json

from molinkd.api.body import Bodies
from molinkd.api.generator import ClientRequest, Generator, json_answer
from molinkd.api.messages.formats import MessageFormat
from molinkd.api.messages.schema import NAMES, CountRequest, MessageRequest
from molinkd.api.schema import decode_struct

#: Where its routes are.
MESSAGES = "/v1/messages"


class MessageRoutes:
    """``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

    def __init__(self, bodies: Bodies, generator: Generator) -> None:
        self._bodies = bodies
        self._generator = generator

    @property
    def table(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            web.post(MESSAGES, self.create),
            web.post(f"{MESSAGES}/count_tokens", self.count),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/messages``."""
        asked = decode_struct(await self._bodies.read(request), MessageRequest)
        ask = ClientRequest(asked.as_openai(), MessageFormat, bool(asked.stream), names=NAMES)
        return await self._generator.answer(request, ask)

    async def count(self, request: web.Request) -> web.Response:
        """``POST /v1/messages/count_tokens``."""
        asked = decode_struct(await self._bodies.read(request), CountRequest)
        ask = ClientRequest(asked.as_openai(), MessageFormat, False, names=NAMES)
        tokens = await self._generator.prompt_tokens(request, ask)
        return json_answer(json.encode({"input_tokens": tokens}))
