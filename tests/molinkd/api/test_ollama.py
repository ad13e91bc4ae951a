"""Ollama's routes: its own client against a real endpoint, and rejected fields."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from aiohttp.test_utils import TestClient

from molink.errors import Unavailable
from molinkd.api.http_server import EndpointServer
from tests.molinkd.cli.top.swarms import GB, ring
from tests.support.fake_backend import CONTEXT, FakeBackend

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def ask(endpoint: EndpointServer) -> Iterator[ollama.Client]:
    client = ollama.Client(host=endpoint.url.removesuffix("/v1"))
    yield client
    client._client.close()


def test_models(ask: ollama.Client, backend: FakeBackend) -> None:
    backend.parameters, backend.quantization = 8_190_000_000, "none (bf16)"
    backend.swarm = ring(["attic", "desk"], model="tiny")
    listed = ask.list().models[0]
    assert listed.model == "tiny"
    assert listed.details is not None
    assert listed.details.parameter_size == "8.2B"
    assert listed.details.quantization_level == "BF16"
    assert ask.show("tiny:latest").modelinfo == {
        "general.architecture": "unknown",
        "general.parameter_count": 8_190_000_000,
        "unknown.context_length": CONTEXT,
    }
    running = ask.ps().models[0]
    assert running.context_length == CONTEXT
    assert running.size_vram == 6 * GB  # two cards with 3 GB of weights each


def test_sampling_defaults_are_shown_as_parameters(ask: ollama.Client, model_folder: Path) -> None:
    path = model_folder / "generation_config.json"
    path.write_text('{"temperature": 0.7, "top_k": 20}', encoding="utf-8")
    try:
        assert ask.show("tiny").parameters == "temperature 0.7\ntop_k 20"
    finally:
        path.unlink()


def test_chat(ask: ollama.Client, backend: FakeBackend) -> None:
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "seed": 3,
        "repeat_penalty": 1.1,
        "num_ctx": 4096,
        "num_gpu": 1,
    }
    answer = ask.chat("tiny", HI, options=options, keep_alive="5m", logprobs=True, top_logprobs=1)
    assert answer.message.role == "assistant"
    assert answer.message.content
    assert backend.answer.startswith(answer.message.content)
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", 7)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 7
    request = backend.requests[0]
    sampling = request.sampling_params
    assert answer.prompt_eval_count == len(request.prompt_token_ids)
    assert request.max_tokens == 7
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 4, 0.9)
    assert (sampling.seed, sampling.repetition_penalty) == (3, 1.1)
    durations = (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
    assert all(isinstance(one, int) and one > 0 for one in durations)
    assert answer.total_duration is not None
    assert sum(one or 0 for one in durations) <= answer.total_duration + 3


def test_a_stream(ask: ollama.Client, backend: FakeBackend) -> None:
    chunks = list(ask.chat("tiny", HI, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == backend.answer
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].done_reason == "stop"
    assert chunks[-1].eval_count == len(backend.tokenizer.encode(backend.answer)) + 1
    # Without a limit the answer may use the whole context.
    request = backend.requests[0]
    assert request.max_tokens == CONTEXT - len(request.prompt_token_ids)


def test_generate(ask: ollama.Client, backend: FakeBackend) -> None:
    answer = ask.generate("tiny", "hi", system="Be brief.", options={"stop": [" there"]})
    assert answer.response == "Hello"
    text = backend.tokenizer.decode(backend.requests[0].prompt_token_ids, skip_special=False)
    assert text.startswith("<|start|>system\nBe brief.<|end|>\n<|start|>user\nhi<|end|>\n")
    raw = "".join(part.response or "" for part in ask.generate("tiny", "x", raw=True, stream=True))
    assert raw == backend.answer
    assert backend.requests[1].prompt_token_ids == tuple(backend.tokenizer.encode("x"))


async def test_the_asynchronous_client(endpoint: EndpointServer, backend: FakeBackend) -> None:
    client = ollama.AsyncClient(host=endpoint.url.removesuffix("/v1"))
    answer = await client.chat("tiny", HI)
    assert answer.message.content == backend.answer
    await client._client.aclose()


def test_errors(ask: ollama.Client, backend: FakeBackend) -> None:
    with pytest.raises(ollama.ResponseError, match="model 'llama3' not found") as missing:
        ask.chat("llama3", HI)
    assert missing.value.status_code == 404
    backend.error = Unavailable("the pipeline broke")
    with pytest.raises(ollama.ResponseError, match="the pipeline broke"):
        ask.chat("tiny", HI)
    backend.fail_at = 2
    with pytest.raises(ollama.ResponseError, match="the pipeline broke"):
        list(ask.chat("tiny", HI, stream=True))


async def test_a_client_that_only_loads(client: TestClient, backend: FakeBackend) -> None:
    for route, body, reason in (
        ("generate", {}, "load"),
        ("chat", {"messages": []}, "load"),
        ("generate", {"keep_alive": 0}, "unload"),
    ):
        response = await client.post(f"/api/{route}", json={"model": "tiny", **body})
        answer = await response.json()
        assert (answer["done"], answer["done_reason"]) == (True, reason)
    assert backend.requests == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Origin": "https://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 415),
    ],
)
async def test_content_types(client: TestClient, headers: dict[str, str], status: int) -> None:
    body = json.dumps({"model": "tiny", "messages": HI, "stream": False}).encode()
    response = await client.post(
        "/api/chat", data=body, headers=headers, skip_auto_headers=["Content-Type"]
    )
    assert response.status == status, await response.text()
    if status != 200:
        assert isinstance((await response.json())["error"], str)


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, "images"),
        ("chat", {"messages": [{"role": "pope", "content": "x"}]}, "role"),
        ("chat", {"messages": [{"role": "user"}]}, r"messages\[0\].content"),
        ("chat", {"messages": HI, "options": {"temperature": 9}}, "options.temperature"),
        ("chat", {"messages": HI, "options": {"stop": ["x"] * 17}}, "options.stop"),
        ("chat", {"messages": HI, "options": {"num_predict": 1.5}}, "options.num_predict"),
        ("chat", {"messages": HI, "top_logprobs": 3}, "top_logprobs"),
        ("generate", {"prompt": "x", "context": [1]}, "context"),
        ("generate", {"prompt": "x", "template": "y"}, "template"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("generate", {"prompt": "word " * 5000}, "`prompt`"),
        ("show", {}, "model"),
    ],
)
async def test_bad_fields_are_named(
    client: TestClient, route: str, body: dict[str, Any], field: str
) -> None:
    response = await client.post(f"/api/{route}", json=body)
    assert response.status == 400
    with pytest.raises(AssertionError, match=field):
        raise AssertionError((await response.json())["error"])


async def test_closing_a_stream_cancels_it(client: TestClient, backend: FakeBackend) -> None:
    backend.gate = asyncio.Semaphore(1)
    response = await client.post("/api/chat", json={"model": "tiny", "messages": HI})
    assert response.headers["Content-Type"].startswith("application/x-ndjson")
    await response.content.readline()
    response.close()
    await asyncio.wait_for(backend.until_running(0), 60)
