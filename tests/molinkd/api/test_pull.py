"""``/api/pull``: Ollama's own client as the owner and as a stranger."""

from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from aiohttp.test_utils import TestClient

from molink.errors import ModelNotFound
from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from tests.support.fake_administration import HEADERS, TOKEN, FakeAdministration
from tests.support.fake_backend import FakeBackend
from tests.support.inline_reader import InlineReader


@pytest.fixture
def url(backend: FakeBackend, administration: FakeAdministration) -> Iterator[str]:
    settings = ApiSettings(owner_token=TOKEN)
    server = EndpointServer(backend, settings, InlineReader, lambda: administration)
    server.start(0)
    yield server.url.removesuffix("/v1")
    server.stop()


@pytest.fixture
def owner(url: str) -> Iterator[ollama.Client]:
    client = ollama.Client(host=url, headers=HEADERS)
    yield client
    client._client.close()


@pytest.fixture
def stranger(url: str) -> Iterator[ollama.Client]:
    client = ollama.Client(host=url)
    yield client
    client._client.close()


def test_the_owner_sees_the_progress(
    owner: ollama.Client, administration: FakeAdministration
) -> None:
    first, *moving, last = owner.pull("hf.co/owner/model", stream=True)
    assert (first.status, last.status) == ("pulling manifest", "success")
    assert [(one.completed, one.total) for one in moving] == [(5, 10), (10, 10)]
    (digest,) = {one.digest for one in moving}
    assert digest is not None
    assert {one.status for one in moving} == {f"pulling {digest[7:19]}"}
    assert administration.done == [("pull", "owner/model")]
    assert owner.pull("qwen3:8b").status == "success"


def test_errors(owner: ollama.Client, administration: FakeAdministration) -> None:
    administration.error = ModelNotFound("no model 'x'")
    with pytest.raises(ollama.ResponseError, match="no model 'x'") as refused:
        owner.pull("x")
    assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="no model 'x'"):
        list(owner.pull("x", stream=True))
    administration.progress = ()
    with pytest.raises(ollama.ResponseError, match="no model 'x'") as refused:
        list(owner.pull("x", stream=True))
    assert refused.value.status_code == 404, "nothing was sent before"


def test_a_stranger_pulls_only_what_is_served(
    stranger: ollama.Client, administration: FakeAdministration
) -> None:
    with pytest.raises(ollama.ResponseError, match="only the owner of this PC") as refused:
        stranger.pull("qwen3:8b")
    assert refused.value.status_code == 403
    assert stranger.pull("tiny:latest").status == "success"
    assert administration.done == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer of-a-friend"}, 403),
        ({"X-Api-Key": TOKEN}, 200),
        (HEADERS, 200),
        ({**HEADERS, "Origin": "https://evil.example"}, 403),
        ({**HEADERS, "Host": "evil.example"}, 403),
    ],
)
async def test_an_api_key_is_not_the_owners_token(
    backend: FakeBackend, serve: Any, headers: dict[str, str], status: int
) -> None:
    settings = ApiSettings(api_keys={"friend": "of-a-friend"}, owner_token=TOKEN)
    administration = FakeAdministration()
    async with serve(backend, settings, administration) as client:
        body = {"model": "qwen3:8b", "stream": False}
        response = await client.post("/api/pull", json=body, headers=headers)
        assert response.status == status
        assert bool(administration.done) is (status == 200)
        if headers == HEADERS:  # the owner's token is an API key, too
            assert (await client.get("/v1/models", headers=headers)).status == 200


async def test_without_a_token_nobody_is_the_owner(backend: FakeBackend, serve: Any) -> None:
    async with serve(backend, ApiSettings(), FakeAdministration()) as client:
        for key in ("", "x"):
            headers = {"Authorization": f"Bearer {key}"}
            response = await client.post("/api/pull", json={"model": "x"}, headers=headers)
            assert response.status == 403


async def test_a_pull_names_a_model(client: TestClient) -> None:
    response = await client.post("/api/pull", json={})
    assert response.status == 400
    assert "`model`" in (await response.json())["error"]
