"""A load detects every way in which an answer can be wrong."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tools.chaos.pc import ListenAddress, Pc
from tools.chaos.streams import End, Load, Slot, describe_circumstances, find_first_wrong
from tools.chaos.swarm import Swarm

PIECES = ("one ", "two ", "three")


def event(content: dict[str, Any]) -> bytes:
    """As it is streamed."""
    return f"data: {json.dumps(content)}\n\n".encode()


class Endpoint(Pc):
    """A PC that is only an endpoint; it follows ``script``, then answers correctly."""

    def __init__(self, home: Path) -> None:
        super().__init__("pc1", home, ListenAddress("", "", 0, 0, 0, (0, 0)), [])
        self.address = ""
        self.script: list[str] = []

    @property
    def url(self) -> str:
        """Where the test's server listens."""
        return self.address

    @property
    def running(self) -> bool:
        """Always."""
        return True

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The next answer of the script."""
        await request.read()
        how = self.script.pop(0) if self.script else "well"
        if how == "refused":
            return web.Response(status=503, text="not now")
        response = web.StreamResponse()
        await response.prepare(request)
        pieces = {"changed": ("one ", "too "), "doubled": ("one ", "one ")}.get(how, PIECES)
        for piece in pieces[:2]:
            await response.write(event({"choices": [{"delta": {"content": piece}}]}))
        if how == "dead":
            self.deaths += 1
        if how in ("cut", "dead"):
            assert request.transport is not None
            request.transport.abort()
            return response
        events: list[dict[str, Any]] = []
        if how == "error":
            events.append({"error": {"message": "it broke"}})
        if how == "well":
            events.append({"choices": [{"delta": {"content": PIECES[2]}}]})
        count = 2 if how == "short" else 3
        events.append({"choices": [], "usage": {"completion_tokens": count}})
        for each in events:
            await response.write(event(each))
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def serving(endpoint: Endpoint) -> AsyncIterator[None]:
    async def ready(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.answer)
    app.router.add_get("/readyz", ready)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    endpoint.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("how", "end", "trouble"),
    [
        ("well", "same", ""),
        ("changed", "changed", "at character 5 'one too ' rather than 'one two three'"),
        ("changed", "changed", "wrong is piece 1, 'too '"),
        ("doubled", "changed", "at character 4"),
        ("short", "lost", "it ended after 2 of 3 tokens"),
        ("refused", "lost", "HTTP 503: not now"),
        ("error", "lost", "it broke"),
        ("cut", "lost", ""),
        ("dead", "endpoint", ""),
    ],
)
async def test_what_became_of_an_answer(tmp_path: Path, how: str, end: End, trouble: str) -> None:
    endpoint = Endpoint(tmp_path)
    swarm = Swarm(tmp_path, 1)
    swarm.pcs = [endpoint]
    async with serving(endpoint):
        # The first answer is the one to learn from.
        endpoint.script = ["well", how]
        async with Load(swarm, 1, tokens=3) as load:
            assert await load.advance(4, 20.0)  # more than one answer has
            await load.finish()
    first, second = load.answers[:2]
    assert (first.end, second.end) == (end, "same")
    assert trouble in first.trouble


def test_the_first_wrong_piece() -> None:
    assert find_first_wrong("one two", [(1.0, "one "), (2.0, "two")]) is None
    assert find_first_wrong("one two", [(1.0, "one ")]) is None
    assert find_first_wrong("one two", [(1.0, "one "), (2.0, "too"), (3.0, "two")]) == 1
    assert find_first_wrong("one two", [(1.0, "one two"), (2.0, "two")]) == 1


def test_who_else_got_the_wrong_piece(tmp_path: Path) -> None:
    pc = Endpoint(tmp_path)
    came = [(10.0, " is"), (10.1, " st"), (11.0, " do"), (11.1, ".")]
    its_own, late, other = Slot(2, pc), Slot(3, pc), Slot(4, pc)
    its_own.recent_pieces.extend([(9.0, " do"), (11.004, " do")])
    late.recent_pieces.append((12.0, " do"))
    other.recent_pieces.append((11.0, " don"))
    told = describe_circumstances(came, 2, 9.5, [its_own, late, other])
    assert told == (
        "wrong is piece 2, ' do', 0.900 s after the one before;"
        " the same piece at stream 2 at pc1 +0.004 s"
    )
    told = describe_circumstances(came, 0, 9.5, [late, other])
    assert told == (
        "wrong is piece 0, ' is', 0.500 s after the one before; the same piece at no other stream"
    )
