"""The handlers of ``/v1/messages``."""

from dataclasses import dataclass

from aiohttp import web
from msgspec import json

from molinkd.api.anthropic.encoder import MessagesEncoder
from molinkd.api.anthropic.schema import FIELD_NAMES, CountTokensRequest, MessageRequest
from molinkd.api.body_reader import BodyReader
from molinkd.api.generation_handler import ClientRequest, GenerationHandler, json_response

#: Prefix of the routes.
MESSAGES_PREFIX = "/v1/messages"


@dataclass(frozen=True, slots=True)
class MessageRoutes:
    """``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

    body_reader: BodyReader
    handler: GenerationHandler

    @property
    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            web.post(MESSAGES_PREFIX, self.create_message),
            web.post(f"{MESSAGES_PREFIX}/count_tokens", self.count_tokens),
        ]

    async def create_message(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/messages``."""
        body = await self.body_reader.decode_request(request, MessageRequest)
        client_request = ClientRequest(
            body.as_openai(), MessagesEncoder, bool(body.stream), field_names=FIELD_NAMES
        )
        return await self.handler.handle_request(request, client_request)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """``POST /v1/messages/count_tokens``."""
        body = await self.body_reader.decode_request(request, CountTokensRequest)
        client_request = ClientRequest(
            body.as_openai(), MessagesEncoder, False, field_names=FIELD_NAMES
        )
        tokens = await self.handler.count_prompt_tokens(request, client_request)
        return json_response(json.encode({"input_tokens": tokens}))
