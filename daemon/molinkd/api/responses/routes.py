"""The handler of ``/v1/responses``."""

from dataclasses import dataclass

from aiohttp import web

from molinkd.api.body_reader import BodyReader
from molinkd.api.generation_handler import ClientRequest, GenerationHandler
from molinkd.api.openai.encoder import ResponseEncoder
from molinkd.api.request_plan import RequestPlan
from molinkd.api.responses.encoder import ResponsesEncoder
from molinkd.api.responses.schema import FIELD_NAMES, ResponseRequest


@dataclass(frozen=True, slots=True)
class ResponseRoutes:
    """``POST /v1/responses``."""

    body_reader: BodyReader
    handler: GenerationHandler

    @property
    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        return [web.post("/v1/responses", self.create_response)]

    async def create_response(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/responses``."""
        body = await self.body_reader.decode_request(request, ResponseRequest)

        def form(plan: RequestPlan) -> ResponseEncoder:
            return ResponsesEncoder(plan, body)

        client_request = ClientRequest(
            body.as_openai(), form, bool(body.stream), field_names=FIELD_NAMES
        )
        return await self.handler.handle_request(request, client_request)
