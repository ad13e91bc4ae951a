"""Invalid requests get a status and an envelope that names the field."""

import asyncio
import io
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from molink.errors import ModelNotFound, NotAuthorized, Overloaded, Unavailable, WorkerError
from molink.text.chat_template import ChatTemplate
from molink.text.tokenizer import Tokenizer
from molinkd.api import request_plan
from molinkd.api.api_settings import ApiSettings
from tests.support.fake_backend import FakeBackend

HI = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}


async def problem(response: Any, status: int) -> dict[str, Any]:
    text = await response.text()
    assert response.status == status, text
    assert response.content_type == "application/json"
    body = await response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "Traceback" not in text
    return body["error"]


#: More optional keys than the compiler tries at once.
MANY_KEYS = {"type": "object", "properties": {f"p{n}": {} for n in range(3000)}}
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "pope", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 100}, "n"),
    ({"n": 1000}, "n"),
    ({"seed": "x"}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_k": 2**31}, "top_k"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {str(index): 1 for index in range(257)}}, "logit_bias"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(2, 66))}, "stop_token_ids"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 5}, "stream_options"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format.json_schema.schema",
    ),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"guided_json": {"$ref": "http://127.0.0.1:1/x.json"}}, "guided_json"),
    ({"guided_json": {"$ref": "#"}}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": MANY_KEYS}, "guided_json"),
    ({"guided_regex": "[a"}, "guided_regex"),
    ({"guided_regex": "((((((a{100}){100}){100}){100}){100}){100})"}, "guided_regex"),
    ({"guided_regex": "a" * 200_000}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: start"}, "guided_grammar"),
    ({"guided_grammar": "root ::= " + "(" * 5000}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"chat_template": "x"}, "chat_template"),
    ({"echo": True}, "echo"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT, ids=lambda value: str(value)[:60])
async def test_bad_fields_of_a_chat(client: TestClient, fields: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "messages": HI, **fields}
    error = await problem(await client.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split(".")[0].split("[")[0] in error["message"]


#: Fields of a request that take any number, and whether 0 is valid.
FLOATS = {
    "temperature": True,
    "top_p": True,
    "min_p": True,
    "presence_penalty": True,
    "frequency_penalty": True,
    "repetition_penalty": False,
    "timeout": False,
    "max_queue_time": False,
}


@pytest.mark.parametrize("field", FLOATS)
async def test_extreme_numbers_are_valid_or_named(client: TestClient, field: str) -> None:
    """A number too small to matter is taken as 0."""
    body = '{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "%s": %s}'
    path = "/v1/chat/completions"
    for number in ("5e-324", "1e-320", "-0.0"):
        answer = await client.post(path, data=body % (field, number), headers=JSON)
        if FLOATS[field]:
            assert answer.status == 200, await answer.text()
        else:
            assert (await problem(answer, 400))["param"] == field
    for number in ("-5", "1e300", "NaN", "Infinity", "-Infinity", "1e999"):
        answer = await client.post(path, data=body % (field, number), headers=JSON)
        assert (await problem(answer, 400))["param"] in (field, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [["a"]]}, "prompt[0]"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 65}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"echo": "yes"}, "echo"),
    ],
    ids=str,
)
async def test_bad_fields_of_a_completion(
    client: TestClient, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "tiny", "prompt": "x", **fields}
    error = await problem(await client.post("/v1/completions", json=body), 400)
    assert error["param"] == param


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b"\xff\xfe",
        b'{"model": "tiny", "model"',
        b'{"model": NaN}',
        b'{"model": "\xff"}',
        b'{"model":"tiny","prompt":"\\ud800","messages":[{"role":"user","content":"\\ud800"}]}',
        b"[" * 100_000,
        b'{"x":' * 50_000,
    ],
    ids=lambda data: repr(data[:24]),
)
async def test_malformed_bodies(client: TestClient, route: str, data: bytes) -> None:
    await problem(await client.post(f"/v1/{route}", data=data, headers=JSON), 400)


async def test_oversized_bodies(client: TestClient) -> None:
    data = io.BytesIO(b'{"model":"' + b"x" * (2 * 2**20) + b'"}')
    error = await problem(await client.post("/v1/completions", data=data, headers=JSON), 413)
    assert error["code"] == "request_too_large"

    async def chunks() -> Any:
        for _ in range(3 * 16):
            yield b" " * 2**16

    await problem(await client.post("/v1/completions", data=chunks(), headers=JSON), 413)


async def test_no_model_served(client: TestClient, backend: Any) -> None:
    backend.list_models = lambda: ()
    for model in ({"model": "tiny"}, {}):
        body = {**model, "messages": HI}
        error = await problem(await client.post("/v1/chat/completions", json=body), 503)
        assert "`molink run MODEL`" in error["message"]


async def test_unknown_models(client: TestClient) -> None:
    for response in (
        await client.post("/v1/chat/completions", json={"model": "gpt-4", "messages": HI}),
        await client.post("/v1/completions", json={"model": "gpt-4", "prompt": "x"}),
        await client.get("/v1/models/gpt-4"),
        await client.get("/v1/models/org/gpt-4"),
    ):
        error = await problem(response, 404)
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        assert "tiny" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "z" * 600}]}, "messages"),
    ],
)
async def test_prompts_that_exceed_the_context(
    client: TestClient, fields: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/chat/completions", json={"model": "tiny", **fields})
    error = await problem(response, 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1", 404),
        ("GET", "/v2/models", 404),
        ("POST", "/v1/nonsense", 404),
        ("GET", "/../../etc/passwd", 404),
        ("DELETE", "/", 405),
    ],
)
async def test_wrong_methods_and_paths(
    client: TestClient, method: str, path: str, status: int
) -> None:
    kwargs: dict[str, Any] = {"json": {}} if method == "POST" else {}
    response = await client.request(method, path, **kwargs)
    error = await problem(response, status)
    assert error["type"] == "invalid_request_error"
    if status == 405:
        assert response.headers["Allow"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("busy", retry_after=2.2), 429, "overloaded"),
        (Unavailable("no pipeline"), 503, "unavailable"),
        (ModelNotFound("gone"), 404, "model_not_found"),
        (NotAuthorized("no"), 403, "forbidden"),
        (WorkerError("died"), 500, "WorkerError"),
        (RuntimeError("secret detail"), 500, "internal"),
        (TimeoutError(), 500, "internal"),
    ],
)
async def test_errors_of_the_backend(
    client: TestClient,
    backend: Any,
    stream: bool,
    n: int,
    error: Exception,
    status: int,
    code: str,
) -> None:
    backend.error = error
    body = {"model": "tiny", "messages": HI, "stream": stream, "n": n}
    response = await client.post("/v1/chat/completions", json=body)
    envelope = await problem(response, status)
    assert envelope["code"] == code
    assert "secret" not in envelope["message"]
    if status == 429:
        assert response.headers["Retry-After"] == "3"
    assert backend.running == 0


async def test_an_error_after_the_stream_began(client: TestClient, backend: Any) -> None:
    for error, shown in ((Unavailable("the pipeline broke"), True), (KeyError("secret"), False)):
        backend.error, backend.fail_at = error, 3
        body = {"model": "tiny", "messages": HI, "stream": True}
        response = await client.post("/v1/chat/completions", json=body)
        text = await response.text()
        last = text.strip().split("\n\n")[-1]
        assert response.status == 200
        assert last.startswith('event: error\ndata: {"error":{')
        assert ("the pipeline broke" in last) == shown
        assert "secret" not in text


async def test_an_incomplete_answer_is_an_error(client: TestClient, backend: Any) -> None:
    backend.tokens = []
    body = {"model": "tiny", "prompt": "x", "ignore_eos": True}
    await problem(await client.post("/v1/completions", json=body), 500)


async def test_a_body_that_never_arrives(backend: Any, serve: Any) -> None:
    async with serve(backend, ApiSettings(body_timeout_s=0.05)) as slow:
        reader, writer = await asyncio.open_connection("127.0.0.1", slow.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
        )
        assert b" 408 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
async def test_a_text_far_beyond_the_context_is_not_tokenized(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    text = "x" * (16 * 512 + 16 * 1024 + 1)
    field = "prompt" if route == "completions" else "messages"
    body = {field: text if field == "prompt" else [{"role": "user", "content": text}]}
    error = await problem(await client.post(f"/v1/{route}", json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == field


async def test_counts_are_checked_before_any_work(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    monkeypatch.setattr(ChatTemplate, "render_prompt", None)
    tiny = {"role": "user", "content": ""}
    for route, body, param in (
        ("chat/completions", {"messages": [tiny] * 513}, "messages"),
        ("chat/completions", {"messages": HI, "n": 65}, "n"),
        ("completions", {"prompt": ["x"] * 65}, "prompt"),
        ("completions", {"prompt": ["x"] * 33, "n": 2}, "n"),
        ("completions", {"prompt": [[5]] * 65, "echo": True}, "prompt"),
    ):
        error = await problem(await client.post(f"/v1/{route}", json=body), 400)
        assert error["param"] == param


async def test_echo_is_bounded_over_all_answers(
    client: TestClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_plan, "MAX_ECHO_CHARACTERS", 100)
    body = {"prompt": "x" * 50, "echo": True, "max_tokens": 1}
    assert (await client.post("/v1/completions", json=body | {"n": 2})).status == 200
    error = await problem(await client.post("/v1/completions", json=body | {"n": 3}), 400)
    assert error["param"] == "echo"
    assert (await client.post("/v1/completions", json=body | {"n": 3, "echo": False})).status == 200
