"""Answers that are held to a schema, a regular expression or a grammar, through a whole ring."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
import torch

from molink.checkpoint.source import demo_model
from molinkd.api.endpoint_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from tests.support.direct_reader import DirectReader
from tests.support.ring_backend import RingBackend

HI: Any = [{"role": "user", "content": "What is molink?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def backend() -> RingBackend:
    torch.set_num_threads(1)
    return RingBackend(demo_model().path)


@pytest.fixture(scope="module")
def ask(backend: RingBackend) -> Iterator[openai.OpenAI]:
    server = EndpointServer(backend, ApiSettings(), DirectReader())
    server.start(0)
    with openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client:
        yield client
    server.stop()


def schema(fields: dict[str, Any]) -> Any:
    named = {"name": "it", "strict": True, "schema": fields}
    return {"type": "json_schema", "json_schema": named}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_chat_answer_is_what_its_schema_says(ask: openai.OpenAI, temperature: float) -> None:
    answer = ask.chat.completions.create(
        model="tiny",
        messages=HI,
        response_format=schema(PERSON),
        temperature=temperature,
        seed=3,
        max_tokens=200,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content is not None
    jsonschema.validate(json.loads(choice.message.content), PERSON)
