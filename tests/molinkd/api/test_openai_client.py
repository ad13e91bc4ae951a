"""Conformance: the official client against a real endpoint."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from molink.errors import ContextTooLong, Overloaded, Unavailable
from molinkd.api.http_server import EndpointServer

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def ask(endpoint: EndpointServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=endpoint.url, api_key="-", max_retries=0) as client:
        yield client


def test_models(ask: openai.OpenAI) -> None:
    assert [model.id for model in ask.models.list()] == ["tiny"]
    assert ask.models.retrieve("tiny").owned_by == "molink"


def test_whole(ask: openai.OpenAI, backend: Any) -> None:
    answer = ask.chat.completions.create(
        model="tiny", messages=HI, n=2, logprobs=True, top_logprobs=1
    )
    assert [choice.message.content for choice in answer.choices] == [backend.answer] * 2
    assert answer.choices[1].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    completion = ask.completions.create(model="tiny", prompt="x", max_tokens=99, logprobs=2)
    assert completion.choices[0].text == backend.answer
    assert completion.choices[0].logprobs is not None


def test_streams(ask: openai.OpenAI, backend: Any) -> None:
    text, usage = "", None
    for chunk in ask.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == backend.answer
    assert usage is not None
    stream = ask.completions.create(model="tiny", prompt="x", max_tokens=99, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == backend.answer


def test_closing_a_stream_cancels_it(ask: openai.OpenAI, endpoint: Any, backend: Any) -> None:
    backend.gate = asyncio.Semaphore(1)
    with ask.chat.completions.create(model="tiny", messages=HI, stream=True) as stream:
        next(iter(stream))
        assert backend.running == 1
        stream.close()
    done = asyncio.run_coroutine_threadsafe(backend.until_running(0), endpoint.loop)
    done.result(timeout=60)


async def test_asynchronous_client(endpoint: EndpointServer, backend: Any) -> None:
    async with openai.AsyncOpenAI(base_url=endpoint.url, api_key="-", max_retries=0) as client:

        async def one() -> str:
            stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert await asyncio.gather(*(one() for _ in range(16))) == [backend.answer] * 16
        answer = await client.chat.completions.create(model="tiny", messages=HI)
        assert answer.choices[0].message.content == backend.answer


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Overloaded("busy"), openai.RateLimitError),
        (Unavailable("nobody"), openai.InternalServerError),
        (ContextTooLong("long", "messages"), openai.BadRequestError),
        (ZeroDivisionError(), openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_become_the_clients_exceptions(
    ask: openai.OpenAI, backend: Any, error: Exception, expected: type[Exception], stream: bool
) -> None:
    backend.error = error
    with pytest.raises(expected):
        ask.chat.completions.create(model="tiny", messages=HI, stream=stream)


def test_an_error_in_a_stream(ask: openai.OpenAI, backend: Any) -> None:
    backend.error, backend.fail_at = Unavailable("the pipeline broke"), 2
    stream = ask.chat.completions.create(model="tiny", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="the pipeline broke"):
        list(stream)


def test_unknown_model_and_bad_field(ask: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        ask.chat.completions.create(model="gpt-4", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        ask.chat.completions.create(model="tiny", messages=HI, temperature=9)
    assert wrong.value.param == "temperature"
