"""Prints the response times of other clients during attacks.

``python -m pytest -m slow -s tests/molinkd/api/test_attacks.py``
"""

import gzip
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from molinkd.api.prompt_worker_pool import PromptWorkers
from tests.support.fake_backend import FakeBackend, build_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HI = [{"role": "user", "content": "hi"}]
SHORT = {"messages": HI, "max_tokens": 2}


class Attacked:
    """An endpoint whose model has a regular expression that some texts make slow."""

    def __init__(self, folder: Path) -> None:
        path = build_model(folder) / "tokenizer.json"
        raw = json.loads(path.read_text(encoding="utf-8"))
        split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated"}
        steps = [split | {"invert": False}, raw["pre_tokenizer"]]
        raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        path.write_text(json.dumps(raw), encoding="utf-8")
        backend = FakeBackend(folder, answer="ok", context=131072)
        self.server = EndpointServer(backend, ApiSettings(), lambda: PromptWorkers({}))
        self.server.start(0)

    def ask(self, route: str, body: bytes | None, **headers: str) -> tuple[int, float]:
        """Return the status and duration of a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        begin = time.perf_counter()
        headers = {"Content-Type": "application/json", **headers}
        connection.request("GET" if body is None else "POST", route, body, headers)
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status, time.perf_counter() - begin

    def chat(self) -> tuple[int, float]:
        return self.ask("/v1/chat/completions", json.dumps(SHORT).encode())

    def crowd(self, data: bytes) -> None:
        """Open 400 connections, send ``data``, and keep them open for five seconds."""
        with ExitStack() as stack:
            for _ in range(400):
                address = ("127.0.0.1", self.server.port)
                stack.enter_context(socket.create_connection(address)).sendall(data)
            threading.Event().wait(5.0)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    attacked = Attacked(tmp_path_factory.mktemp("attacked") / "tiny")
    attacked.chat()
    yield attacked
    attacked.server.stop()


def packed(attacked: Attacked) -> None:
    body = gzip.compress(b" " * 2**24) * 115  # two gigabytes compressed to less than two megabytes
    attacked.ask("/v1/completions", body, **{"Content-Encoding": "gzip"})


def many_messages(attacked: Attacked) -> None:
    body = {"messages": [{"role": "user", "content": ""}] * 52_000, "max_tokens": 2}
    attacked.ask("/v1/chat/completions", json.dumps(body).encode())


def echoes(attacked: Attacked) -> None:
    body = {"prompt": "x " * 250_000, "n": 64, "echo": True, "max_tokens": 1}
    attacked.ask("/v1/completions", json.dumps(body).encode())


def pattern(attacked: Attacked) -> None:
    body = {"prompt": ("a" * 22 + "! ") * 33, "max_tokens": 2}
    attacked.ask("/v1/completions", json.dumps(body).encode())


def idle(attacked: Attacked) -> None:
    attacked.crowd(b"")


def slow_bodies(attacked: Attacked) -> None:
    attacked.crowd(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99\r\n\r\n{"
    )


@pytest.mark.parametrize(
    ("attack", "times"),
    [(packed, 4), (many_messages, 2), (echoes, 2), (pattern, 3), (idle, 3), (slow_bodies, 3)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_attacks_do_not_delay_others(
    attacked: Attacked, attack: Callable[[Attacked], None], times: int
) -> None:
    begin = time.perf_counter()
    with ThreadPoolExecutor(times) as pool:
        attacks: list[Future[None]] = [pool.submit(attack, attacked) for _ in range(times)]
        health, chats = [], []
        while not chats or not all(future.done() for future in attacks):
            health.append(attacked.ask("/health", None))
            chats.append(attacked.chat())
        for future in attacks:
            future.result()
    assert {status for status, _ in (*health, *chats)} == {200}
    print(
        f"\n{attack.__name__} × {times}: {time.perf_counter() - begin:.1f} s; meanwhile "
        f"/health took {max(health)[1]:.2f} s at most, a short chat {max(chats)[1]:.2f} s"
    )
