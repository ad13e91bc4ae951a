"""``/v1/responses``: tools, reasoning and structured output with the official client."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from aiohttp.test_utils import TestClient

from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from tests.support import tool_templates
from tests.support.fake_backend import FakeBackend
from tests.support.inline_reader import InlineReader
from tests.support.tool_answers import ANSWERS, CITY, HI, PARIS, backend_of, prompt_of

TOOLS: Any = [
    {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True},
    {"type": "function", "name": "now", "description": "The time."},
]
OPTIONS: Any = {"model": "tiny", "input": HI, "tools": TOOLS}


@pytest.fixture(scope="module", params=["thinking", "harmony"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FakeBackend:
    folder = tmp_path_factory.mktemp(request.param) / "tiny"
    return backend_of(folder, tool_templates.ALL[request.param], ANSWERS[request.param])


@pytest.fixture
def ask(family: FakeBackend) -> Iterator[openai.OpenAI]:
    server = EndpointServer(family, ApiSettings(), InlineReader)
    server.start(0)
    with openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client:
        yield client
    server.stop()


def check(output: Any) -> None:
    thought, message, first, second = output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
    assert (message.type, message.content[0].text) == ("message", "Let me see.")
    assert (first.type, first.name, first.arguments) == ("function_call", "get_weather", PARIS)
    assert (second.name, second.arguments) == ("now", "{}")
    assert first.call_id != second.call_id
    assert {item.status for item in output} == {"completed"}


def test_whole_and_round_trip(ask: openai.OpenAI, family: FakeBackend) -> None:
    answer = ask.responses.create(**OPTIONS)
    check(answer.output)
    assert (answer.status, answer.output_text) == ("completed", "Let me see.")
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert [tool.name for tool in answer.tools] == ["get_weather", "now"]  # type: ignore[union-attr]
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": output}
        for item, output in zip(
            answer.output[2:], ("12 degrees", [{"type": "input_text", "text": "noon"}]), strict=True
        )
    ]
    ask.responses.create(**OPTIONS | {"input": [*HI, *answer.output, *results]})
    prompt = prompt_of(family)
    places = [prompt.index(part) for part in ("Weather?", PARIS, "12 degrees", "noon")]
    assert places == sorted(places)


def test_a_stream(ask: openai.OpenAI) -> None:
    with ask.responses.stream(**OPTIONS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    check(final.output)
    kinds = [event.type.removeprefix("response.") for event in events]
    parts = ["content_part.added", "", "content_part.done"]
    expected = ["created", "in_progress"]
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        own = [f"{kind}.delta", f"{kind}.done"]
        if kind != "function_call_arguments":
            own = [parts[0], *own, parts[2]]
        expected += ["output_item.added", *own, "output_item.done"]
    expected += expected[-4:]
    assert [kind for at, kind in enumerate(kinds) if kinds[at - 1] != kind] == [
        *expected,
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [getattr(item, "arguments", None) for item in added] == [None, None, "", ""]
    assert [item.id for item in added] == [item.id for item in final.output]
    deltas = [
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert len(deltas) > 4
    assert "".join(deltas) == PARIS + "{}"


def test_choices(ask: openai.OpenAI, family: FakeBackend) -> None:
    answer = ask.responses.create(**OPTIONS, parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    ask.responses.create(**OPTIONS, tool_choice="none")
    assert "get_weather" not in prompt_of(family)
    for choice in ("required", {"type": "function", "name": "now"}):
        ask.responses.create(**OPTIONS, tool_choice=choice)
        grammar = family.requests[-1].grammar
        assert b"now" in grammar
        assert (b"get_weather" in grammar) == (choice == "required")


def test_a_truncated_call(ask: openai.OpenAI, family: FakeBackend) -> None:
    ids = family.tokenizer.encode(family.answer.partition("Paris")[0])
    answer = ask.responses.create(**OPTIONS, max_output_tokens=len(ids))
    assert answer.status == "incomplete"
    assert [item.status for item in answer.output] == ["completed", "completed", "incomplete"]  # type: ignore[union-attr]


class Weather(pydantic.BaseModel):
    city: str


def test_structured_output_fields(ask: openai.OpenAI, family: FakeBackend) -> None:
    whole, family.answer = family.answer, PARIS
    try:
        answer = ask.responses.parse(model="tiny", input=HI, text_format=Weather)
        assert answer.output_parsed == Weather(city="Paris, é")
        assert b"city" in family.requests[-1].grammar
        any_object: Any = {"format": {"type": "json_object"}}
        said = ask.responses.create(model="tiny", input=HI, text=any_object)
        assert json.loads(said.output_text) == {"city": "Paris, é"}
        assert family.requests[-1].grammar
    finally:
        family.answer = whole


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOLS[0]] * 2}, "tools[1].name"),
    (
        {"tools": [{"type": "function", "name": "f", "parameters": {"properties": {"a": 5}}}]},
        "tools[0].parameters.properties.a",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}},
        "tool_choice.name",
    ),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}},
        "text.format.schema",
    ),
    (
        {"tools": TOOLS, "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
        "text.format",
    ),
    ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "name": "f", "call_id": ""}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
]


@pytest.mark.parametrize(("fields", "field"), BAD, ids=lambda value: str(value)[:60])
async def test_bad_fields_are_named(
    serve: Any, tmp_path: Path, fields: dict[str, Any], field: str
) -> None:
    client: TestClient
    async with serve(backend_of(tmp_path / "tiny", tool_templates.HERMES)) as client:
        response = await client.post("/v1/responses", json={"model": "tiny", "input": "x"} | fields)
        assert response.status == 400
        error = (await response.json())["error"]
        assert error["param"] == field
        assert f"`{field}`" in error["message"]
