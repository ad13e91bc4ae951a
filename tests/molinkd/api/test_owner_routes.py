"""The owner's routes: who may use them, and what they do."""

import json
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from molink.errors import RequestError
from molinkd.api import catalog_fits
from molinkd.api.administration import LocalModel
from molinkd.api.api_settings import ApiSettings
from molinkd.api.catalog_fits import CatalogModel, choose_offers
from tests.molinkd.cli.top import swarms
from tests.support.fake_administration import HEADERS, TOKEN, FakeAdministration
from tests.support.fake_backend import FakeBackend

ACTIONS: list[tuple[str, dict[str, Any], tuple[object, ...]]] = [
    ("pairing", {"code": "4827-1931", "approve": True}, ("approve", "4827-1931")),
    ("pairing", {"code": "4827-1931", "approve": False}, ("refuse", "4827-1931")),
    ("drain", {"drained": True}, ("drain", True)),
    ("settings", {"name": "keep_awake", "value": "false"}, ("set", "keep_awake", "false")),
    ("serve", {"model": "qwen3:8b"}, ("serve", "qwen3:8b")),
    ("stop", {"model": "tiny"}, ("stop", "tiny")),
]


@pytest.mark.parametrize(("route", "body", "done"), ACTIONS)
async def test_only_the_owner_acts(
    backend: FakeBackend, serve: Any, route: str, body: dict[str, Any], done: tuple[object, ...]
) -> None:
    settings = ApiSettings(api_key="k", owner_token=TOKEN)
    administration = FakeAdministration()
    async with serve(backend, settings, administration) as client:

        async def post(headers: dict[str, str], **kwargs: Any) -> int:
            response = await client.post(f"/swarm/{route}", headers=headers, **kwargs)
            return int(response.status)

        assert await post({}, json=body) == 401
        assert await post({"Authorization": "Bearer k"}, json=body) == 403
        assert await post({**HEADERS, "Origin": "https://evil.example"}, json=body) == 403
        assert await post({**HEADERS, "Host": "evil.example"}, json=body) == 403
        form = {**HEADERS, "Content-Type": "text/plain"}
        assert await post(form, data=json.dumps(body).encode()) == 415
        assert administration.done == []
        assert await post(HEADERS, json={}) == 400
        assert await post(HEADERS, json=body) == 200
        assert administration.done == [done]
        if route != "serve":
            administration.error = RequestError("no PC shows that code")
            assert await post(HEADERS, json=body) == 400


async def test_serving_streams_its_progress(backend: FakeBackend, serve: Any) -> None:
    async with serve(backend, ApiSettings(owner_token=TOKEN)) as client:
        body = {"model": "qwen3:8b"}
        response = await client.post("/swarm/serve", json=body, headers=HEADERS)
        lines = [json.loads(line) for line in (await response.text()).splitlines()]
        assert [(one["state"], one["done"], one["total"]) for one in lines] == [
            ("fetching", 0, 0),
            ("fetching", 5, 10),
            ("fetching", 10, 10),
            ("asked", 0, 0),
        ]
        assert lines[-1]["name"] == "qwen3:8b"


async def test_the_owner_sees_what_waits_for_a_decision(
    backend: FakeBackend, client: TestClient, serve: Any
) -> None:
    backend.swarm = swarms.loading() | {
        "models": [{"name": "tiny", "ready": 1}],
        "pairing_requests": [{"name": "new", "code": "4827-1931", "address": "192.168.1.9"}],
    }
    assert (await (await client.get("/swarm")).json())["owner"] is None
    async with serve(backend, ApiSettings(owner_token=TOKEN)) as own:
        shown = await (await own.get("/swarm", headers=HEADERS)).json()
        owner = shown["owner"]
        assert (owner["pc"], owner["drained"]) == ("alice", False)
        assert owner["pairings"] == [{"name": "new", "address": "192.168.1.9", "code": "4827-1931"}]
        assert [(one["pc"], one["done"]) for one in owner["transfers"]] == [("alice", 340 * 10**6)]
        assert owner["models"][0]["name"] == "tiny"
        assert owner["events"][0] == {"age_s": 20.0, "text": "attic is offline"}
        assert [one["memory"] for one in shown["pcs"]] == [12 * swarms.GB] * 2
        backend.swarm["peers"][0]["paused"] = "drained"  # type: ignore[index]


async def test_models_of_the_pc_and_of_the_catalog(
    backend: FakeBackend, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = {
        "kind": "cuda",
        "name": "Card",
        "memory": 12 * swarms.GB,
        "read_rate": 400e9,
        "has_block_kernels": True,
        "reads_pages": True,
    }
    backend.swarm = {
        "peers": [{"id": "a", "name": "desk", "state": "online", "stage": "auto", "capacity": card}]
    }
    administration = FakeAdministration(local=(LocalModel("mine", 5, source="/m"),))
    async with serve(backend, ApiSettings(owner_token=TOKEN), administration) as client:
        assert (await client.get("/swarm/models")).status == 403
        assert (await client.get("/swarm/settings")).status == 403
        settings = await (await client.get("/swarm/settings", headers=HEADERS)).json()
        assert [one["name"] for one in settings] == ["pause_times", "keep_awake"]
        shown = await (await client.get("/swarm/models", headers=HEADERS)).json()
        # The second answer comes from a cache.
        monkeypatch.setattr(catalog_fits, "describe_entry", None)
        assert await (await client.get("/swarm/models", headers=HEADERS)).json() == shown
    assert shown["local"] == [{"name": "mine", "size": 5, "partial": False, "source": "/m"}]
    by_name = {one["name"]: one for one in shown["catalog"]}
    assert by_name["qwen3:8b"]["quantize"] == "none"
    assert by_name["qwen3:8b"]["tokens_per_s"] > 10
    assert by_name["llama3.3:70b"]["quantize"] is None
    assert len(shown["offers"]) == 3
    assert all(by_name[name]["quantize"] == "none" for name in shown["offers"])


def model(name: str, parameters: int, speed: float | None, quantize: str | None) -> CatalogModel:
    return CatalogModel(name, "chat", "MIT", parameters, 1, 1, quantize, 1, speed)


def test_offers() -> None:
    sizes = (70, 30, 14, 8, 4, 1)
    models = [model(f"{size}b", size, 100 / size, "none") for size in sizes]
    assert choose_offers(models, "none") == ("14b", "8b", "1b")
    assert choose_offers([model("70b", 70, 1.0, "none")], "none") == ("70b",)
    assert choose_offers([model("70b", 70, None, "int8")], "none") == ()
    assert choose_offers([model("70b", 70, None, "none"), *models[-1:]], "none") == ("1b",)
    assert choose_offers([model("8b", 8, None, "none")], "none") == ("8b",)
