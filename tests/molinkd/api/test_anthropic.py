"""``/v1/messages``: Anthropic's client against a real endpoint, and rejected fields."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from aiohttp.test_utils import TestClient

from molink.errors import Overloaded, Unavailable
from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from tests.support.fake_backend import FakeBackend
from tests.support.inline_reader import InlineReader

HI: Any = [{"role": "user", "content": "hi"}]


def client_of(endpoint: EndpointServer, key: str = "-") -> anthropic.Anthropic:
    url = endpoint.url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


@pytest.fixture
def ask(endpoint: EndpointServer) -> Iterator[anthropic.Anthropic]:
    with client_of(endpoint) as client:
        yield client


def test_whole(ask: anthropic.Anthropic, backend: FakeBackend) -> None:
    answer = ask.messages.create(
        model="tiny",
        max_tokens=99,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b"},
            *HI,
        ],
        system=[{"type": "text", "text": "Be brief."}],
        extra_body={"temperature": 0.5, "top_k": 4},  # newer clients lack names for them
    )
    assert (answer._request_id or "").startswith("req_")
    part = answer.content[0]
    assert part.type == "text"
    assert part.text == backend.answer
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    request = backend.requests[0]
    assert answer.usage.input_tokens == len(request.prompt_token_ids) - 3
    assert answer.usage.cache_read_input_tokens == 3
    assert (request.max_tokens, request.sampling_params.temperature) == (99, 0.5)
    assert request.sampling_params.top_k == 4
    text = backend.tokenizer.decode(request.prompt_token_ids, skip_special=False)
    assert text.startswith("<|start|>system\nBe brief.<|end|>\n<|start|>user\na<|end|>\n")


def test_stop_reasons(ask: anthropic.Anthropic) -> None:
    cut = ask.messages.create(model="tiny", max_tokens=2, messages=HI)
    assert cut.stop_reason == "max_tokens"
    stopped = ask.messages.create(
        model="tiny", max_tokens=99, messages=HI, stop_sequences=["nothing", " there"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " there")


def test_a_stream(ask: anthropic.Anthropic, backend: FakeBackend) -> None:
    with ask.messages.stream(model="tiny", max_tokens=99, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == backend.answer
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == len(backend.tokenizer.encode(text)) + 1
    events = ask.messages.create(model="tiny", max_tokens=99, messages=HI, stream=True)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_tokens_are_counted(ask: anthropic.Anthropic, backend: FakeBackend) -> None:
    counted = ask.messages.count_tokens(model="tiny", messages=HI)
    ask.messages.create(model="tiny", max_tokens=1, messages=HI)
    assert counted.input_tokens == len(backend.requests[0].prompt_token_ids)


def test_errors(ask: anthropic.Anthropic, backend: FakeBackend) -> None:
    with pytest.raises(anthropic.NotFoundError):
        ask.messages.create(model="claude", max_tokens=9, messages=HI)
    backend.error = Overloaded("busy")
    with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
        ask.messages.create(model="tiny", max_tokens=9, messages=HI)
    backend.error, backend.fail_at = Unavailable("the pipeline broke"), 2
    with pytest.raises(anthropic.APIStatusError, match="the pipeline broke"):
        list(ask.messages.create(model="tiny", max_tokens=9, messages=HI, stream=True))


def test_keys(backend: FakeBackend) -> None:
    endpoint = EndpointServer(backend, ApiSettings(api_key="k"), InlineReader)
    endpoint.start(0)
    try:
        with client_of(endpoint, "k") as ask:
            ask.messages.create(model="tiny", max_tokens=2, messages=HI)
        with client_of(endpoint) as ask, pytest.raises(anthropic.AuthenticationError):
            ask.messages.create(model="tiny", max_tokens=2, messages=HI)
    finally:
        endpoint.stop()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"tools": [{"name": "x"}]}, "tools"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [*HI, {"role": "assistant", "content": "Well"}]}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"system": [{"type": "text"}]}, "system[0].text"),
    ],
)
async def test_bad_fields_are_named(client: TestClient, body: dict[str, Any], field: str) -> None:
    sent = {"model": "tiny", "max_tokens": 9, "messages": HI, **body}
    response = await client.post("/v1/messages", json=sent)
    assert response.status == 400
    error = await response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert f"`{field}`" in error["error"]["message"]
