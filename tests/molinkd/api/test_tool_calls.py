"""Tools, calls and reasoning on the chat route with the official client, whole and streamed."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp.test_utils import TestClient

from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from tests.support import tool_templates
from tests.support.fake_backend import FakeBackend, build_model
from tests.support.inline_reader import InlineReader
from tests.support.tool_answers import (
    ANSWERS,
    CALL,
    CITY,
    CONTEXT,
    HI,
    PARIS,
    TOOLS,
    backend_of,
    prompt_of,
)


@pytest.fixture(scope="module", params=sorted(ANSWERS))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FakeBackend:
    name = request.param
    folder = tmp_path_factory.mktemp(name) / "tiny"
    return backend_of(folder, tool_templates.ALL[name], ANSWERS[name])


@contextmanager
def clients(backend: FakeBackend, settings: ApiSettings | None = None) -> Iterator[openai.OpenAI]:
    server = EndpointServer(backend, settings or ApiSettings(), InlineReader)
    server.start(0)
    try:
        with openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client:
            yield client
    finally:
        server.stop()


@pytest.fixture
def ask(family: FakeBackend) -> Iterator[openai.OpenAI]:
    family.requests.clear()
    with clients(family) as client:
        yield client


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hermes") / "tiny"
    return build_model(folder, tool_templates.HERMES, tool_templates.SPECIAL, "<|call|>")


@pytest.fixture
def model(hermes: Path) -> FakeBackend:
    return FakeBackend(hermes, ANSWERS["hermes"], context=CONTEXT)


@pytest.fixture
async def client(model: FakeBackend, serve: Callable[..., Any]) -> Any:
    async with serve(model) as client:
        yield client


def thinks(backend: FakeBackend) -> bool:
    return "Hm." in backend.answer


def test_calls_in_a_whole_answer(ask: openai.OpenAI, family: FakeBackend) -> None:
    answer = ask.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert getattr(choice.message, "reasoning_content", None) == ("Hm." if thinks(family) else None)
    calls: Any = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather", "now"]
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris, é"}, {}]
    assert len({call.id for call in calls}) == 2
    assert '"get_weather"' in prompt_of(family) or "type get_weather" in prompt_of(family)


def test_calls_in_a_stream(ask: openai.OpenAI, family: FakeBackend) -> None:
    deltas: list[Any] = []
    finish = []
    for chunk in ask.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, stream=True):
        deltas += [choice.delta for choice in chunk.choices]
        finish += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
    assert finish == ["tool_calls"]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thoughts == ("Hm." if thinks(family) else "")
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    first = [piece for piece in pieces if piece.index == 0]
    assert (first[0].function.name, first[0].function.arguments) == ("get_weather", "")
    assert first[0].id
    assert first[0].type == "function"
    assert all(piece.id is None and piece.function.name is None for piece in first[1:])
    assert len(first) > 4
    assert "".join(piece.function.arguments for piece in first) == PARIS


def test_the_clients_own_accumulation(ask: openai.OpenAI) -> None:
    with ask.chat.completions.stream(model="tiny", messages=HI, tools=TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, event.arguments) for event in done] == [
        ("get_weather", PARIS),
        ("now", "{}"),
    ]
    assert final.choices[0].message.content == "Let me see."
    assert len(final.choices[0].message.tool_calls or ()) == 2


def test_tool_results_continue_the_conversation(ask: openai.OpenAI, family: FakeBackend) -> None:
    """Calls and results are sent back; ids match, in any template's format."""
    first = ask.chat.completions.create(model="tiny", messages=HI, tools=TOOLS).choices[0].message
    message = {**first.model_dump(exclude_none=True), "content": None}
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"{number} degrees"}
        for number, call in enumerate(first.tool_calls or ())
    ]
    ask.chat.completions.create(model="tiny", messages=[*HI, message, *results], tools=TOOLS)
    prompt = prompt_of(family)
    assert PARIS in prompt
    assert "0 degrees" in prompt
    assert "1 degrees" in prompt


RELEASED = {
    "qwen3_coder": (
        tool_templates.QWEN3_CODER,
        "Let me see.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis, é\n</parameter>"
        "\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "deepseek": (
        tool_templates.DEEPSEEK,
        "Hm.</think>Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{PARIS}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
}


@pytest.mark.parametrize("name", RELEASED)
@pytest.mark.parametrize("streams", [False, True])
def test_formats_of_released_models(tmp_path: Path, name: str, streams: bool) -> None:
    template, answer = RELEASED[name]
    backend = backend_of(tmp_path / "tiny", template, answer)
    with clients(backend) as ask:
        if streams:
            with ask.chat.completions.stream(model="tiny", messages=HI, tools=TOOLS) as stream:
                choice: Any = stream.get_final_completion().choices[0]
        else:
            choice = ask.chat.completions.create(model="tiny", messages=HI, tools=TOOLS).choices[0]
        message: Any = choice.message
        assert choice.finish_reason == "tool_calls"
        assert message.content == "Let me see."
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
            ("get_weather", PARIS),
            ("now", "{}"),
        ]
        before = {**message.model_dump(exclude_none=True), "content": None}
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5 degrees"}
        messages: Any = [*HI, before, result]
        ask.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    prompt = prompt_of(backend)
    assert "Paris, é" in prompt
    assert "5 degrees" in prompt


class Weather(openai.BaseModel):
    """Looks up the weather."""

    city: str


def test_pydantic_tools_are_parsed(model: FakeBackend) -> None:
    model.answer = f"<tool_call>{CALL.replace('get_weather', 'Weather')}</tool_call>"
    tools = [openai.pydantic_function_tool(Weather)]
    with clients(model) as ask:
        parsed = ask.chat.completions.parse(model="tiny", messages=HI, tools=tools)
    calls: Any = parsed.choices[0].message.tool_calls
    assert calls[0].function.parsed_arguments == Weather(city="Paris, é")
    assert parsed.choices[0].message.content is None


async def post(client: TestClient, status: int = 200, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": HI, **body}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status == status, await response.text()
    return await response.json()


async def message_of(client: TestClient, **body: Any) -> tuple[dict[str, Any], str]:
    choice = (await post(client, **body))["choices"][0]
    return choice["message"], choice["finish_reason"]


async def test_without_tools_calls_are_text(client: TestClient, model: FakeBackend) -> None:
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        message, finish = await message_of(client, **fields)
        assert message == {"role": "assistant", "content": model.answer, "refusal": None}
        assert finish == "stop"
        assert "get_weather" not in prompt_of(model)


async def test_one_call_only(client: TestClient, model: FakeBackend) -> None:
    message, finish = await message_of(client, tools=TOOLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    assert finish == "tool_calls"
    assert model.running == 0
    message, _ = await message_of(client, tools=TOOLS, parallel_tool_calls=True)
    assert len(message["tool_calls"]) == 2


async def test_a_truncated_call(client: TestClient, model: FakeBackend) -> None:
    model.answer = f"<tool_call>{CALL}"
    length = len(model.tokenizer.encode(model.answer.partition("Paris")[0]))
    message, finish = await message_of(client, tools=TOOLS, max_tokens=length)
    assert finish == "length"
    assert message["tool_calls"][0]["function"]["arguments"].startswith('{"city": "')
    message, finish = await message_of(client, tools=TOOLS, max_tokens=4)
    assert finish == "length"
    assert "tool_calls" not in message
    assert message["content"] == model.tokenizer.decode(model.tokenizer.encode(model.answer)[:4])


async def test_logprobs_of_all_tokens(client: TestClient, model: FakeBackend) -> None:
    ids = model.tokenizer.encode(model.answer)
    choice = (await post(client, tools=TOOLS, logprobs=True))["choices"][0]
    assert len(choice["logprobs"]["content"]) == len(ids)
    body = {"model": "tiny", "messages": HI, "tools": TOOLS, "logprobs": True, "stream": True}
    text = await (await client.post("/v1/chat/completions", json=body)).text()
    chunks = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert sum(len(entry["content"]) for entry in logprobs if entry) == len(ids)


async def test_reasoning_counts_in_usage(serve: Callable[..., Any], tmp_path: Path) -> None:
    model = backend_of(tmp_path / "tiny", tool_templates.THINKING, "I think\n</think>\nYes.")
    async with serve(model) as client:
        answer = await post(client)
        thought = len(model.tokenizer.encode("I think\n"))
        counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert thought <= counted < answer["usage"]["completion_tokens"]
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("I think", "Yes.")
        raw, _ = await message_of(client, skip_special_tokens=False)
        assert raw["content"] == "I think\n</think>\nYes."
        model.answer = "never ends"
        message, finish = await message_of(client, max_tokens=2)
        assert (message["content"], finish) == ("", "length")
        assert message["reasoning_content"]


async def test_the_tool_call_parser_setting(serve: Callable[..., Any], tmp_path: Path) -> None:
    plain = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    model = backend_of(tmp_path / "tiny", plain, f"[TOOL_CALLS][{CALL}]")
    async with serve(model) as client:
        error = (await post(client, 400, tools=TOOLS))["error"]
        assert error["param"] == "tools"
        assert "tool_call_parser" in error["message"]
    async with serve(model, ApiSettings(tool_call_parser="mistral")) as client:
        message, _ = await message_of(client, tools=TOOLS)
        assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    model = backend_of(tmp_path / "other", tool_templates.THINKING, "Hm.</think>Yes.")
    async with serve(model, ApiSettings(tool_call_parser="raw")) as client:
        message, _ = await message_of(client)
        assert message["content"] == "Hm.</think>Yes."
        assert (await post(client, 400, tools=TOOLS))["error"]["param"] == "tools"


async def test_a_template_for_tools(serve: Callable[..., Any], tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain {{ messages[0].content }}"},
        {"name": "tool_use", "template": tool_templates.HERMES},
    ]
    model = backend_of(tmp_path / "tiny", named, ANSWERS["hermes"])
    async with serve(model) as client:
        message, _ = await message_of(client, tools=TOOLS)
        assert len(message["tool_calls"]) == 2
        await message_of(client)
        assert prompt_of(model) == "plain Weather?"


async def test_a_model_without_tool_support(serve: Callable[..., Any], tmp_path: Path) -> None:
    model = backend_of(tmp_path / "tiny", "{% for m in messages %}{{ m.content }}{% endfor %}")
    async with serve(model) as client:
        error = (await post(client, 400, tools=TOOLS))["error"]
        assert error["param"] == "tools"
        await post(client, tools=TOOLS, tool_choice="none")


def tool(name: str = "f", parameters: Any = None, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters or CITY, **fields}
    return {"type": "function", "function": function}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def with_property(schema: Any) -> list[Any]:
    return [tool(), tool("g", {"type": "object", "properties": {"a": schema}})]


GIVEN = {"tools": TOOLS}
IN_A = "tools[1].function.parameters.properties.a"
ASKED: Any = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": "x"}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 129)]}, "tools[0].function.name"),
    ({"tools": [tool(), tool("g"), tool()]}, "tools[2].function.name"),
    ({"tools": [tool(f"f{index}") for index in range(129)]}, "tools"),
    ({"tools": [tool(description=5)]}, "tools[0].function.description"),
    ({"tools": [tool(description="x" * 300_000)]}, "tools"),
    ({"tools": [tool(parameters=[1])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
    ({"tools": with_property(5)}, IN_A),
    ({"tools": with_property({"type": "text"})}, IN_A + ".type"),
    ({"tools": with_property({"type": ["string", 5]})}, IN_A + ".type"),
    ({"tools": with_property({"enum": "x"})}, IN_A + ".enum"),
    ({"tools": with_property({"required": [1]})}, IN_A + ".required"),
    ({"tools": with_property({"properties": []})}, IN_A + ".properties"),
    ({"tools": with_property({"items": [True, 5]})}, IN_A + ".items[1]"),
    ({"tools": with_property({"anyOf": [{"pattern": 1}]})}, IN_A + ".anyOf[0].pattern"),
    ({"tools": [tool(parameters=nested(12))]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"default": nested(12)})]}, "tools[0].function.parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        GIVEN | {"tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    (GIVEN | {"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"tools": with_property({"pattern": "("}), "tool_choice": "required"}, "tools"),
    (GIVEN | {"tool_choice": "maybe"}, "tool_choice"),
    (GIVEN | {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    (
        GIVEN | {"tool_choice": {"type": "function", "function": {"name": "launch"}}},
        "tool_choice.function.name",
    ),
    (GIVEN | {"parallel_tool_calls": 5}, "parallel_tool_calls"),
    (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": ""}]},
        "messages[0].tool_call_id",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**ASKED, "type": "x"}]}]},
        "messages[0].tool_calls[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:60])
async def test_bad_tools(client: TestClient, fields: dict[str, Any], param: str) -> None:
    error = (await post(client, 400, **fields))["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert len(error["message"]) < 1000


async def test_all_kinds_of_tools_are_accepted(client: TestClient, model: FakeBackend) -> None:
    kinds = with_property(
        {
            "type": ["string", "null"],
            "enum": ["x", None],
            "anyOf": [True, {"items": [{"type": "integer"}]}, {"items": {"$ref": "#/$defs/y"}}],
            "additionalProperties": False,
        }
    )
    many = [tool(f"f{index}", nested(11)) for index in range(8)]
    await post(client, tools=[*kinds, *many], tool_choice="auto")
    assert "<tools>" in prompt_of(model)
