"""The endpoint's thread, ports and connections."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from molink.errors import PortInUse, UsageError
from molinkd.api import http_server as server_module
from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from tests.support.inline_reader import InlineReader


def get(port: int, path: str = "/health") -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_start_and_stop(backend: Any) -> None:
    server = EndpointServer(backend, ApiSettings(), InlineReader)
    port = server.start(0)
    assert server.port == port
    assert server.url == f"http://127.0.0.1:{port}/v1"
    assert b"200 OK" in get(port)
    with pytest.raises(UsageError):
        server.start(0)
    server.stop()
    server.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "molink-endpoint"]
    with pytest.raises(OSError, match=r"refused|reset"):
        get(port)


def test_stop_before_the_start_has_no_effect(backend: Any) -> None:
    server = EndpointServer(backend, ApiSettings(), InlineReader)
    server.stop()
    assert (server.port, server.loop) == (0, None)
    port = server.start(0)
    assert b"200 OK" in get(port)
    server.stop()


def test_the_next_free_port(backend: Any) -> None:
    first, second = (EndpointServer(backend, ApiSettings(), InlineReader) for _ in range(2))
    port = first.start(0)
    try:
        assert port < second.start(port) < port + server_module.PORT_TRIES
    finally:
        second.stop()
        first.stop()


def test_a_chosen_port_is_used_or_fails(backend: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} is in use"):
            EndpointServer(backend, ApiSettings(), InlineReader).start(port, port + 1)


def test_no_free_port(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PORT_TRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match="--api-port"):
            EndpointServer(backend, ApiSettings(), InlineReader).start(port)


def test_an_address_of_another_pc(backend: Any) -> None:
    server = EndpointServer(backend, ApiSettings(host="192.0.2.1", api_key="k"), InlineReader)
    with pytest.raises(UsageError, match=r"192\.0\.2\.1"):
        server.start(0)


def test_running_answers_end_with_the_endpoint(backend: Any) -> None:
    endpoint = EndpointServer(backend, ApiSettings(close_timeout_s=0.05), InlineReader)
    endpoint.start(0)
    backend.gate = asyncio.Semaphore(0)
    body = b'{"model":"tiny","prompt":"x"}'
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        assert endpoint.loop is not None
        waiting = asyncio.run_coroutine_threadsafe(backend.until_running(1), endpoint.loop)
        waiting.result(timeout=60)
        endpoint.stop()
    assert backend.running == 0


@pytest.mark.parametrize("junk", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nno header\r\n\r\n"])
def test_invalid_http_gets_an_envelope(endpoint: EndpointServer, junk: bytes) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=60) as connection:
        connection.sendall(junk)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "bad_request")


@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\nHost: lo"])
def test_a_silent_connection_is_closed(backend: Any, start: bytes) -> None:
    server = EndpointServer(backend, ApiSettings(header_timeout_s=0.05), InlineReader)
    port = server.start(0)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(start)
            assert connection.recv(4096) == b""
    finally:
        server.stop()


def test_the_routes_are_loaded_by_the_first_connection(backend: Any) -> None:
    loaded: list[InlineReader] = []

    def load() -> InlineReader:
        loaded.append(InlineReader())
        return loaded[-1]

    server = EndpointServer(backend, ApiSettings(), load)
    port = server.start(0)
    assert not loaded
    assert b"200 OK" in get(port)
    assert b"200 OK" in get(port)
    assert len(loaded) == 1
    server.stop()


def test_a_starting_daemon_imports_only_what_it_needs_to_join() -> None:
    check = "import molinkd.peer.main, sys; print(*sys.modules)"
    started = subprocess.run(
        [sys.executable, "-c", check], check=True, capture_output=True, text=True
    )
    routes = {"aiohttp", "jinja2", "tokenizers", "prometheus_client", "molinkd.api.app"}
    unneeded = {"importlib.metadata", "logging.handlers", "numpy", "sqlite3", "torch", "zipfile"}
    models = {"molink.checkpoint.gguf_import", "molink.checkpoint.hub", "molink.gguf.gguf_file"}
    deciders = {
        "molink.link",
        "molink.scheduler",
        "molink.swarm.controller.fleet",
        "molink.swarm.controller.relays",
        "molink.text.tool_calls.create",
    }
    assert not (routes | unneeded | models | deciders) & set(started.stdout.split())
