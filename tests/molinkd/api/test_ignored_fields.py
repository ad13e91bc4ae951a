"""Fields that no route knows are ignored, but named in a header and in the log."""

import logging
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from molinkd.api.ignored_fields import IGNORED_FIELDS_HEADER
from tests.support.fake_backend import FakeBackend

HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HI, "stream": False}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": HI},
    "/api/chat": CHAT,
    "/api/generate": {"prompt": "hi", "stream": False},
    "/api/show": {"model": "tiny"},
}


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "molinkd.api.ignored_fields" and record.levelno == logging.WARNING
    ]


@pytest.mark.parametrize(("path", "body"), BODIES.items(), ids=BODIES)
async def test_a_misspelt_field_is_named(
    client: TestClient, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    answer = await client.post(path, json=body | {"max_token": 3, "topp": "secret"})
    assert answer.status == 200
    assert answer.headers[IGNORED_FIELDS_HEADER] == "max_token, topp"
    assert warnings_in(caplog) == [f"{path}: ignored unknown fields: max_token, topp"]
    await client.post(path, json=body | {"max_token": 4, "topp": 1})
    assert len(warnings_in(caplog)) == 1
    answer = await client.post(path, json=body)
    assert IGNORED_FIELDS_HEADER not in answer.headers


async def test_streams_and_refusals_name_them_too(client: TestClient) -> None:
    body = CHAT | {"max_token": 3, "stream": True}
    async with client.post("/v1/chat/completions", json=body) as answer:
        assert answer.headers[IGNORED_FIELDS_HEADER] == "max_token"
        assert b"[DONE]" in await answer.read()
    answer = await client.post("/v1/chat/completions", json=body | {"max_tokens": 0})
    assert (answer.status, answer.headers[IGNORED_FIELDS_HEADER]) == (400, "max_token")


@pytest.mark.parametrize(
    ("path", "more", "named"),
    [
        ("/api/chat", {"options": {"num_predct": 3, "num_gpu": 1}}, "options.num_predct"),
        ("/v1/chat/completions", {"stream_options": {"usage": True}}, "stream_options.usage"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_object", "json_schema": {"strcit": True}}},
            "response_format.json_schema.strcit",
        ),
        ("/v1/messages", {"thinking": {"type": "disabled", "budget": 1}}, "thinking.budget"),
        ("/v1/responses", {"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
    ],
)
async def test_fields_of_objects_inside(
    client: TestClient, path: str, more: dict[str, Any], named: str
) -> None:
    answer = await client.post(path, json=BODIES[path] | more)
    assert answer.status == 200, await answer.text()
    assert answer.headers[IGNORED_FIELDS_HEADER] == named


#: What official clients and agents send.
HARMLESS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto",
        "prompt_cache_key": "k", "safety_identifier": "s", "stream_options": {},
        "chat_template_kwargs": {"anything": 1}, "logit_bias": {"5": 1},
    },
    "/v1/responses": {
        "store": False, "prompt_cache_key": "k", "client_metadata": {}, "truncation": "auto",
        "reasoning": {"effort": None, "summary": "auto"}, "text": {"verbosity": "low"},
    },
    "/v1/messages": {
        "metadata": {"user_id": "u"}, "service_tier": "auto",
        "thinking": {"type": "enabled", "budget_tokens": 2000},
    },
    "/api/chat": {"keep_alive": "5m", "truncate": True, "options": {"num_thread": 4, "num_gpu": 9}},
}  # fmt: skip


@pytest.mark.parametrize(("path", "more"), HARMLESS.items(), ids=HARMLESS)
async def test_fields_that_change_nothing_are_not_named(
    client: TestClient, caplog: pytest.LogCaptureFixture, path: str, more: dict[str, Any]
) -> None:
    answer = await client.post(path, json=BODIES[path] | more)
    assert answer.status == 200, await answer.text()
    assert IGNORED_FIELDS_HEADER not in answer.headers
    assert warnings_in(caplog) == []


async def test_hostile_names_are_harmless_and_few(
    client: TestClient, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    names = [
        "x\r\nSet-Cookie: a=b",
        "\x1b[2J",
        "a" * 5000,
        "naïve, 🦊",
        *(f"k{n}" for n in range(9)),
    ]
    answer = await client.post("/v1/completions", json={"prompt": "hi", **dict.fromkeys(names, 1)})
    shown = answer.headers[IGNORED_FIELDS_HEADER]
    assert answer.status == 200
    assert "Set-Cookie" not in answer.headers
    assert shown.split(", ")[:3] == ["x??Set-Cookie??a?b", "??2J", "a" * 64]
    assert shown.endswith("k3, ...")
    for number in range(100):
        await client.post("/v1/completions", json={"prompt": "hi", f"typo{number}": "\n"})
    assert 2 <= len(warnings_in(caplog)) <= 12
    assert all(line.isprintable() and line.isascii() for line in warnings_in(caplog))
    assert len(backend.requests) == 101


async def test_names_that_are_no_text(client: TestClient) -> None:
    data = b'{"prompt": "hi", "max_tok\xed\xa0\x80en": 4, "n": 1}'
    headers = {"Content-Type": "application/json"}
    answer = await client.post("/v1/completions", data=data, headers=headers)
    assert (answer.status, answer.headers[IGNORED_FIELDS_HEADER]) == (200, "max_tok???en")
