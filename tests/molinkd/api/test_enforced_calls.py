"""``tool_choice`` ``required`` and named, on a real ring with a model without tool training."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch

from molink.checkpoint.model_source import find_demo_model
from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from tests.support import tool_templates
from tests.support.inline_reader import InlineReader
from tests.support.ring_backend import RingBackend

HI: Any = [{"role": "user", "content": "What is molink?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/short"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"short": {"type": "string", "maxLength": 9}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@contextmanager
def toy(folder: Path, template: str) -> Iterator[openai.OpenAI]:
    """The bundled model with another chat template."""
    torch.set_num_threads(1)
    shutil.copytree(find_demo_model().path, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    server = EndpointServer(RingBackend(folder), ApiSettings(), InlineReader)
    server.start(0)
    try:
        with openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client:
            yield client
    finally:
        server.stop()


TEMPLATES = {name: tool_templates.ALL[name] for name in ("hermes", "llama", "mistral")} | {
    "qwen3_coder": tool_templates.QWEN3_CODER,
    # Without thoughts, which the bundled model would not end.
    "deepseek": tool_templates.DEEPSEEK.replace("</think>", "").replace("<think>", ""),
}


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def ask(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("toy") / "tiny"
    with toy(folder, TEMPLATES[request.param]) as client:
        yield client


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_required_call_matches_its_schema(
    ask: openai.OpenAI, choice: Any, temperature: float
) -> None:
    answer = ask.chat.completions.create(
        model="tiny",
        messages=HI,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=temperature,
        seed=5,
        max_tokens=200,
    )
    (one,) = answer.choices
    assert one.finish_reason == "tool_calls"
    assert not one.message.content
    (call,) = one.message.tool_calls or ()
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    if choice is NAMED:
        assert call.function.name == "get_weather"
    if call.function.name == "get_weather":
        jsonschema.validate(arguments, WEATHER)
    else:
        assert arguments == {}


def test_a_structured_answer_is_content(tmp_path: Path) -> None:
    """Also if the prompt opens the reasoning, and if tools are offered."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": WEATHER}}
    with toy(tmp_path / "tiny", tool_templates.THINKING) as ask:
        for tools in ([], TOOLS):
            answer = ask.chat.completions.create(
                model="tiny", messages=HI, response_format=form, tools=tools, max_tokens=200
            )
            message = answer.choices[0].message
            jsonschema.validate(json.loads(message.content or ""), WEATHER)
            assert not hasattr(message, "reasoning_content")
