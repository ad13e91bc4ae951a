"""Hostile schemas, tools and lists on every route that takes them: a 400 names the field."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from tests.support import tool_templates
from tests.support.tool_answers import HI, PARIS, backend_of

#: Location of a schema: the route, the body around it, and the field in errors.
FORMS: dict[str, tuple[str, Any, str]] = {
    "chat": (
        "/v1/chat/completions",
        lambda schema: {
            "messages": HI,
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        },
        "response_format.json_schema.schema",
    ),
    "completions": (
        "/v1/completions",
        lambda schema: {"prompt": "x", "guided_json": schema},
        "guided_json",
    ),
    "responses": (
        "/v1/responses",
        lambda schema: {
            "input": "x",
            "text": {"format": {"type": "json_schema", "name": "it", "schema": schema}},
        },
        "text.format.schema",
    ),
    "messages": (
        "/v1/messages",
        lambda schema: {
            "messages": HI,
            "max_tokens": 99,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
        "output_config.format.schema",
    ),
    "ollama": (
        "/api/chat",
        lambda schema: {"messages": HI, "stream": False, "format": schema},
        "format",
    ),
}
TOOLS: dict[str, tuple[str, Any, str]] = {
    "chat": (
        "/v1/chat/completions",
        lambda schema: {
            "messages": HI,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    "responses": (
        "/v1/responses",
        lambda schema: {
            "input": "x",
            "tools": [{"type": "function", "name": "f", "parameters": schema}],
            "tool_choice": "required",
        },
        "tools",
    ),
    "messages": (
        "/v1/messages",
        lambda schema: {
            "messages": HI,
            "max_tokens": 99,
            "tools": [{"name": "f", "input_schema": schema}],
            "tool_choice": {"type": "any"},
        },
        "tools",
    ),
}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "itself": {"$ref": "#"},
    "in circles": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "nowhere": {"$ref": "#/$defs/missing"},
    "of the net": {"$ref": "http://127.0.0.1:1/x.json"},
    "unsupported": {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]},
    "of no type": {"type": "object", "properties": {"a": {"type": "text"}}, "required": ["a"]},
    "exploding": {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^((((a{100}){100}){100}){100}){100}$"}},
        "required": ["a"],
    },
    "deep": nested(200),
}
#: Recursion alone is no reason to reject a schema.
TREE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "more": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["city"],
}


@pytest.fixture
async def client(serve: Any, model: Any) -> Any:
    async with serve(model) as client:
        yield client


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("hostile") / "tiny"
    return backend_of(folder, tool_templates.HERMES, PARIS)


async def refused(client: TestClient, path: str, body: dict[str, Any], field: str) -> None:
    response = await client.post(path, json={"model": "tiny", **body})
    text = await response.text()
    assert response.status == 400, text
    assert f"`{field}" in text
    assert len(text) < 1000


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("place", FORMS.values(), ids=FORMS)
async def test_structured_output_fields(
    client: TestClient, place: Any, schema: dict[str, Any]
) -> None:
    path, body, field = place
    await refused(client, path, body(schema), field)


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("place", TOOLS.values(), ids=TOOLS)
async def test_tools(client: TestClient, place: Any, schema: dict[str, Any]) -> None:
    path, body, field = place
    await refused(client, path, body(schema), field)


@pytest.mark.parametrize("place", [*FORMS.values(), *TOOLS.values()], ids=[*FORMS, *TOOLS])
async def test_a_recursive_schema_is_accepted(client: TestClient, place: Any) -> None:
    path, body, _ = place
    response = await client.post(path, json={"model": "tiny", **body(TREE)})
    assert response.status == 200, await response.text()


WORDS = ["x" * 100] * 10_000
IMAGE = "data:image/png;base64," + "A" * 500_000
LISTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": HI, "stop": WORDS}, "stop"),
    ("/v1/completions", {"prompt": "x", "stop": ["x" * 1_000_000]}, "stop"),
    ("/v1/messages", {"messages": HI, "max_tokens": 9, "stop_sequences": WORDS}, "stop_sequences"),
    ("/api/chat", {"messages": HI, "options": {"stop": WORDS}}, "options.stop"),
    ("/v1/chat/completions", {"messages": HI, "n": 1000}, "n"),
    ("/v1/completions", {"prompt": "x", "n": 1000}, "n"),
    ("/v1/completions", {"prompt": "x", "best_of": 1000}, "best_of"),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": IMAGE}}],
                }
            ]
        },
        "messages[0].content[0].type",
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]},
        "input[0].content[0].type",
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "data": IMAGE}},
                        {"type": "text", "text": "What is it?"},
                    ],
                }
            ],
        },
        "messages[0].content[0].type",
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "x", "images": [IMAGE]}]},
        "messages[0].images",
    ),
    ("/api/generate", {"prompt": "x", "images": [IMAGE]}, "images"),
]


@pytest.mark.parametrize(("path", "body", "field"), LISTS, ids=lambda value: str(value)[:50])
async def test_lists_numbers_and_images(
    client: TestClient, path: str, body: dict[str, Any], field: str
) -> None:
    await refused(client, path, body, field)
