"""LM Studio's REST routes, as its documentation describes them."""

import json
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

import molink
from tests.support.fake_backend import CONTEXT, FakeBackend

HI: Any = [{"role": "user", "content": "hi"}]


async def fetch(client: TestClient, path: str) -> Any:
    answer = await client.get(path)
    assert answer.status == 200
    return await answer.json()


async def test_models(client: TestClient, backend: FakeBackend) -> None:
    backend.quantization = "Q4_K"
    listed = (await fetch(client, "/api/v0/models"))["data"]
    one = await fetch(client, "/api/v0/models/tiny")
    assert listed == [one]
    assert (one["id"], one["type"], one["state"]) == ("tiny", "llm", "loaded")
    assert (one["quantization"], one["loaded_context_length"]) == ("Q4_K", CONTEXT)
    backend.ready_now = False
    assert (await fetch(client, "/api/v0/models/tiny"))["state"] == "not-loaded"
    assert (await client.get("/api/v0/models/none")).status == 404


async def test_models_and_their_instances(client: TestClient, backend: FakeBackend) -> None:
    backend.quantization, backend.parameters = "Q4_K", 8_190_000_000
    (one,) = (await fetch(client, "/api/v1/models"))["models"]
    assert (one["type"], one["key"], one["params_string"]) == ("llm", "tiny", "8.2B")
    assert one["quantization"]["name"] == "Q4_K"
    assert one["loaded_instances"] == [{"id": "tiny", "config": {"context_length": CONTEXT}}]
    assert one["capabilities"] == {"vision": False, "trained_for_tool_use": False}
    backend.ready_now = False
    (one,) = (await fetch(client, "/api/v1/models"))["models"]
    assert one["loaded_instances"] == []


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("/api/v0/chat/completions", {"messages": HI}), ("/api/v0/completions", {"prompt": "hi"})],
)
async def test_answers_have_statistics(
    path: str, prompt: dict[str, Any], client: TestClient
) -> None:
    # -1 is no limit.
    answer = await client.post(path, json={"model": "tiny", "max_tokens": -1, **prompt})
    found = await answer.json()
    assert found["choices"][0]["finish_reason"] == "stop"
    stats = found["stats"]
    assert stats["stop_reason"] == "eosFound"
    assert stats["time_to_first_token"] > 0
    assert stats["generation_time"] > 0
    assert stats["tokens_per_second"] > 0
    assert found["model_info"]["context_length"] == CONTEXT
    assert found["runtime"]["version"] == molink.__version__
    plain = await client.post(path.replace("/api/v0", "/v1"), json=prompt)
    assert "stats" not in await plain.json()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"max_tokens": 1}, "maxPredictedTokensReached"), ({"stop": "e"}, "stopStringFound")],
)
async def test_streams_end_with_statistics(
    fields: dict[str, Any], reason: str, client: TestClient
) -> None:
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}, **fields}
    answer = await client.post("/api/v0/chat/completions", json=body)
    *_, last, end = (await answer.text()).strip().split("\n\n")
    assert end == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["stats"]["stop_reason"] == reason
