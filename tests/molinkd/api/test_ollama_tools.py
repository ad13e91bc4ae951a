"""Ollama's routes: tools, reasoning and structured output with its client, whole and streamed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pydantic
import pytest
from aiohttp.test_utils import TestClient

from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from tests.support import tool_templates
from tests.support.fake_backend import FakeBackend
from tests.support.inline_reader import InlineReader
from tests.support.tool_answers import ANSWERS, CALL, HI, PARIS, TOOLS, backend_of, prompt_of


@pytest.fixture(scope="module", params=["thinking", "harmony"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FakeBackend:
    folder = tmp_path_factory.mktemp(request.param) / "tiny"
    return backend_of(folder, tool_templates.ALL[request.param], ANSWERS[request.param])


@pytest.fixture
def ask(family: FakeBackend) -> Iterator[ollama.Client]:
    server = EndpointServer(family, ApiSettings(), InlineReader)
    server.start(0)
    client = ollama.Client(host=server.url.removesuffix("/v1"))
    yield client
    client._client.close()
    server.stop()


def called(message: ollama.Message) -> list[tuple[str, Any]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def test_whole_and_round_trip(ask: ollama.Client, family: FakeBackend) -> None:
    answer = ask.chat("tiny", HI, tools=TOOLS, think=True)
    said = answer.message
    assert (said.thinking, said.content) == ("Hm.", "Let me see.")
    assert called(said) == [("get_weather", {"city": "Paris, é"}), ("now", {})]
    assert answer.done_reason == "stop"
    results = [
        {"role": "tool", "tool_name": "now", "content": "noon"},
        {"role": "tool", "tool_name": "get_weather", "content": "12 degrees"},
    ]
    ask.chat("tiny", [*HI, said, *results], tools=TOOLS)
    prompt = prompt_of(family)
    assert PARIS in prompt
    assert {"noon", "12 degrees"} <= set(prompt.replace('"', "\n").splitlines())
    if "<|channel|>" in prompt:  # this format names the function in each result
        assert prompt.index("functions.get_weather to=") < prompt.index("12 degrees")
        assert prompt.index("12 degrees") < prompt.index("noon")


def test_a_stream(ask: ollama.Client) -> None:
    chunks = list(ask.chat("tiny", HI, tools=TOOLS, stream=True))
    said = [chunk.message for chunk in chunks]
    assert "".join(message.thinking or "" for message in said) == "Hm."
    assert "".join(message.content or "" for message in said) == "Let me see."
    assert [call for message in said for call in called(message)] == [
        ("get_weather", {"city": "Paris, é"}),
        ("now", {}),
    ]
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].done_reason == "stop"


def now(zone: str) -> str:
    """The time.

    Args:
        zone: which
    """
    return zone


def test_python_functions_are_tools(ask: ollama.Client, family: FakeBackend) -> None:
    assert called(ask.chat("tiny", HI, tools=[now]).message) == [("now", {})]
    assert "zone" in prompt_of(family)


def test_reasoning_of_a_prompt(ask: ollama.Client) -> None:
    answer = ask.generate("tiny", "x")
    assert answer.thinking == "Hm."
    assert (answer.response or "").startswith("Let me see.")
    parts = list(ask.generate("tiny", "x", stream=True))
    assert "".join(part.thinking or "" for part in parts) == "Hm."
    assert "".join(part.response or "" for part in parts) == answer.response


def test_a_truncated_call_is_text(ask: ollama.Client, family: FakeBackend) -> None:
    options = {"num_predict": len(family.tokenizer.encode(family.answer.partition("Paris")[0]))}
    answer = ask.chat("tiny", HI, tools=TOOLS, options=options)
    assert called(answer.message) == []
    assert "get_weather({" in (answer.message.content or "")
    assert answer.done_reason == "length"
    chunks = list(ask.chat("tiny", HI, tools=TOOLS, options=options, stream=True))
    text = "".join(chunk.message.content or "" for chunk in chunks)
    assert text == answer.message.content


class Weather(pydantic.BaseModel):
    city: str


def test_structured_output_fields(ask: ollama.Client, family: FakeBackend) -> None:
    whole, family.answer = family.answer, PARIS
    try:
        for form in (Weather.model_json_schema(), "json"):
            said = ask.chat("tiny", HI, format=form).message.content or ""
            assert json.loads(said) == {"city": "Paris, é"}
            assert family.requests[-1].grammar
            said = ask.generate("tiny", "x", format=form, raw=True).response or ""
            assert Weather.model_validate_json(said).city == "Paris, é"
            assert family.requests[-1].grammar
    finally:
        family.answer = whole


def test_capabilities(ask: ollama.Client) -> None:
    assert ask.show("tiny").capabilities == ["completion", "tools", "thinking"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [*TOOLS, TOOLS[1]]}, "tools[2].function.name"),
    ({"format": "xml"}, "format"),
    ({"format": {"type": "text"}}, "format"),
    ({"format": {"not": {}}}, "format"),
    ({"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, "messages[0].images"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
]


@pytest.mark.parametrize(("fields", "field"), BAD, ids=lambda value: str(value)[:60])
async def test_bad_fields_are_named(
    serve: Any, tmp_path: Path, fields: dict[str, Any], field: str
) -> None:
    client: TestClient
    async with serve(backend_of(tmp_path / "tiny", tool_templates.HERMES)) as client:
        body = {"model": "tiny", "messages": HI, "stream": False} | fields
        response = await client.post("/api/chat", json=body)
        assert response.status == 400
        assert f"`{field}`" in (await response.json())["error"]


async def test_results_without_calls_are_accepted(serve: Any, tmp_path: Path) -> None:
    model = backend_of(tmp_path / "tiny", tool_templates.HERMES, f"<tool_call>{CALL}")
    client: TestClient
    async with serve(model) as client:
        talk = [*HI, {"role": "tool", "content": "lost"}]
        body = {"model": "tiny", "messages": talk, "stream": False}
        assert (await client.post("/api/chat", json=body)).status == 200
        assert "lost" in prompt_of(model)
