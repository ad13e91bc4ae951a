"""``/v1/responses``: the official client against a real endpoint, and rejected fields."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from aiohttp.test_utils import TestClient

from molink.errors import Unavailable
from molinkd.api.http_server import EndpointServer
from tests.support.fake_backend import FakeBackend

TALK: Any = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "b", "annotations": []}],
    },
    {"role": "user", "content": "c"},
]


@pytest.fixture
def ask(endpoint: EndpointServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=endpoint.url, api_key="-", max_retries=0) as client:
        yield client


def test_whole(ask: openai.OpenAI, backend: FakeBackend) -> None:
    answer = ask.responses.create(
        model="tiny",
        input="hi",
        instructions="Be brief.",
        temperature=0.5,
        top_p=0.9,
        top_logprobs=1,
        include=["message.output_text.logprobs"],
        metadata={"a": "b"},
        store=True,
    )
    assert answer.output_text == backend.answer
    assert (answer.status, answer.error, answer.metadata) == ("completed", None, {"a": "b"})
    message = answer.output[0]
    assert isinstance(message, openai.types.responses.ResponseOutputMessage)
    part = message.content[0]
    assert isinstance(part, openai.types.responses.ResponseOutputText)
    assert part.logprobs is not None
    assert "".join(entry.token for entry in part.logprobs).startswith("Hello")
    request = backend.requests[0]
    tokens = len(backend.tokenizer.encode(backend.answer)) + 1
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        len(request.prompt_token_ids),
        tokens,
    )
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert (request.sampling_params.temperature, request.sampling_params.top_p) == (0.5, 0.9)
    text = backend.tokenizer.decode(request.prompt_token_ids, skip_special=False)
    assert text.startswith("<|start|>system\nBe brief.<|end|>\n<|start|>user\nhi<|end|>\n")


def test_a_conversation(ask: openai.OpenAI, backend: FakeBackend) -> None:
    answer = ask.responses.create(model="tiny", input=TALK, max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    text = backend.tokenizer.decode(backend.requests[0].prompt_token_ids, skip_special=False)
    roles = [line for line in text.splitlines() if line.startswith("<|start|>")]
    assert roles == [f"<|start|>{role}" for role in ("system", "user", "assistant", "user")] + [
        "<|start|>assistant"
    ]


def test_a_stream(ask: openai.OpenAI, backend: FakeBackend) -> None:
    with ask.responses.stream(model="tiny", input="hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == backend.answer
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.usage is not None
    assert final.usage.total_tokens > 0


def test_a_truncated_stream(ask: openai.OpenAI, backend: FakeBackend) -> None:
    stream = ask.responses.create(model="tiny", input="hi", max_output_tokens=2, stream=True)
    assert list(stream)[-1].type == "response.incomplete"
    backend.error, backend.fail_at = Unavailable("the pipeline broke"), 2
    with pytest.raises(openai.APIError, match="the pipeline broke"):
        list(ask.responses.create(model="tiny", input="hi", stream=True))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({}, "input"),
        ({"input": "word " * 5000}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
    ],
)
async def test_bad_fields_are_named(client: TestClient, body: dict[str, Any], field: str) -> None:
    response = await client.post("/v1/responses", json={"model": "tiny", **body})
    assert response.status == 400
    error = (await response.json())["error"]
    assert error["param"] == field
    assert f"`{field}`" in error["message"]
