"""The chat page's files and headers, and the swarm summary."""

import hashlib
import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from molink.errors import Unavailable
from molinkd.api.api_settings import ApiSettings
from molinkd.api.swarm_summary import summarize_swarm
from tests.molinkd.cli.top.swarms import decode, peer, ring
from tests.support.fake_backend import FakeBackend

FOLDER = Path(str(files("molink"))) / "data" / "page"
OWN = sorted(path for path in FOLDER.iterdir() if path.is_file() and path.name != "index.html")
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


async def test_the_page(client: TestClient) -> None:
    response = await client.get("/")
    page = await response.text()
    assert response.content_type == "text/html"
    policy = dict(
        part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; ")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in str(policy)
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["X-DNS-Prefetch-Control"] == "off"
    assert not re.search(r"\s(?:style|on\w+)=", page)  # the policy forbids inline attributes
    assert not re.search(r"<(?:script|style)>", page)
    for address in re.findall(r'(?:src|href)="(/[^"]+)"', page):
        assert (await client.get(address)).status == 200, address


async def test_its_files_are_served_and_no_others(client: TestClient) -> None:
    for path in OWN:
        response = await client.get(f"/page/{path.name}")
        assert (response.status, response.content_type) == (200, TYPES[path.suffix]), path.name
        assert response.headers["Cache-Control"] == "no-cache"
        assert (await response.read()).decode() == path.read_text(encoding="utf-8")
    for path in ("index.html", "main.py", "../demo_model/config.json", "..%2f..%2fpy.typed", ""):
        assert (await client.get(f"/page/{path}")).status == 404, path
    assert (await client.get("/page/vendor/vendored.toml")).status == 404


async def test_cached_files_are_not_sent_again(client: TestClient) -> None:
    first = await client.get("/page/main.js")
    again = {"If-None-Match": first.headers["ETag"]}
    response = await client.get("/page/main.js", headers=again)
    assert (response.status, await response.read()) == (304, b"")
    assert response.headers["ETag"] == first.headers["ETag"]
    assert (await client.get("/page/base.css", headers=again)).status == 200


async def test_the_page_needs_no_key_but_its_data_does(backend: FakeBackend, serve: Any) -> None:
    async with serve(backend, ApiSettings(api_key="k")) as client:
        for path in ("/", "/page/main.js", "/page/vendor/marked.js"):
            assert (await client.get(path)).status == 200
        assert (await client.get("/swarm")).status == 401
        headers = {"Authorization": "Bearer k"}
        assert (await client.get("/swarm", headers=headers)).status == 200


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_page_files_load_nothing_foreign_and_insert_no_html(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    outside = re.findall(r"(?:https?:)?//[\w-]+\.[\w.-]+", text)
    assert set(outside) <= {"http://www.w3.org"}  # the namespace of SVG
    assert not re.search(r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|eval|Function)\b", text)
    assert "document.write" not in text
    assert len(text.splitlines()) < 400


def test_vendored_files_are_unmodified() -> None:
    vendor = FOLDER / "vendor"
    listed = tomllib.loads((vendor / "vendored.toml").read_text(encoding="utf-8"))
    named = {"vendored.toml"}
    for name, library in listed.items():
        assert library.keys() == {"version", "npm", "licence", "files"}, name
        for file, digest in library["files"].items():
            body = (vendor / file).read_bytes().replace(b"\r\n", b"\n")
            assert hashlib.sha256(body).hexdigest() == digest, file
            named.add(file)
        assert any("LICENSE" in file for file in library["files"]), name
    assert {path.name for path in vendor.iterdir()} == named


# --- the swarm ------------------------------------------------------------------------------------


async def test_the_swarm_summary(client: TestClient, backend: FakeBackend) -> None:
    backend.swarm = ring(["attic", "<b>\u202eevil\x1b[2J"])
    backend.swarm["pairing_requests"] = [
        {"name": "new", "code": "4827-1931", "address": "192.168.1.9"}
    ]
    response = await client.get("/swarm")
    text = await response.text()
    shown = json.loads(text)
    (first,) = shown["rings"]
    assert [stage["pc"] for stage in first["stages"]] == ["attic", "<b>evil\\x1b[2J"]
    assert [stage["layers"] for stage in first["stages"]] == [[0, 12], [12, 24]]
    assert [stage["busy"] for stage in first["stages"]] == [34, 35]
    assert (shown["ready"], shown["online"], shown["pairings"]) == (True, 2, 1)
    for secret in ("4827", "192.168.1.9", "0000000000000001", '"pid"'):
        assert secret not in text


async def test_many_pages_share_one_status_request(
    client: TestClient, backend: FakeBackend
) -> None:
    for _ in range(5):
        assert (await client.get("/swarm")).status == 200
    assert backend.status_asked < 5


async def test_an_unavailable_status(
    client: TestClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def status() -> bytes:
        raise Unavailable("the daemon is too busy")

    monkeypatch.setattr(backend, "fetch_status", status)
    response = await client.get("/swarm")
    assert response.status == 503
    assert (await response.json())["error"]["message"] == "the daemon is too busy"


def test_join_commands() -> None:
    listens = ["127.0.0.1:5466", "192.168.1.7:5466", "[fd00::7]:5466", "pc;rm -rf /:1", "pc:x"]
    status = {"coordinator": {"state": "running", "addresses": listens}}
    shown = summarize_swarm(decode(status))
    assert shown.join == ("molink join", "molink join 192.168.1.7", "molink join [fd00::7]")
    assert not shown.ready


def test_pcs_without_a_stage() -> None:
    peers = [
        peer(1, "spare"),
        peer(2, "phone", stage="none"),
        peer(3, "game", paused="paused: its GPU is busy"),
        peer(4, "gone", state="offline"),
    ]
    shown = summarize_swarm(decode({"peers": peers}))
    assert [one.doing for one in shown.pcs] == [
        "standby",
        "endpoint only",
        "paused: its GPU is busy",
        "offline",
    ]
    assert (shown.online, shown.offline) == (3, 1)
