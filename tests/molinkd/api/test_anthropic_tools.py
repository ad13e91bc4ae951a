"""``/v1/messages``: tools, reasoning and structured output with Anthropic's client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
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
    {"name": "get_weather", "description": "Weather.", "input_schema": CITY},
    {"type": "custom", "name": "now", "input_schema": {"type": "object"}},
]
OPTIONS: Any = {"model": "tiny", "max_tokens": 999, "messages": HI}


@pytest.fixture(scope="module", params=["thinking", "harmony"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FakeBackend:
    folder = tmp_path_factory.mktemp(request.param) / "tiny"
    return backend_of(folder, tool_templates.ALL[request.param], ANSWERS[request.param])


@pytest.fixture
def ask(family: FakeBackend) -> Iterator[anthropic.Anthropic]:
    server = EndpointServer(family, ApiSettings(), InlineReader)
    server.start(0)
    url = server.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as client:
        yield client
    server.stop()


def check(content: Any) -> None:
    thought, text, first, second = content
    assert (thought.type, thought.thinking) == ("thinking", "Hm.")
    assert (text.type, text.text) == ("text", "Let me see.")
    assert (first.type, first.name, first.input) == (
        "tool_use",
        "get_weather",
        {"city": "Paris, é"},
    )
    assert (second.name, second.input) == ("now", {})
    assert first.id != second.id


def test_whole_and_round_trip(ask: anthropic.Anthropic, family: FakeBackend) -> None:
    answer = ask.messages.create(**OPTIONS, tools=TOOLS, thinking={"type": "adaptive"})
    check(answer.content)
    assert answer.stop_reason == "tool_use"
    results: Any = [
        {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "12 degrees"},
        {
            "type": "tool_result",
            "tool_use_id": answer.content[3].id,
            "content": [{"type": "text", "text": "noon"}],
            "is_error": False,
        },
        {"type": "text", "text": "Well?"},
    ]
    talk: Any = [
        *HI,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results},
    ]
    ask.messages.create(**OPTIONS | {"messages": talk}, tools=TOOLS)
    prompt = prompt_of(family)
    places = [prompt.index(part) for part in ("Weather?", PARIS, "12 degrees", "noon", "Well?")]
    assert places == sorted(places)


def test_a_stream(ask: anthropic.Anthropic) -> None:
    with ask.messages.stream(**OPTIONS, tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_message()
    check(final.content)
    assert final.stop_reason == "tool_use"
    blocks = [event for event in events if event.type.startswith("content_block_")]
    begun = [(event.type, event.index) for event in blocks if event.type != "content_block_delta"]
    assert begun == [
        (f"content_block_{what}", index) for index in range(4) for what in ("start", "stop")
    ]
    pieces = [event.partial_json for event in events if event.type == "input_json"]
    assert len(pieces) > 4
    assert "".join(pieces) == PARIS + "{}"


def test_choices(ask: anthropic.Anthropic, family: FakeBackend) -> None:
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    answer = ask.messages.create(**OPTIONS, tools=TOOLS, tool_choice=choice)
    assert [part.type for part in answer.content] == ["thinking", "text", "tool_use"]
    answer = ask.messages.create(**OPTIONS, tools=TOOLS, tool_choice={"type": "none"})
    assert "get_weather" not in prompt_of(family)
    assert answer.stop_reason == "end_turn"
    assert family.requests[-1].grammar == b""
    for choice in ({"type": "any"}, {"type": "tool", "name": "now"}):
        ask.messages.create(**OPTIONS, tools=TOOLS, tool_choice=choice)
        grammar = family.requests[-1].grammar
        assert b"now" in grammar
        assert (b"get_weather" in grammar) == (choice["type"] == "any")


@pytest.mark.parametrize("family", ["thinking"], indirect=True)
def test_truncated_or_invalid_calls(ask: anthropic.Anthropic, family: FakeBackend) -> None:
    """Calls without valid arguments are not passed on as calls."""
    ids = family.tokenizer.encode(family.answer.partition("Paris")[0])
    answer = ask.messages.create(**OPTIONS | {"max_tokens": len(ids)}, tools=TOOLS)
    assert answer.stop_reason == "max_tokens"
    last = answer.content[-1]
    assert (last.type, last.text[:12]) == ("text", "get_weather(")
    whole = family.answer
    family.answer = whole.replace('"city":', '"city"').partition("</tool_call>")[0]
    try:
        answer = ask.messages.create(**OPTIONS, tools=TOOLS)
    finally:
        family.answer = whole
    assert [part.type for part in answer.content] == ["thinking", "text", "text"]
    assert answer.stop_reason == "end_turn"


class Weather(pydantic.BaseModel):
    city: str


def test_a_json_schema(ask: anthropic.Anthropic, family: FakeBackend) -> None:
    whole, family.answer = family.answer, PARIS
    try:
        answer = ask.messages.parse(**OPTIONS, output_format=Weather)
    finally:
        family.answer = whole
    assert answer.parsed_output == Weather(city="Paris, é")
    assert b"city" in family.requests[-1].grammar


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
    (
        {"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
        "tools[0].input_schema.type",
    ),
    (
        {"tools": [{"name": "f", "input_schema": {"properties": {"a": 5}}}]},
        "tools[0].input_schema.properties.a",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format.schema",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}
                    ],
                }
            ]
        },
        "messages[0].content[0].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}, *HI]},
        "messages[0].content[0].name",
    ),
]


@pytest.mark.parametrize(("fields", "field"), BAD, ids=lambda value: str(value)[:60])
async def test_bad_fields_are_named(
    serve: Any, tmp_path: Path, fields: dict[str, Any], field: str
) -> None:
    client: TestClient
    async with serve(backend_of(tmp_path / "tiny", tool_templates.HERMES)) as client:
        response = await client.post("/v1/messages", json=OPTIONS | fields)
        assert response.status == 400
        assert f"`{field}`" in (await response.json())["error"]["message"]
