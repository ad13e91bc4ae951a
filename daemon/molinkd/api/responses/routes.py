"""The handler of ``/v1/responses``."""

from aiohttp import web

from molinkd.api.body import Bodies
from molinkd.api.formats import Format
from molinkd.api.generator import ClientRequest, Generator
from molinkd.api.request_plan import Plan
from molinkd.api.responses.formats import ResponseObjectFormat
from molinkd.api.responses.schema import NAMES, ResponseRequest
from molinkd.api.schema import decode_struct


class ResponseRoutes:
    """``POST /v1/responses``."""

    def __init__(self, bodies: Bodies, generator: Generator) -> None:
        self._bodies = bodies
        self._generator = generator

    @property
    def table(self) -> list[web.RouteDef]:
        """All routes."""
        return [web.post("/v1/responses", self.create)]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/responses``."""
        asked = decode_struct(await self._bodies.read(request), ResponseRequest)

        def form(plan: Plan) -> Format:
            return ResponseObjectFormat(plan, asked)

        ask = ClientRequest(asked.as_openai(), form, bool(asked.stream), names=NAMES)
        return await self._generator.answer(request, ask)
