"""Answers of the OpenAI routes, whole and streamed."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from aiohttp.test_utils import TestClient

from molink.wire.messages.data_plane import SamplingParams
from tests.support.fake_backend import CONTEXT, FakeBackend

HI = [{"role": "user", "content": "hi"}]


async def post(client: TestClient, route: str, **body: Any) -> dict[str, Any]:
    response = await client.post(f"/v1/{route}", json={"model": "tiny", **body})
    assert response.status == 200, await response.text()
    return await response.json()


async def chat(client: TestClient, **body: Any) -> dict[str, Any]:
    return await post(client, "chat/completions", **{"messages": HI, **body})


async def events(client: TestClient, route: str, **body: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "stream": True, **body}
    response = await client.post(f"/v1/{route}", json=body)
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/event-stream")
    blocks = (await response.text()).split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


async def test_models(client: TestClient, backend: FakeBackend) -> None:
    listed = await (await client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    one = await (await client.get("/v1/models/tiny")).json()
    assert one == listed["data"][0]
    assert one["object"] == "model"
    assert one["max_model_len"] == one["meta"]["n_ctx"] == CONTEXT
    props = await (await client.get("/props")).json()
    assert props["default_generation_settings"] == {"n_ctx": CONTEXT}
    assert props["chat_template"].startswith("{%")
    assert (await client.get("/props?model=other")).status == 404


async def test_chat(client: TestClient, backend: FakeBackend) -> None:
    answer = await chat(client)
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": backend.answer, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    tokens = len(backend.tokenizer.encode(backend.answer)) + 1
    prompt = backend.requests[0].prompt_token_ids
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": tokens,
        "total_tokens": len(prompt) + tokens,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    rendered = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert backend.tokenizer.decode(prompt, skip_special=False) == rendered


async def test_the_only_model_need_not_be_named(client: TestClient, backend: FakeBackend) -> None:
    response = await client.post("/v1/chat/completions", json={"messages": HI})
    assert response.status == 200
    assert (await response.json())["model"] == "tiny"


async def test_chat_stream(client: TestClient, backend: FakeBackend) -> None:
    chunks = await events(
        client, "chat/completions", messages=HI, stream_options={"include_usage": True}
    )
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert text == backend.answer
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(backend.tokenizer.encode(text)) + 1
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_no_usage_in_a_stream_unless_asked_for(
    client: TestClient, backend: FakeBackend
) -> None:
    chunks = await events(client, "chat/completions", messages=HI)
    assert all("usage" not in chunk for chunk in chunks)


async def test_completion_and_stream_agree(client: TestClient, backend: FakeBackend) -> None:
    body = {"prompt": "Say", "max_tokens": 100, "echo": True}
    whole = await post(client, "completions", **body)
    chunks = await events(client, "completions", **body)
    streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert whole["choices"][0]["text"] == streamed == "Say" + backend.answer
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert whole["object"] == chunks[0]["object"] == "text_completion"


async def test_completions_default_to_sixteen_tokens(
    client: TestClient, backend: FakeBackend
) -> None:
    answer = await post(client, "completions", prompt="x")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16


async def test_chat_defaults_to_the_remaining_context(
    client: TestClient, backend: FakeBackend
) -> None:
    await chat(client)
    request = backend.requests[0]
    assert request.max_tokens == backend.list_models()[0].max_model_len - len(
        request.prompt_token_ids
    )


async def test_a_short_chat_defaults_to_the_original_longrope_context(
    client: TestClient, backend: FakeBackend
) -> None:
    prompts = []
    for short in (200, 0, 10, 10**6):
        backend.short_context = short
        await chat(client)
        prompts.append(len(backend.requests[-1].prompt_token_ids))
    prompt, context = prompts[0], backend.context
    assert 10 < 2 * prompt <= 200
    left = [context - prompt] * 3
    assert [request.max_tokens for request in backend.requests] == [200 - prompt, *left]
    # An explicit limit takes precedence.
    backend.short_context = 200
    await chat(client, max_tokens=300)
    assert backend.requests[-1].max_tokens == 300


@pytest.mark.parametrize("stream", [False, True])
async def test_n_answers_have_different_seeds(
    client: TestClient, backend: FakeBackend, stream: bool
) -> None:
    body = {"messages": HI, "n": 3, "seed": 7}
    if stream:
        chunks = await events(client, "chat/completions", **body)
        indices = [chunk["choices"][0]["index"] for chunk in chunks]
    else:
        answer = await chat(client, **body)
        indices = [choice["index"] for choice in answer["choices"]]
        assert answer["usage"]["prompt_tokens"] == len(backend.requests[0].prompt_token_ids)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert set(indices) == {0, 1, 2}
    seeds = [request.sampling_params.seed for request in backend.requests]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    backend.requests.clear()
    await chat(client, n=3, seed=7)
    assert [request.sampling_params.seed for request in backend.requests] == seeds


async def test_seeds_are_drawn_and_negative_ones_accepted(
    client: TestClient, backend: FakeBackend
) -> None:
    for seed in (None, None, -5, 2**62):
        await chat(client, seed=seed)
    seeds = [request.sampling_params.seed for request in backend.requests]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**53 for seed in seeds)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        (["ab", [97]], ["ab", [97]]),
    ],
)
async def test_prompts(
    client: TestClient, backend: FakeBackend, prompt: Any, prompts: list[Any]
) -> None:
    answer = await post(client, "completions", prompt=prompt, n=2)
    expected = [
        tuple(backend.tokenizer.encode(one) if isinstance(one, str) else one) for one in prompts
    ]
    sent = [request.prompt_token_ids for request in backend.requests]
    assert sent == [one for one in expected for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_best_of_returns_the_likeliest(client: TestClient, backend: FakeBackend) -> None:
    likely = {0: -3.0, 1: -1.0, 2: -2.0}
    texts = {0: "worst", 1: "best", 2: "second"}
    plain = backend._token

    async def generate(request: Any) -> Any:
        number = len(backend.requests)
        backend.requests.append(request)
        assert request.sampling_params.logprobs == 0
        for place, token in enumerate([*backend.tokenizer.encode(texts[number % 3]), 1]):
            yield replace(plain(request, place, token), logprob=likely[number % 3])

    backend.generate = generate  # type: ignore[method-assign]
    answer = await post(client, "completions", prompt=["x", "y"], n=2, best_of=3, echo=True)
    shown = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert shown == [(0, "xbest"), (1, "xsecond"), (2, "ybest"), (3, "ysecond")]
    assert answer["choices"][0]["logprobs"] is None
    tokens = sum(len(backend.tokenizer.encode(text)) + 1 for text in texts.values())
    assert answer["usage"]["completion_tokens"] == 2 * tokens


async def test_fill_in_the_middle(
    model_folder: Path, tmp_path: Path, serve: Callable[..., Any]
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "tiny")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    tokenizer.add_special_tokens(marks)
    tokenizer.save(str(folder / "tokenizer.json"))
    backend = FakeBackend(folder)
    async with serve(backend) as client:
        await post(client, "completions", prompt="fox", suffix="dog")
        await post(client, "completions", prompt="", suffix="dog")
        await post(client, "completions", prompt="fox", suffix="")
        await client.post("/api/generate", json={"prompt": "fox", "suffix": "dog"})
    encode = backend.tokenizer.encode
    first, last, middle = (tokenizer.token_to_id(mark) for mark in marks)
    filled = (first, *encode("fox"), last, *encode("dog"), middle)
    assert [request.prompt_token_ids for request in backend.requests] == [
        filled,
        (first, last, *encode("dog"), middle),
        tuple(encode("fox")),
        filled,
    ]


async def test_every_parameter_reaches_the_backend(
    client: TestClient, backend: FakeBackend
) -> None:
    await chat(
        client,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=3,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "6": 1.5},
        stop_token_ids=[9],
        max_completion_tokens=12,
        unknown_field={"x": 1},
        user="me",
        store=True,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
    )
    request = backend.requests[0]
    assert request.sampling_params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=3,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias=((5, -100.0), (6, 1.5)),
    )
    assert request.stop_token_ids == (*backend.tokenizer.eos_ids, 9)
    assert request.max_tokens == 12


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("limit", [-1, 10**9, CONTEXT])
async def test_as_many_tokens_as_fit(
    client: TestClient, backend: FakeBackend, field: str, limit: int
) -> None:
    await chat(client, **{field: limit})
    await post(client, "completions", prompt="x", **{field: limit})
    for request in backend.requests:
        assert request.max_tokens == CONTEXT - len(request.prompt_token_ids)


async def test_timings(client: TestClient, backend: FakeBackend) -> None:
    whole = await chat(client)
    chunks = await events(
        client, "chat/completions", messages=HI, stream_options={"include_usage": True}
    )
    for timings in (whole["timings"], chunks[-1]["timings"]):
        assert timings["cache_n"] == 3
        assert timings["prompt_n"] == len(backend.requests[0].prompt_token_ids) - 3
        assert timings["predicted_n"] == whole["usage"]["completion_tokens"]
        assert timings["prompt_ms"] > 0
        rate = timings["predicted_n"] / timings["predicted_ms"] * 1000
        assert timings["predicted_per_second"] == pytest.approx(rate)


async def test_omitted_parameters_use_the_generation_config(
    model_folder: Path, tmp_path: Path, serve: Callable[..., Any]
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "tiny")
    path = folder / "generation_config.json"
    wanted = json.loads(path.read_bytes()) if path.is_file() else {}
    wanted |= {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    wanted |= {"min_p": 0.05, "repetition_penalty": 1.1}
    path.write_text(json.dumps(wanted), encoding="utf-8")
    backend = FakeBackend(folder)
    async with serve(backend) as client:
        await chat(client)
        await chat(client, temperature=1.2, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
    found = [
        (one.temperature, one.top_p, one.top_k, one.min_p, one.repetition_penalty)
        for one in (request.sampling_params for request in backend.requests)
    ]
    assert found == [(0.6, 0.95, 20, 0.05, 1.1), (1.2, 1.0, 0, 0.0, 1.0)]


async def test_nulls_and_neutral_values_are_ignored(
    client: TestClient, backend: FakeBackend
) -> None:
    await chat(
        client, temperature=None, top_p=0, top_k=-1, stop=None, n=None, seed=None, max_tokens=None
    )
    sampling = backend.requests[0].sampling_params
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.8, 0, 0.05)
    assert 0 < sampling.top_p < 1e-3


#: Bodies of every protocol; Ollama's sampling parameters are in ``options``.
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "hi"},
}
OFF = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0}


@pytest.mark.parametrize(("path", "body"), ASKED.items(), ids=ASKED)
async def test_a_model_without_defaults_is_sampled_as_in_llama_cpp(
    client: TestClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    """Each parameter has its own default and can be turned off alone."""
    for given in ({}, {"temperature": 0.5}, {"top_k": 7}, OFF):
        more = {"options": given} if path.startswith("/api/") else given
        answer = await client.post(path, json=body | more)
        assert answer.status == 200, await answer.text()
    found = [
        (one.temperature, one.top_p, one.top_k, one.min_p)
        for one in (request.sampling_params for request in backend.requests)
    ]
    cut = (0.95, 40, 0.05)
    assert found == [(0.8, *cut), (0.5, *cut), (0.8, 0.95, 7, 0.05), (1, 1, 0, 0)]


async def test_what_a_model_with_defaults_leaves_out_is_neutral(
    model_folder: Path, tmp_path: Path, serve: Callable[..., Any]
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"top_p": 0.9}', encoding="utf-8")
    backend = FakeBackend(folder)
    async with serve(backend) as client:
        await chat(client)
    one = backend.requests[0].sampling_params
    assert (one.temperature, one.top_p, one.top_k, one.min_p) == (1.0, 0.9, 0, 0.0)


async def test_ignore_eos(client: TestClient, backend: FakeBackend) -> None:
    answer = await chat(client, ignore_eos=True, max_tokens=60)
    assert backend.requests[0].stop_token_ids == ()
    assert answer["usage"]["completion_tokens"] == 60
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ["lo th", ["nothing", "lo th"]])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings(
    client: TestClient, backend: FakeBackend, stop: Any, include: bool
) -> None:
    answer = await chat(client, stop=stop, include_stop_str_in_output=include)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == ("Hello th" if include else "Hel")
    assert choice["finish_reason"] == "stop"
    assert (backend.running, backend.closed) == (0, 1)
    chunks = await events(
        client,
        "chat/completions",
        messages=HI,
        stop=stop,
        include_stop_str_in_output=include,
    )
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == choice["message"]["content"]


async def test_a_stream_never_has_half_a_character(
    client: TestClient, backend: FakeBackend
) -> None:
    backend.answer = "🦊👩‍💻你好"
    chunks = await events(client, "chat/completions", messages=HI)
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == backend.answer
    assert "\ufffd" not in "".join(texts)


async def test_an_answer_cut_inside_a_character_ends_with_a_replacement(
    client: TestClient, backend: FakeBackend
) -> None:
    backend.tokens = backend.tokenizer.encode("a🦊")
    answer = await chat(client, max_tokens=3)
    assert answer["choices"][0]["message"]["content"] == "a\ufffd"


async def test_chat_logprobs(client: TestClient, backend: FakeBackend) -> None:
    backend.answer = "aé"
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    content = (await chat(client, **body))["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "\ufffd", "\ufffd"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "aé"
    assert content[0]["logprob"] == -0.5
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    assert backend.requests[0].sampling_params.logprobs == 2
    chunks = await events(client, "chat/completions", **body)
    streamed = [
        entry
        for chunk in chunks
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


async def test_chat_logprobs_without_alternatives(client: TestClient, backend: FakeBackend) -> None:
    answer = await chat(client, logprobs=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)


async def test_completion_logprobs(client: TestClient, backend: FakeBackend) -> None:
    backend.answer = "the fox"
    answer = await post(client, "completions", prompt="x", logprobs=3)
    logprobs = answer["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "the fox"
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["token_logprobs"] == [-0.5] * len(logprobs["tokens"])
    assert min(logprobs["top_logprobs"][0].values()) == -9999.0
    # The sampled token is included, alone if no alternatives were requested.
    answer = await post(client, "completions", prompt="x", logprobs=0)
    alone = answer["choices"][0]["logprobs"]
    assert alone["top_logprobs"] == [{token: -0.5} for token in alone["tokens"]]


async def test_logprobs_end_where_a_stop_string_begins(
    client: TestClient, backend: FakeBackend
) -> None:
    answer = await chat(client, logprobs=True, stop=" there")
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "Hello"


async def test_message_forms(client: TestClient, backend: FakeBackend) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "name": "x"},
        {"role": "user", "content": ""},
    ]
    await chat(client, messages=messages)
    text = backend.tokenizer.decode(backend.requests[0].prompt_token_ids, skip_special=False)
    assert text.startswith("<|start|>system\nBe brief.<|end|>\n<|start|>user\na\nb<|end|>\n")


async def test_special_tokens_of_an_answer(client: TestClient, backend: FakeBackend) -> None:
    backend.tokens = backend.tokenizer.encode("a<|start|>b")
    for skip, text in ((None, "ab"), (False, "a<|start|>b")):
        answer = await chat(client, skip_special_tokens=skip)
        assert answer["choices"][0]["message"]["content"] == text
