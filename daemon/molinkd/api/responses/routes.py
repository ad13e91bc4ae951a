"""The handler of ``/v1/responses``."""

from aiohttp import web

from molinkd.api.body_reader import BodyReader
from molinkd.api.generation_handler import ClientRequest, GenerationHandler
from molinkd.api.openai.encoder import ResponseEncoder
from molinkd.api.openai.schema import decode_struct
from molinkd.api.request_plan import RequestPlan
from molinkd.api.responses.encoder import ResponsesEncoder
from molinkd.api.responses.schema import FIELD_NAMES, ResponseRequest


class ResponseRoutes:
    """``POST /v1/responses``."""

    def __init__(self, bodies: BodyReader, generator: GenerationHandler) -> None:
        self._body_reader = bodies
        self._handler = generator

    @property
    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        return [web.post("/v1/responses", self.create_response)]

    async def create_response(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/responses``."""
        body = decode_struct(await self._body_reader.read_body(request), ResponseRequest)

        def form(plan: RequestPlan) -> ResponseEncoder:
            return ResponsesEncoder(plan, body)

        client_request = ClientRequest(
            body.as_openai(), form, bool(body.stream), field_names=FIELD_NAMES
        )
        return await self._handler.handle_request(request, client_request)
