"""Clients with many connections, slow bodies or no reads do not lock out others."""

import asyncio
import logging
import socket
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from molinkd.api.api_settings import ApiSettings
from molinkd.api.backend import MetricValues
from molinkd.api.connections import Connections
from molinkd.api.http_server import EndpointServer
from molinkd.api.problem import ProblemError
from tests.support.fake_backend import FakeBackend
from tests.support.inline_reader import InlineReader

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)
BODY = b'{"model":"tiny","prompt":"x"}'

Dial = Callable[[bytes], socket.socket]


@contextmanager
def serving(backend: FakeBackend, **settings: Any) -> Iterator[tuple[EndpointServer, Dial]]:
    """An endpoint, and a function that opens a connection and sends."""
    server = EndpointServer(backend, ApiSettings(**settings), InlineReader)
    server.start(0)
    with ExitStack() as stack:
        stack.callback(server.stop)

        def dial(data: bytes) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            stack.enter_context(connection)
            connection.sendall(data)
            return connection

        yield server, dial


def status(connection: socket.socket) -> int:
    """Read one answer with its short body; returns its status."""
    head = b""
    while b"\r\n\r\n" not in head:
        part = connection.recv(65536)
        assert part, f"closed after {head!r}"
        head += part
    return int(head.split(b" ", 2)[1])


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def working(server: EndpointServer, backend: FakeBackend, count: int) -> None:
    """Wait until ``count`` generations run."""
    assert server.loop is not None
    asyncio.run_coroutine_threadsafe(backend.until_running(count), server.loop).result(60)


class _Idle:
    """A connection that may be closed."""

    def __init__(self) -> None:
        self.closed = False

    def force_close(self) -> None:
        self.closed = True


class _Peer:
    """A transport that knows its client's address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get_extra_info(self, name: str) -> object:
        return {"peername": (self._address, 1234)}.get(name)


@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\nHost: lo", GET, POST % (99, b"{")])
def test_the_longest_idle_or_slowest_goes_first(backend: FakeBackend, start: bytes) -> None:
    with serving(backend, max_connections=4) as (_, dial):
        first = dial(start)
        others = [dial(start) for _ in range(20)]
        assert status(dial(GET)) == 200
        until_closed(first)
        assert status(dial(GET)) == 200
        assert others


def test_a_running_answer_is_never_cut_off_for_another(backend: FakeBackend) -> None:
    backend.gate = asyncio.Semaphore(0)
    with serving(backend, max_connections=3) as (server, dial):
        busy = [dial(POST % (len(BODY), BODY)) for _ in range(3)]
        working(server, backend, 3)
        refused = until_closed(dial(GET))
        assert b" 503 " in refused.splitlines()[0]
        assert b'"code":"too_many_connections"' in refused
        assert server.loop is not None
        for _ in range(200):
            server.loop.call_soon_threadsafe(backend.gate.release)
        assert [status(connection) for connection in busy] == [200] * 3
        # The busy connections are idle now, so one of them is closed.
        assert status(dial(GET)) == 200


def keyed(key: bytes, request: bytes = POST % (len(BODY), BODY)) -> bytes:
    return request.replace(b"Host: localhost", b"Host: localhost\r\nX-Api-Key: " + key)


def test_one_key_leaves_connections_for_another(backend: FakeBackend) -> None:
    backend.gate = asyncio.Semaphore(0)
    keys = {"greedy": "g", "other": "o"}
    with serving(backend, max_connections=10, api_keys=keys) as (server, dial):
        busy = [dial(keyed(b"g")) for _ in range(8)]
        working(server, backend, 8)
        once = keyed(b"g").replace(b"Host:", b"Connection: close\r\nHost:")
        refused = until_closed(dial(once))
        assert b" 429 " in refused.splitlines()[0]
        assert b'"code":"too_many_connections"' in refused
        assert status(dial(GET)) == 200, "probes do not count"
        other = dial(keyed(b"o"))
        working(server, backend, 9)
        assert server.loop is not None
        for _ in range(400):
            server.loop.call_soon_threadsafe(backend.gate.release)
        assert [status(connection) for connection in (*busy, other)] == [200] * 9
        assert status(dial(keyed(b"g"))) == 200


def test_greedy_clients_converge_to_equal_shares_and_leave_some() -> None:
    settings = ApiSettings(api_keys={"a": "a", "b": "b"})
    connections = Connections(None, settings, None)  # type: ignore[arg-type]
    held: dict[str, list[Any]] = {"a": [], "b": [], "c": []}

    def fill(name: str) -> None:
        """Send requests until one is rejected."""
        while True:
            connection: Any = object()
            try:
                connections.assign_client(connection, name)
            except ProblemError:
                return
            held[name].append(connection)

    fill("a")
    assert len(held["a"]) == 455
    for _ in range(2000):  # one of a's requests ends, and b asks before a does
        connections.remove_connection(held["a"].pop(0))
        fill("b")
        fill("a")
    assert len(held["a"]) == pytest.approx(len(held["b"]), abs=2)
    assert len(held["a"]) + len(held["b"]) <= 512 * 16 / 17 + 1
    fill("c")
    assert len(held["c"]) >= 25


def test_the_client_with_most_idle_connections_loses_one() -> None:
    connections = Connections(None, ApiSettings(max_connections=4), None)  # type: ignore[arg-type]
    quiet, *loud = (_Idle() for _ in range(6))
    for address, each in (("10.0.0.1", quiet), *(("10.0.0.2", one) for one in loud)):
        assert connections.admit_connection(each, _Peer(address))  # type: ignore[arg-type]
    assert not quiet.closed
    assert [one.closed for one in loud] == [True, True, False, False, False]


def test_many_slow_bodies_are_not_a_server_error(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with serving(backend, max_connections=8, max_concurrent_bodies=4) as (_, dial):
        with ThreadPoolExecutor(4) as pool:
            assert len(list(pool.map(dial, [POST % (99, b"{")] * 200))) == 200
        assert status(dial(POST % (len(BODY), BODY))) == 200
    assert not caplog.records


def test_a_slow_body_is_refused(backend: FakeBackend) -> None:
    with serving(backend, body_timeout_s=0.05, min_body_rate=1 << 20) as (_, dial):
        answer = until_closed(dial(POST % (99, b"{")))
        assert b" 408 " in answer.splitlines()[0]
        assert b"bytes per second" in answer


def test_concurrent_bodies_are_limited(backend: FakeBackend) -> None:
    with serving(backend, max_concurrent_bodies=2) as (_, dial):
        first = dial(POST % (99, b"{"))
        until = [dial(POST % (99, b"{")) for _ in range(2)]
        assert status(first) == 408
        assert status(dial(POST % (len(BODY), BODY))) == 200
        assert until


def test_a_client_that_does_not_read_is_cut_off(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {f"{'x' * 4000}{number}": 1.0 for number in range(1000)}
    monkeypatch.setattr(backend, "collect_metrics", lambda: MetricValues(gauges=figures))
    with serving(backend, stall_timeout_s=0.05, min_body_rate=1 << 30) as (_, dial):
        metrics = GET.replace(b"/health", b"/metrics").replace(
            b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"
        )
        lazy = dial(metrics)
        assert lazy.recv(1)
        monkeypatch.undo()
        while b'status="499"' not in until_closed(dial(metrics)):
            pass
        assert len(until_closed(lazy)) < 12_000_000


def test_a_compressed_body_is_never_decompressed(backend: FakeBackend) -> None:
    headers = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Encoding: %s\r\nContent-Length: %d\r\n\r\n%s"
    )
    with serving(backend) as (_, dial):
        for kind, data in (
            (b"gzip", b"no gzip at all"),
            (b"deflate", zlib.compress(b" " * 1_000_000)[:-4]),
            (b"br", b"x"),
        ):
            connection = dial(headers % (kind, len(data), data) + GET)
            received = b""
            while received.count(b"HTTP/1.1 ") < 2:
                part = connection.recv(65536)
                assert part, received
                received += part
            assert b" 415 " in received.splitlines()[0]
            assert b"HTTP/1.1 200 OK" in received


def test_probes_are_logged_at_debug_level(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with serving(backend) as (_, dial):
        for path in (b"/health", b"/readyz", b"/metrics", b"/"):
            assert status(dial(GET.replace(b"/health", path))) == 200
        assert status(dial(GET.replace(b"/health", b"/v1/models"))) == 200
        assert status(dial(GET.replace(b"/health", b"/a%0Ab"))) == 404
        until_closed(dial(b"nonsense\r\n\r\n"))
    logged = [record.getMessage() for record in caplog.records]
    assert [line.split(" s, for ")[0].rsplit(" ", 1)[0] for line in logged] == [
        "GET /v1/models 200",
        r"GET /a\nb 404",
    ]
