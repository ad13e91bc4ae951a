"""A server with enough of OpenAI's API for benchmarks."""

import asyncio
import json
from dataclasses import dataclass, field

from aiohttp import web

#: The template's own tokens, and how many tokens the fake tokenizer makes of a word.
OVERHEAD = 11
PER_WORD = 2


@dataclass
class FakeOpenAI:
    """Answers ``max_tokens`` tokens at once; remembers every request body and key."""

    app: web.Application = field(default_factory=web.Application)
    bodies: list[dict] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    models: list[str] = field(default_factory=lambda: ["toy", "other"])
    with_usage: bool = True
    #: Requests (counted from 1, probes included) that are refused with HTTP 429.
    refused: set[int] = field(default_factory=set)
    #: The n-th request breaks off in its middle.
    cut: set[int] = field(default_factory=set)
    #: Requests from this one on are held until their client disconnects.
    held_from: int = 10**9
    reject_ignore_eos: bool = False

    def __post_init__(self) -> None:
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/chat/completions", self._answer)
        self.app.router.add_post("/v1/completions", self._answer)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": m} for m in self.models]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization"))
        number = len(self.bodies)
        if self.reject_ignore_eos and "ignore_eos" in body:
            return _refuse(400, "unknown field ignore_eos")
        if number in self.refused:
            return _refuse(429, "queues are full")
        if number >= self.held_from:
            await asyncio.Event().wait()
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        tokens = body["max_tokens"]
        usage = {
            "prompt_tokens": len(prompt.split()) * PER_WORD + (OVERHEAD if chat else 0),
            "completion_tokens": tokens,
        }
        if not body.get("stream"):
            return web.json_response({"usage": usage} if self.with_usage else {})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for left in reversed(range(tokens)):
            if number in self.cut and left == 0:
                return response
            await response.write(_event(chat, "length" if left == 0 else None))
        if self.with_usage:
            await response.write(_sse({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(chat: bool, finish: str | None) -> bytes:
    piece: dict[str, object] = {"delta": {"content": "word "}} if chat else {"text": "word "}
    return _sse({"choices": [{"index": 0, "finish_reason": finish, **piece}]})


def _sse(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x"}}, status=status)
