"""Answers that follow a schema, regular expression or grammar, on a real ring."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
import torch
from aiohttp.test_utils import TestClient
from msgspec.structs import replace

from molink.checkpoint.model_source import find_demo_model
from molink.text.grammar import build_grammar
from molink.text.grammar import compile_grammar as compile_text_grammar
from molink.text.grammar_matcher import load_grammar_tokenizer
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import Rejected, Request
from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from molinkd.api.openai.schema import ChatBody, decode_body
from molinkd.api.structured_output import compile_grammar
from tests.support.inline_reader import InlineReader
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
    return RingBackend(find_demo_model().path)


@pytest.fixture(scope="module")
def ask(backend: RingBackend) -> Iterator[openai.OpenAI]:
    server = EndpointServer(backend, ApiSettings(), InlineReader)
    server.start(0)
    with openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client:
        yield client
    server.stop()


def schema(fields: dict[str, Any]) -> Any:
    named = {"name": "it", "strict": True, "schema": fields}
    return {"type": "json_schema", "json_schema": named}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_chat_answer_matches_its_schema(ask: openai.OpenAI, temperature: float) -> None:
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


class Colour(pydantic.BaseModel):
    """A schema as users of the official client write it."""

    kind: Literal["red", "green"]
    share: int = pydantic.Field(ge=0, le=100)


class Palette(pydantic.BaseModel):
    colours: list[Colour] = pydantic.Field(max_length=2)
    dark: bool


def test_the_official_client_parses_an_answer(ask: openai.OpenAI) -> None:
    answer = ask.chat.completions.parse(
        model="tiny", messages=HI, response_format=Palette, temperature=1.0, seed=5, max_tokens=300
    )
    assert isinstance(answer.choices[0].message.parsed, Palette)
    with ask.chat.completions.stream(
        model="tiny", messages=HI, response_format=Palette, temperature=1.0, seed=6, max_tokens=300
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Palette)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[ab]{3}(-[0-9]{2})?"}, "[ab]{3}(-[0-9]{2})?"),
        ({"guided_regex": " +x"}, " +x"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "x" | "y" "z"'}, "x|yz"),
        ({"guided_grammar": 'root ::= "x" | "y" "z"'}, "x|yz"),
        ({"guided_json": {"enum": ["a", 5]}}, '"a"|5'),
        ({"guided_json": json.dumps({"type": "boolean"})}, "true|false"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ],
    ids=lambda value: str(value)[:50],
)
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
def test_other_kinds_in_chats_and_completions(
    ask: openai.OpenAI, fields: dict[str, Any], pattern: str, chat: bool
) -> None:
    options: Any = {"model": "tiny", "max_tokens": 60, "temperature": 1.5, "extra_body": fields}
    if chat:
        said = ask.chat.completions.create(messages=HI, seed=1, **options).choices[0]
        text = said.message.content
    else:
        said = ask.completions.create(prompt="molink", seed=1, **options).choices[0]
        text = said.text
    assert said.finish_reason == "stop"
    assert re.fullmatch(pattern, text or "")


@pytest.mark.parametrize(("compact", "separators"), [(None, (", ", ": ")), (True, (",", ":"))])
def test_json_is_on_one_line(
    ask: openai.OpenAI, compact: bool | None, separators: tuple[str, str]
) -> None:
    digits = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
    fields = {"a": {"enum": ["x", "y"]}, "b": digits}
    shape = {"properties": fields, "required": ["a", "b"], "additionalProperties": False}
    answer = ask.chat.completions.create(
        model="tiny",
        messages=HI,
        response_format=schema({"type": "object", **shape}),
        extra_body={"structured_outputs": {"disable_any_whitespace": compact}},
        temperature=1.5,
        seed=3,
        max_tokens=100,
    )
    text = answer.choices[0].message.content
    assert text is not None
    assert text == json.dumps(json.loads(text), separators=separators)


def test_free_whitespace_on_request() -> None:
    body = decode_body(
        b'{"messages": [{"role": "user", "content": ""}], "guided_json": {},'
        b' "structured_outputs": {"disable_any_whitespace": false}}',
        ChatBody,
    )
    found = compile_grammar(body, Tokenizer.open(find_demo_model().path))
    assert found == build_grammar("json_schema", "{}", "free")


def test_any_object(ask: openai.OpenAI) -> None:
    answer = ask.chat.completions.create(
        model="tiny", messages=HI, response_format={"type": "json_object"}, max_tokens=30
    )
    (choice,) = answer.choices
    assert (choice.message.content or "").startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


LIMIT: Any = {"options": {"num_predict": 5}}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
SAID: Any = {"model": "tiny", "messages": HI, "max_tokens": 5, "stream": False}
OPENAI_FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": NAME}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", SAID | {"response_format": OPENAI_FORM}),
        ("/v1/chat/completions", SAID | {"guided_json": json.dumps(NAME)}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": NAME}}),
        (
            "/v1/responses",
            {
                "input": "x",
                "max_output_tokens": 5,
                "text": {"format": {"type": "json_schema", "schema": NAME}},
            },
        ),
        (
            "/v1/messages",
            SAID | {"output_config": {"format": {"type": "json_schema", "schema": NAME}}},
        ),
        ("/api/chat", SAID | {"format": NAME}),
        ("/api/generate", {"prompt": "x", "format": NAME, "stream": False} | LIMIT),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_extra_keys_are_forbidden_in_every_protocol(
    client: TestClient, backend: RingBackend, path: str, body: dict[str, Any]
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status == 200, await answer.text()
    grammar = backend.asked[-1].grammar
    for text, fits in (('{"name": "Ada"}', True), ('{"name": "Ada", "job": "poet"}', False)):
        matcher = compile_text_grammar(load_grammar_tokenizer(find_demo_model().path, 0), grammar)
        ids = backend.tokenizer.encode(text, special=False)
        assert (matcher.try_consume_tokens(ids) == len(ids)) == fits


def request(backend: RingBackend, seed: int) -> Request:
    return Request(
        "tiny",
        backend.tokenizer.encode("molink"),
        120,
        SamplingParams(temperature=1.2, seed=seed, repetition_penalty=1.0),
        backend.tokenizer.eos_ids,
        build_grammar("json_schema", json.dumps(PERSON)),
    )


def test_a_resumed_answer_continues_unchanged(backend: RingBackend) -> None:
    whole = [event.token for event in backend.tokens(backend.submit(request(backend, 4)))]
    for begun in (1, len(whole) // 2, len(whole) - 1):
        key = backend.submit(request(backend, 4), whole[:begun])
        assert [event.token for event in backend.tokens(key)] == whole[begun:]


def test_preempted_answers_still_match_their_schema() -> None:
    """With few KV blocks requests are preempted and resumed."""
    backend = RingBackend(find_demo_model().path, blocks=8)
    keys = [backend.submit(request(backend, seed)) for seed in range(4)]
    for key in keys:
        tokens = [event.token for event in backend.tokens(key)]
        text = backend.tokenizer.decode(tokens)
        jsonschema.validate(json.loads(text), PERSON)
    assert backend.ring.scheduler.collect_stats()[0]["scheduler_preemptions_total"] > 0


def test_an_invalid_grammar_from_a_peer_fails_only_its_answer(backend: RingBackend) -> None:
    """A peer's daemon may skip validation."""
    good = request(backend, 1)
    bad = [replace(good, grammar=text) for text in (b"\xff", b"start: start", b"{}")]
    keys = [backend.submit(one) for one in (*bad, good)]
    *failed, last = (backend.tokens(key) for key in keys)
    assert [type(events[-1]) for events in failed] == [Rejected] * 3
    assert "grammar" in failed[0][-1].message
    jsonschema.validate(json.loads(backend.tokenizer.decode([one.token for one in last])), PERSON)
