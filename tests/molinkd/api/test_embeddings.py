"""Embeddings of a real ring, in the formats of all routes; rejected requests."""

import asyncio
import base64
import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest
import torch
from aiohttp.test_utils import TestClient

from molink.checkpoint.model_task import ModelTask
from molink.errors import Overloaded, WorkerError
from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from molinkd.api.pooling import embedding_routes
from molinkd.api.pooling.handler import MAX_CONCURRENT
from molinkd.api.pooling.schema import MAX_INPUTS
from tests.support.fake_backend import CONTEXT, FakeBackend
from tests.support.inline_reader import InlineReader
from tests.support.models import make_embedding_model, write_model
from tests.support.ring_backend import RingBackend
from tests.support.stage import Reference

TEXTS = ["a prompt that fills two blocks!", "a fox", "a prompt of more than one fox"]
#: The token that the tokenizer appends.
END = 256
SIZE = 16

Serve = Callable[..., AbstractAsyncContextManager[TestClient]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3", 3)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[float]]:
    """The embeddings of transformers, computed before the model loses its output head."""
    decoder, found = Reference(folder).model.model, []
    for text in TEXTS:
        ids = torch.tensor([[*text.encode(), END]])
        with torch.inference_mode():
            row = decoder(_letters(ids)).last_hidden_state[0, -1]
        found.append(torch.nn.functional.normalize(row, dim=0).tolist())
    make_embedding_model(folder)
    return found


def _letters(ids: torch.Tensor) -> torch.Tensor:
    """Token ids of the bytes in a small model's vocabulary, which is in alphabetical order."""
    from tokenizers import pre_tokenizers

    # The printable letters are themselves in GPT-2's alphabet; a space is Ġ.
    order = {
        letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    return torch.tensor(
        [[one if one == END else order["Ġ" if one == 32 else chr(one)] for one in ids[0].tolist()]]
    )


@pytest.fixture(scope="module", params=[1, 2])
def ring(folder: Path, expected: list[list[float]], request: pytest.FixtureRequest) -> RingBackend:
    return RingBackend(folder, parts=request.param)


@pytest.fixture
def url(ring: RingBackend) -> Iterator[str]:
    server = EndpointServer(ring, ApiSettings(), InlineReader)
    server.start(0)
    yield server.url
    server.stop()


@pytest.fixture
def ask(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client:
        yield client


def assert_close(found: list[list[float]], expected: list[list[float]]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=0)


def test_embeddings_of_transformers(
    ask: openai.OpenAI, expected: list[list[float]], ring: RingBackend
) -> None:
    # Base64, which is what OpenAI's client asks for by default. The second time, all blocks but the
    # last one are cached.
    for _ in range(2):
        answer = ask.embeddings.create(model="tiny", input=TEXTS)
        assert [one.index for one in answer.data] == [0, 1, 2]
        assert_close([one.embedding for one in answer.data], expected)
        tokens = sum(len(text) + 1 for text in TEXTS)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens
    plain = ask.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    assert [one.embedding for one in plain.data] == [one.embedding for one in answer.data]
    ids = [list(request.prompt_token_ids) for request in ring.asked[-3:]]
    assert all(one[-1] == END for one in ids)
    for given in (ids, ids[0]):
        found = ask.embeddings.create(model="tiny", input=given)
        assert found.data[0].embedding == plain.data[0].embedding
    one = ask.embeddings.create(model="tiny", input=TEXTS[1])
    assert_close([one.data[0].embedding], expected[1:2])


def test_dimensions(ask: openai.OpenAI, expected: list[list[float]]) -> None:
    short = ask.embeddings.create(model="tiny", input=TEXTS, dimensions=5)
    for found, whole in zip(short.data, expected, strict=True):
        length = math.hypot(*whole[:5])
        assert_close([found.embedding], [[number / length for number in whole[:5]]])


def test_ollama(url: str, expected: list[list[float]], ring: RingBackend) -> None:
    client = ollama.Client(host=url.removesuffix("/v1"))
    answer = client.embed("tiny:latest", TEXTS)
    assert_close([list(one) for one in answer.embeddings], expected)
    assert answer.model == "tiny"
    assert answer.prompt_eval_count == sum(len(text) + 1 for text in TEXTS)
    assert answer.total_duration is not None
    assert_close([list(client.embeddings("tiny", TEXTS[1]).embedding)], expected[1:2])
    assert client.embed("tiny", "").embeddings == []
    assert client.show("tiny").capabilities == ["embedding"]
    # Texts are truncated to the context, but the final token is kept.
    most = ring.context - 1
    client.embed("tiny", ["x" * 100_000], truncate=True)
    ids = ring.asked[-1].prompt_token_ids
    assert (len(ids), ids[-1]) == (most, END)
    with pytest.raises(ollama.ResponseError, match=f"{most + 2} tokens, and tiny takes {most}"):
        client.embed("tiny", "x" * (most + 1), truncate=False)
    client._client.close()


@pytest.fixture
def embedder(model_folder: Path) -> FakeBackend:
    return FakeBackend(model_folder, task=ModelTask("embed"), hidden_size=SIZE)


async def problem(response: Any, status: int = 400) -> dict[str, Any]:
    body = await response.json()
    assert response.status == status, body
    return body["error"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", ""]}, "input"),
    ({"input": ["a", 5]}, "input[1]"),
    ({"input": [5, "a"]}, "input[0]"),
    ({"input": [[]]}, "input[0]"),
    ({"input": [[5], [-1]]}, "input[1]"),
    ({"input": [99999]}, "input"),
    ({"input": [[1], [10**30]]}, "input"),
    ({"input": [True]}, "input[0]"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
    ({"input": "x" * 100_000}, "input"),
    ({"input": [1] * CONTEXT}, "input"),
    ({"input": ["a", [1] * CONTEXT]}, "input[1]"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "encoding_format": 5}, "encoding_format"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 1.5}, "dimensions"),
    ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
    ({"input": "a", "dimensions": 10**30}, "dimensions"),
    ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"input": "a", "priority": "high"}, "priority"),
    ({"input": "a", "timeout": 0}, "timeout"),
    ({"input": "a", "cache_salt": ""}, "cache_salt"),
    ({"input": "a", "model": 5}, "model"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_bad_bodies(
    serve: Serve, embedder: FakeBackend, body: dict[str, Any], param: str
) -> None:
    async with serve(embedder) as client:
        error = await problem(await client.post("/v1/embeddings", json=body))
        assert error["param"] == param
        assert f"`{param}`" in error["message"]
    assert embedder.requests == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/embed", {"model": "tiny", "input": 5}),
        ("/api/embed", {"model": "tiny", "input": [5]}),
        ("/api/embed", {"model": "tiny", "input": ["a", ""]}),
        ("/api/embed", {"model": "tiny", "input": "a", "dimensions": -1}),
        ("/api/embed", {"model": "tiny", "input": "a", "truncate": "yes"}),
        ("/api/embeddings", {"model": "tiny", "prompt": ["a"]}),
        ("/api/embeddings", {"model": "tiny", "prompt": "a", "options": 5}),
    ],
)
async def test_bad_bodies_of_ollama(
    serve: Serve, embedder: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    async with serve(embedder) as client:
        response = await client.post(path, json=body)
        assert response.status == 400
        assert isinstance((await response.json())["error"], str)


async def test_models_of_the_wrong_kind(
    serve: Serve, client: TestClient, embedder: FakeBackend
) -> None:
    for path, field in (
        ("/v1/embeddings", "input"),
        ("/api/embed", "input"),
        ("/api/embeddings", "prompt"),
    ):
        response = await client.post(path, json={"model": "tiny", field: "x"})
        assert response.status == 400
        assert "`model`: tiny is not an embedding model" in await response.text()
    said = [{"role": "user", "content": "hi"}]
    async with serve(embedder) as other:
        for path, body in (
            ("/v1/chat/completions", {"messages": said}),
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/responses", {"input": "hi"}),
            ("/v1/messages", {"messages": said, "max_tokens": 5}),
            ("/api/chat", {"model": "tiny", "messages": said}),
            ("/api/generate", {"model": "tiny", "prompt": "hi"}),
        ):
            response = await other.post(path, json=body)
            assert response.status == 400, path
            assert "tiny is an embedding model: it writes no answers" in await response.text()
    assert embedder.requests == []


async def test_scheduling_fields(serve: Serve, embedder: FakeBackend) -> None:
    settings = ApiSettings(api_keys={"ann": "a" * 24, "bob": "b" * 24})
    fields = {"priority": -2, "max_queue_time": 3.0, "timeout": 9.0, "cache_salt": "s"}
    async with serve(embedder, settings) as client:
        for key in ("a", "b"):
            headers = {"Authorization": f"Bearer {key * 24}"}
            body = {"input": "a", **fields, "user": "u"}
            response = await client.post("/v1/embeddings", json=body, headers=headers)
            assert response.status == 200
            assert "X-Molink-Ignored-Fields" not in response.headers
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status == 401
    first, second = embedder.requests
    assert (first.priority, first.max_queue_s, first.max_tokens) == (-2, 3.0, 1)
    assert 0 < first.deadline_s <= 9
    assert first.cache_salt != second.cache_salt
    assert first.client != second.client


async def test_a_batch_is_sent_piece_by_piece(serve: Serve, embedder: FakeBackend) -> None:
    embedder.gate = asyncio.Semaphore(0)
    texts = [f"text {index}" for index in range(MAX_CONCURRENT + 8)]
    async with serve(embedder) as client:
        body = {"input": texts, "encoding_format": "base64"}
        asked = asyncio.create_task(client.post("/v1/embeddings", json=body))
        await embedder.until_running(MAX_CONCURRENT)
        assert len(embedder.requests) == MAX_CONCURRENT
        for _ in texts:
            embedder.gate.release()
        found = (await (await asked).json())["data"]
    for text, one in zip(texts, found, strict=True):
        row = array("f", embedder.row(embedder.tokenizer.encode(text), SIZE))
        vector = array("f", base64.b64decode(one["embedding"], validate=True))
        assert vector == array("f", [number / math.hypot(*row) for number in row])
    assert (embedder.running, embedder.closed) == (0, len(texts))


async def test_a_client_that_goes_away_cancels_all(serve: Serve, embedder: FakeBackend) -> None:
    embedder.gate = asyncio.Semaphore(0)
    async with serve(embedder) as client:
        body = {"input": ["a"] * 100}
        asked = asyncio.create_task(client.post("/v1/embeddings", json=body))
        await embedder.until_running(MAX_CONCURRENT)
        asked.cancel()
        await embedder.until_running(0)
    assert len(embedder.requests) == MAX_CONCURRENT


async def test_an_error_ends_the_others(serve: Serve, embedder: FakeBackend) -> None:
    embedder.error = Overloaded("full", 7.0)
    async with serve(embedder) as client:
        response = await client.post("/v1/embeddings", json={"input": ["a"] * 50})
        assert (await problem(response, 429))["code"] == "overloaded"
        assert response.headers["Retry-After"] == "7"
    assert embedder.running == 0
    assert len(embedder.requests) <= MAX_CONCURRENT


async def test_a_time_limit(serve: Serve, embedder: FakeBackend) -> None:
    embedder.gate = asyncio.Semaphore(0)
    async with serve(embedder) as client:
        response = await client.post("/v1/embeddings", json={"input": "a", "timeout": 0.2})
        assert "within 0.2 s" in (await problem(response, 504))["message"]
    assert embedder.running == 0


async def test_large_answers_are_refused_before_any_work(
    serve: Serve, embedder: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_routes, "MAX_ANSWER_BYTES", 10 * SIZE * 6)
    async with serve(embedder) as client:
        for form, most in (("base64", 10), ("float", 2)):
            body = {"input": ["a"] * (most + 1), "encoding_format": form}
            error = await problem(await client.post("/v1/embeddings", json=body))
            assert f"at most {most}" in error["message"]
            body["input"] = ["a"] * most
            assert (await client.post("/v1/embeddings", json=body)).status == 200


async def test_a_pipeline_without_rows(serve: Serve, embedder: FakeBackend) -> None:
    """PCs of another version send only a token, or a row of another model's size."""
    async with serve(embedder) as client:
        embedder.row = lambda ids, size: b""  # type: ignore[method-assign]
        response = await client.post("/v1/embeddings", json={"input": "a"})
        assert "another version" in (await problem(response, 500))["message"]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_an_error(number: float) -> None:
    row = array("f", [1.0, number]).tobytes()
    with pytest.raises(WorkerError, match="not finite"):
        embedding_routes.normalize_row(row, 2, 2)
