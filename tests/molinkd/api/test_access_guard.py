"""Access checks: hosts, origins, content types, keys."""

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient

from molink.errors import UsageError
from molink.wire.messages.serving import MAX_CLIENT
from molinkd.api.api_settings import ApiSettings, is_loopback
from molinkd.api.http_server import EndpointServer
from tests.support.inline_reader import InlineReader

BODY = b'{"model":"tiny","prompt":"x"}'


async def post(client: TestClient, status: int, **headers: str) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", **headers}
    response = await client.post("/v1/completions", data=BODY, headers=headers)
    body: dict[str, Any] = await response.json()
    assert response.status == status, body
    return body.get("error", body)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:1", 200),
        ("LOCALHOST.", 200),
        ("127.0.0.1:5465", 200),
        ("127.9.9.9", 200),
        ("[::1]:5465", 200),
        ("my-pc", 200),
        ("my-pc.:80", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.1.5", 403),
        ("[2001:db8::1]", 403),
        ("127.0.0.1@evil.example", 403),
        ("", 403),
        ("a b", 403),
        ("localhost:99999", 403),
    ],
)
async def test_hosts(backend: Any, serve: Any, host: str, status: int) -> None:
    async with serve(backend, ApiSettings(allowed_hosts=("my-pc",))) as client:
        await post(client, status, Host=host)
        response = await client.get("/", headers={"Host": host})
        assert response.status == status


async def test_a_request_without_a_host(client: TestClient) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
    assert b" 403 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("host", "status"),
    [("192.168.1.5:5465", 200), ("[fd00::1]", 200), ("localhost", 200), ("evil.example", 403)],
)
async def test_hosts_beyond_loopback(backend: Any, serve: Any, host: str, status: int) -> None:
    settings = ApiSettings(host="0.0.0.0", api_key="k")
    async with serve(backend, settings) as client:
        await post(client, status, Host=host, Authorization="Bearer k")


async def test_any_host_if_allowed(backend: Any, serve: Any) -> None:
    settings = ApiSettings(host="0.0.0.0", api_key="k", allowed_hosts=("*",))
    async with serve(backend, settings) as client:
        await post(client, 200, Host="proxy.example", Authorization="Bearer k")


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:5465", 200),
        ("https://localhost:5465", 200),
        ("http://localhost", 403),
        ("http://localhost:5466", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("file://", 403),
    ],
)
async def test_origins(client: TestClient, origin: str, status: int) -> None:
    await post(client, status, Host="localhost:5465", Origin=origin)
    response = await client.get("/v1/models", headers={"Host": "localhost:5465", "Origin": origin})
    assert response.status == status
    assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/jsonp", 415),
        ("nonsense", 415),
    ],
)
async def test_content_types(client: TestClient, kind: str, status: int) -> None:
    await post(client, status, **{"Content-Type": kind})


async def test_a_post_without_a_content_type(client: TestClient) -> None:
    response = await client.post("/v1/completions", data=BODY, skip_auto_headers=["Content-Type"])
    assert response.status == 415


async def test_compressed_bodies_are_rejected(client: TestClient) -> None:
    import zlib

    packed = zlib.compress(b" " * 10_000_000)
    headers = {"Content-Type": "application/json", "Content-Encoding": "deflate"}
    response = await client.post("/v1/completions", data=packed, headers=headers)
    assert response.status == 415


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer sécret", 200),
        ("bearer sécret", 200),
        ("Bearer secret", 401),
        ("Bearer ", 401),
        ("Bearer", 401),
        ("Basic sécret", 401),
        ("sécret", 401),
    ],
)
async def test_keys(backend: Any, serve: Any, header: str, status: int) -> None:
    async with serve(backend, ApiSettings(api_key="sécret")) as client:
        for path in ("/v1/models", "/metrics"):
            response = await client.get(path, headers={"Authorization": header})
            assert response.status == status
        if status == 401:
            error = (await (await client.get("/v1/models")).json())["error"]
            assert error["code"] == "invalid_api_key"
        for path in ("/", "/health", "/readyz"):
            assert (await client.get(path)).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "my-pc", ""])
def test_a_public_address_needs_a_key(host: str) -> None:
    with pytest.raises(UsageError, match="API key"):
        ApiSettings(host=host)
    ApiSettings(host=host, api_key="k")


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_rejected(key: str) -> None:
    with pytest.raises(UsageError):
        ApiSettings(api_key=key)


def test_limits_must_be_positive() -> None:
    with pytest.raises(UsageError):
        ApiSettings(max_body_bytes=0)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LocalHost."])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    assert ApiSettings(host=host).loopback


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("https://chat.example:8080", True),
        ("HTTPS://Chat.Example:8080", True),
        ("https://chat.example", False),
        ("https://chat.example:8080.evil.example", False),
        ("vscode-webview://0a1b", True),
        ("app://obsidian.md", True),
        ("app://other", False),
        ("null", False),
    ],
)
async def test_pages_of_allowed_origins(
    backend: Any, serve: Any, origin: str, allowed: bool
) -> None:
    origins = ("https://chat.example:8080/", "vscode-webview://*", "app://obsidian.md")
    async with serve(backend, ApiSettings(cors_origins=origins, api_key="k")) as client:
        ask = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
            "Access-Control-Request-Private-Network": "true",
        }
        preflight = await client.options("/v1/completions", headers=ask)
        assert preflight.status == (204 if allowed else 403)
        headers = {"Origin": origin, "Content-Type": "application/json"}
        without_key = await client.post("/v1/completions", data=BODY, headers=headers)
        assert without_key.status == (401 if allowed else 403)
        headers["Authorization"] = "Bearer k"
        answer = await client.post("/v1/completions", data=BODY, headers=headers)
        assert answer.status == (200 if allowed else 403)
        for response in (preflight, without_key, answer):
            shown = response.headers.get("Access-Control-Allow-Origin")
            assert shown == (origin if allowed else None)
            assert ("Origin" in response.headers.get("Vary", "")) is allowed
    if allowed:
        assert preflight.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert preflight.headers["Access-Control-Allow-Private-Network"] == "true"
        assert "x-request-id" in answer.headers["Access-Control-Expose-Headers"]


async def test_a_preflight_of_an_unknown_origin(client: TestClient) -> None:
    assert (await client.options("/v1/models")).status == 405


async def test_every_page_needs_a_key(backend: Any, serve: Any) -> None:
    with pytest.raises(UsageError, match="API key"):
        ApiSettings(cors_origins=("*",))
    async with serve(backend, ApiSettings(cors_origins=("*",), api_key="k")) as client:
        headers = {"Origin": "null", "Authorization": "Bearer k"}
        response = await client.get("/v1/models", headers=headers)
        assert response.headers["Access-Control-Allow-Origin"] == "null"


@pytest.mark.parametrize(
    "origin", ["", "chat.example", "https://a/b", "https://*", "https://*.example", "http://*"]
)
def test_invalid_origins(origin: str) -> None:
    with pytest.raises(UsageError, match="cors_origins"):
        ApiSettings(cors_origins=(origin,))


async def test_keys_with_names(backend: Any, serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings = ApiSettings(api_key="main", api_keys={"phone": "p1", "attic": "a1"})
    async with serve(backend, settings) as client:
        for key, status in (("main", 200), ("p1", 200), ("a1", 200), ("phone", 401)):
            response = await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert response.status == status
        response = await client.get("/v1/models", headers={"X-Api-Key": "a1"})
        assert response.status == 200
    with pytest.raises(UsageError, match="phone"):
        ApiSettings(api_keys={"phone": " "})
    ApiSettings(host="0.0.0.0", api_keys={"phone": "p1"})


async def test_each_named_key_is_a_separate_client(backend: Any, serve: Any) -> None:
    settings = ApiSettings(api_key="main", api_keys={"phone": "p1", "attic": "a1"})
    body = {"prompt": "Hello", "max_tokens": 2, "priority": -3, "max_queue_time": 2.5}
    async with serve(backend, settings) as client:
        for key in ("main", "p1", "a1", "p1"):
            headers = {"Authorization": f"Bearer {key}"}
            response = await client.post("/v1/completions", json=body, headers=headers)
            assert response.status == 200
    main, phone, attic, again = (asked.client for asked in backend.requests)
    assert main == ""
    assert phone == again
    assert len({main, phone, attic}) == 3
    assert not {phone, attic} & {"phone", "attic", "p1", "a1"}
    assert len(phone) <= MAX_CLIENT
    assert {(each.priority, each.max_queue_s) for each in backend.requests} == {(-3, 2.5)}


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", 2**31), ("priority", "high"), ("max_queue_time", 0), ("max_queue_time", 1e9)],
)
async def test_invalid_conversations_are_rejected(
    client: TestClient, field: str, value: object
) -> None:
    response = await client.post("/v1/completions", json={"prompt": "Hello", field: value})
    assert response.status == 400
    assert (await response.json())["error"]["param"] == field


async def test_the_log_names_key_and_request(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "molinkd.api.access")
    endpoint = EndpointServer(backend, ApiSettings(api_keys={"phone": "p1"}), InlineReader)
    endpoint.start(0)
    headers = {"Authorization": "Bearer p1", "X-Request-Id": "mine-1"}
    async with aiohttp.ClientSession(headers=headers) as session:
        answer = await session.get(f"{endpoint.url}/models")
        assert answer.headers["X-Request-Id"] == "mine-1"
    await asyncio.to_thread(endpoint.stop)
    assert "for phone, mine-1" in caplog.text
    assert "p1" not in caplog.text


async def test_request_ids(client: TestClient) -> None:
    ids = set()
    for given in ("", "a b", "x" * 129):
        response = await client.get("/v1/nothing", headers={"X-Request-Id": given})
        ids.add(response.headers["X-Request-Id"])
    assert len(ids) == 3
    assert all(one.startswith("req_") for one in ids)
