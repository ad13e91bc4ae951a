"""API keys don't see each other's cached prompts, on a real ring and in every protocol."""

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
import torch
from aiohttp.test_utils import TestClient

from molink.checkpoint.model_source import find_demo_model
from molink.wire.messages.serving import MAX_CACHE_SALT
from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from molinkd.api.openai.schema import MAX_CACHE_SALT_LENGTH
from tests.support.fake_backend import FakeBackend
from tests.support.inline_reader import InlineReader
from tests.support.ring_backend import RingBackend

KEYS = {"phone": "p1", "attic": "a1"}
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
)


def body_of(path: str, text: str, salt: str | None = None) -> dict[str, Any]:
    """A request for one token."""
    body: dict[str, Any] = {"model": "tiny", "stream": False}
    if path in ("/v1/completions", "/api/generate"):
        body["prompt"] = text
    elif path == "/v1/responses":
        body["input"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    options = {} if salt is None else {"cache_salt": salt}
    if path.startswith("/api/"):
        return body | {"options": options | {"num_predict": 1, "temperature": 0}}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return body | options | {limit: 1, "temperature": 0}


def told_cached(usage: Mapping[str, Any]) -> int:
    """Read the number of cached tokens from any protocol's usage object; Ollama reports none."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    return int(details.get("cached_tokens", details.get("cache_read_input_tokens", 0)))


class _Asked:
    """An endpoint over a ring; ``cached`` returns how many tokens the scheduler found cached."""

    def __init__(self, **settings: Any) -> None:
        torch.set_num_threads(1)
        self.backend = RingBackend(find_demo_model().path)
        self.server = EndpointServer(self.backend, ApiSettings(**settings), InlineReader)
        self.server.start(0)

    def cached(self, path: str, text: str, key: str = "", salt: str | None = None) -> int:
        url = self.server.url.removesuffix("/v1") + path
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.post(url, json=body_of(path, text, salt), headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        found = self.backend.tokens(str(len(self.backend.asked)))[0].cached_tokens
        if not path.startswith("/api/"):
            assert told_cached(answer.json()["usage"]) == found
        return found


@pytest.fixture
def separate() -> Iterator[_Asked]:
    asked = _Asked(api_key="main", api_keys=KEYS)
    yield asked
    asked.server.stop()


@pytest.mark.parametrize("path", ROUTES)
def test_a_key_never_finds_the_prompt_of_another(separate: _Asked, path: str) -> None:
    prompt = f"The PIN for {path} is 4711, and nobody else may know it. " * 2
    assert separate.cached(path, prompt, "p1") == 0
    for other in ("a1", "main"):
        assert separate.cached(path, prompt, other) == 0
    for own in ("p1", "a1", "main"):
        assert separate.cached(path, prompt, own) > 16


@pytest.mark.parametrize("path", ROUTES)
def test_a_salt_narrows_within_a_key(separate: _Asked, path: str) -> None:
    prompt = f"Minutes of the meeting about {path}: all agreed with all. " * 2
    assert separate.cached(path, prompt, "p1", "alice") == 0
    assert separate.cached(path, prompt, "p1", "bob") == 0
    assert separate.cached(path, prompt, "p1") == 0
    assert separate.cached(path, prompt, "a1", "alice") == 0
    assert separate.cached(path, prompt, "p1", "alice") > 16


def test_an_option_shares_among_keys() -> None:
    asked = _Asked(api_keys=KEYS, share_prefix_cache=True)
    prompt = "A document that everybody at home asks about. " * 3
    assert asked.cached(ROUTES[0], prompt, "p1") == 0
    assert asked.cached(ROUTES[0], prompt, "a1") > 16
    assert asked.cached(ROUTES[0], prompt, "a1", "alone") == 0
    asked.server.stop()


def test_without_keys_there_is_one_client() -> None:
    asked = _Asked()
    prompt = "A question of the only user of this PC, asked twice. " * 2
    assert asked.cached(ROUTES[0], prompt) == 0
    assert asked.cached(ROUTES[0], prompt) > 16
    assert asked.cached(ROUTES[0], prompt, salt="alone") == 0
    assert {len(request.cache_salt) for request in asked.backend.asked} == {0, MAX_CACHE_SALT}
    asked.server.stop()


async def test_salts_tell_nothing_about_keys(backend: FakeBackend, serve: Any) -> None:
    for _ in range(2):  # two endpoints with the same key, or one before and after a restart
        async with serve(backend, ApiSettings(api_key="main", api_keys=KEYS)) as client:
            for key in ("main", "p1", "main"):
                headers = {"Authorization": f"Bearer {key}"}
                answer = await client.post(
                    ROUTES[1], json=body_of(ROUTES[1], "hi"), headers=headers
                )
                assert answer.status == 200
    salts = [request.cache_salt for request in backend.requests]
    assert salts[0] == salts[2] != salts[1]
    assert salts[3] == salts[5] != salts[4]
    assert len(set(salts)) == 4
    assert {len(salt) for salt in salts} == {MAX_CACHE_SALT}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("salt", ["", "x" * (MAX_CACHE_SALT_LENGTH + 1), 5])
async def test_invalid_salts_are_rejected(client: TestClient, path: str, salt: Any) -> None:
    answer = await client.post(path, json=body_of(path, "hi", salt))
    assert answer.status == 400
    assert "cache_salt`" in await answer.text()
