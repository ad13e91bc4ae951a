"""Who may call the endpoint: hosts, origins, content types, keys."""

import asyncio
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from molink.errors import UsageError
from molinkd.api.endpoint_settings import ApiSettings, is_loopback

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


async def test_any_host_where_the_owner_says_so(backend: Any, serve: Any) -> None:
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


async def test_compressed_bodies_are_refused(client: TestClient) -> None:
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
def test_beyond_loopback_needs_a_key(host: str) -> None:
    with pytest.raises(UsageError, match="API key"):
        ApiSettings(host=host)
    ApiSettings(host=host, api_key="k")


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_no_key(key: str) -> None:
    with pytest.raises(UsageError):
        ApiSettings(api_key=key)


def test_limits_must_make_sense() -> None:
    with pytest.raises(UsageError):
        ApiSettings(max_body_bytes=0)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LocalHost."])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    assert ApiSettings(host=host).loopback
