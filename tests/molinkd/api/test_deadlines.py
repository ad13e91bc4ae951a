"""Priority and time limits of requests, in every protocol."""

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from tests.support.fake_backend import FakeBackend

HI = [{"role": "user", "content": "hi"}]
#: A body for each generating route, and the path of its scheduling fields.
ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": HI}, ""),
    "/v1/completions": ({"prompt": "hi", "max_tokens": 99}, ""),
    "/v1/responses": ({"input": "hi"}, ""),
    "/v1/messages": ({"messages": HI, "max_tokens": 99}, ""),
    "/api/chat": ({"messages": HI}, "options"),
    "/api/generate": ({"prompt": "hi"}, "options"),
}
#: The end of a truncated answer, whole and streamed.
CUT = {
    "/v1/chat/completions": ('"finish_reason":"length"', "data: [DONE]"),
    "/v1/completions": ('"finish_reason":"length"', "data: [DONE]"),
    "/v1/responses": ('"reason":"max_output_tokens"', "response.incomplete"),
    "/v1/messages": ('"stop_reason":"max_tokens"', "message_stop"),
    "/api/chat": ('"done_reason":"length"', '"done":true'),
    "/api/generate": ('"done_reason":"length"', '"done":true'),
}


def body_of(path: str, stream: bool = False, **fields: object) -> dict[str, Any]:
    body, inside = ROUTES[path]
    return {**body, "stream": stream, **({inside: fields} if inside else fields)}


class Clock:
    """The running loop's clock, which tests can advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        loop = asyncio.get_running_loop()
        true = loop.time
        monkeypatch.setattr(loop, "time", lambda: true() + self.ahead)


@pytest.mark.parametrize("path", ROUTES)
async def test_the_fields_are_in_every_protocol(
    client: TestClient, backend: FakeBackend, path: str
) -> None:
    body = body_of(path, priority=-3, max_queue_time=2.5, timeout=90)
    answer = await client.post(path, json=body)
    assert answer.status == 200, await answer.text()
    assert (await client.post(path, json=body_of(path))).status == 200
    asked, plain = backend.requests
    assert (asked.priority, asked.max_queue_s) == (-3, 2.5)
    assert 0 < asked.deadline_s <= 90
    assert (plain.priority, plain.max_queue_s, plain.deadline_s) == (0, 0, 0)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout", 0),
        ("timeout", 86401),
        ("timeout", "10s"),
        ("timeout", 5e-324),
        ("max_queue_time", 5e-324),
        ("max_queue_time", -0.0),
        ("max_queue_time", -1),
        ("max_queue_time", 9.9e-4),
        ("priority", 0.5),
    ],
)
async def test_invalid_values_are_rejected(
    client: TestClient, path: str, field: str, value: object
) -> None:
    answer = await client.post(path, json=body_of(path, **{field: value}))
    assert answer.status == 400
    assert f"`{'.'.join(filter(None, (ROUTES[path][1], field)))}`" in await answer.text()


@pytest.mark.parametrize("path", ROUTES)
async def test_openapi_has_them(client: TestClient, path: str) -> None:
    document = await (await client.get("/openapi.json")).json()
    content = document["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schemas = document["components"]["schemas"]
    if ROUTES[path][1]:
        options = schemas[name]["properties"][ROUTES[path][1]]["anyOf"]
        name = next(one["$ref"] for one in options if "$ref" in one).rpartition("/")[2]
    assert {"priority", "max_queue_time", "timeout"} <= schemas[name]["properties"].keys()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
async def test_an_answer_past_its_deadline_is_truncated(
    client: TestClient,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    stream: bool,
) -> None:
    backend.gate, backend.tokens = asyncio.Semaphore(3), backend.tokenizer.encode("abcdefgh")
    clock = Clock(monkeypatch)
    asking = asyncio.create_task(client.post(path, json=body_of(path, stream, timeout=90)))
    await backend.until_running(1)
    await backend.until_given(3)
    clock.ahead = 100
    answer = await asking
    text = await answer.text()
    assert answer.status == 200
    said = "".join(each for each in "abcdefgh" if f'"{each}"' in text) if stream else text
    assert "abc" in said
    assert "abcd" not in said
    for expected in CUT[path] if stream else CUT[path][:1]:
        assert expected in text.replace('": "', '":"'), text
    assert (backend.running, backend.closed) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
async def test_no_token_before_the_deadline_is_an_error(
    client: TestClient,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    stream: bool,
) -> None:
    backend.gate = asyncio.Semaphore(0)
    clock = Clock(monkeypatch)
    asking = asyncio.create_task(client.post(path, json=body_of(path, stream, timeout=5)))
    await backend.until_running(1)
    clock.ahead = 6  # shorter than the keepalive interval
    answer = await asking
    assert answer.status == 504
    assert answer.headers["X-Should-Retry"] == "false"
    assert "no token came within" in await answer.text()
    assert (backend.running, backend.closed) == (0, 1)
    if path == "/v1/chat/completions":
        error = (await answer.json())["error"]
        assert (error["type"], error["code"]) == ("server_error", "timeout")
    if path == "/v1/messages":
        assert (await answer.json())["error"]["type"] == "timeout_error"


async def test_each_of_several_answers_is_truncated(
    client: TestClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.gate = asyncio.Semaphore(3)
    clock = Clock(monkeypatch)
    body = body_of("/v1/completions", timeout=90) | {"n": 2}
    asking = asyncio.create_task(client.post("/v1/completions", json=body))
    await backend.until_running(2)
    await backend.until_given(3)
    clock.ahead = 100
    answer = await (await asking).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert answer["usage"]["completion_tokens"] == 3


async def test_tokenizing_counts_against_the_deadline(
    client: TestClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.count(0, 50)
    monkeypatch.setattr(
        "molinkd.api.generation_handler.time",
        SimpleNamespace(perf_counter=lambda: float(next(times))),
    )
    answer = await client.post("/v1/completions", json={"prompt": "hi", "timeout": 90})
    assert answer.status == 504
    assert "not tokenized within 90 s" in json.loads(await answer.text())["error"]["message"]
    assert not backend.requests
