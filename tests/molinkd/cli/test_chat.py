"""``molink chat`` against a fake endpoint."""

import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from molinkd.cli import chat
from molinkd.cli.chat import EventParser, run_chat
from molinkd.cli.conversation import MAX_IMAGE_BYTES
from molinkd.cli.main import run
from molinkd.peer.home import Home, RunFile


class Endpoint(ThreadingHTTPServer):
    """Answers each chat with ``pieces`` or ``error``, and records the requests."""

    daemon_threads = False
    pieces: tuple[str, ...] = ("Hel", "lo", " \x1b[31m🦊")
    thoughts: tuple[str, ...] = ()
    error: tuple[int, str] | None = None
    ends = True
    models: tuple[str, ...] = ("first", "second")

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        models = [{"id": name} for name in self.server.models]
        self._send(200, json.dumps({"data": models}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(json.loads(body))
        self.server.keys.append(self.headers["Authorization"])
        if self.server.error is not None:
            status, message = self.server.error
            self._send(status, json.dumps({"error": {"message": message}}).encode())
            return
        thoughts = [{"reasoning_content": thought} for thought in self.server.thoughts]
        deltas = [*thoughts, *({"content": piece} for piece in self.server.pieces)]
        chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        self._send(200, (events + ("data: [DONE]\n\n" if self.server.ends else "")).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[Endpoint]:
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as server:
        yield server


class Terminal(io.StringIO):
    """A standard input that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typing_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def type_in(*lines: str) -> None:
        monkeypatch.setattr("sys.stdin", Terminal("".join(f"{line}\n" for line in lines)))

    return type_in


def test_one_shot(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_chat(endpoint.url, "hi", None, "key", system="Be brief", max_tokens=5)
    assert code == 0
    assert capsys.readouterr().out == "Hello [31m🦊\n"
    assert endpoint.keys == ["Bearer key"]
    assert endpoint.bodies == [
        {
            "max_tokens": 5,
            "model": "first",
            "messages": [
                {"role": "system", "content": "Be brief"},
                {"role": "user", "content": "hi"},
            ],
            "stream": True,
        }
    ]


def test_a_question_from_a_pipe(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("piped\n"))
    assert run_chat(endpoint.url, model="second") == 0
    assert endpoint.bodies[0]["model"] == "second"
    assert endpoint.bodies[0]["messages"] == [{"role": "user", "content": "piped"}]
    assert "Hello" in capsys.readouterr().out


def test_a_conversation(
    endpoint: Endpoint, typing_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    typing_in("one", "", "two", "/clear", "/help", "/foo", "three", "/bye", "never")
    assert run_chat(endpoint.url) == 0
    roles = [[message["content"] for message in body["messages"]] for body in endpoint.bodies]
    answer = "".join(endpoint.pieces)
    assert roles == [["one"], ["one", answer, "two"], ["three"]]
    shown = capsys.readouterr().out
    assert "first at " in shown
    assert "Unknown command '/foo'; /help lists all" in shown


def test_commands_change_the_next_requests(
    endpoint: Endpoint, typing_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    typing_in(
        "/set parameter num_predict 7",
        "/set parameter temperature warm",
        "/system Be brief",
        "/set format json",
        "/set nothink",
        "/set verbose",
        "/model second",
        "one",
        "/set parameter num_predict",
        "/set system",
        "/set noformat",
        "/show parameters",
        "/etc/hosts is what?",
        "/set nonsense",
    )
    assert run_chat(endpoint.url) == 0
    first, second = endpoint.bodies
    assert first == {
        "max_tokens": 7,
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": False},
        "stream_options": {"include_usage": True},
        "model": "second",
        "messages": [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "one"},
        ],
        "stream": True,
    }
    assert second["messages"][-1]["content"] == "/etc/hosts is what?"
    assert second["messages"][0]["role"] == "user"
    assert not {"max_tokens", "response_format"} & second.keys()
    shown = capsys.readouterr().out
    for text in ("must be a number, not warm", "chat_template_kwargs", "can't set nonsense"):
        assert text in shown
    assert "0 prompt tokens, first token in " in shown


def test_a_question_of_several_lines(endpoint: Endpoint, typing_in: Callable[..., None]) -> None:
    typing_in('"""one', "/clear", 'three"""', '"""four"""', 'say "hi"')
    assert run_chat(endpoint.url) == 0
    asked = [body["messages"][-1]["content"] for body in endpoint.bodies]
    assert asked == ["one\n/clear\nthree", "four", 'say "hi"']


def test_a_saved_conversation_continues(
    endpoint: Endpoint,
    typing_in: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, other = tmp_path / "talk.json", tmp_path / "other.json"
    other.write_text("[1]", encoding="utf-8")
    typing_in("/system Be brief", "one", f"/save {file}", f"/save {file}", f"/save {other}")
    assert run_chat(endpoint.url, model="second") == 0
    typing_in(f"/load {file}", "two", f"/load {tmp_path / 'none'}", "/save", "/show messages")
    assert run_chat(endpoint.url) == 0
    assert endpoint.bodies[1]["model"] == "second"
    contents = [one["content"] for one in endpoint.bodies[1]["messages"]]
    assert contents == ["Be brief", "one", "".join(endpoint.pieces), "two"]
    assert other.read_text(encoding="utf-8") == "[1]"
    shown = capsys.readouterr().out
    for text in ("is not a conversation", "can't read", "/save needs a name", "user: two"):
        assert text in shown.replace("\n", " ")


@pytest.mark.parametrize("terminal", [False, True])
def test_reasoning_is_shown_in_a_terminal_but_not_sent_back(
    endpoint: Endpoint,
    typing_in: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    endpoint.thoughts = ("H", "m.\x1b[31m")
    typing_in("one", "two")
    assert run_chat(endpoint.url) == 0
    shown = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert ("Hm.[31m\n\nHello" in shown) == terminal
    assert endpoint.bodies[1]["messages"][1]["content"] == "".join(endpoint.pieces)


def test_failed_questions_are_dropped(
    endpoint: Endpoint, typing_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.error = (429, "too \x1b[1mbusy")
    typing_in("one", "two")
    assert run_chat(endpoint.url) == 0
    assert [len(body["messages"]) for body in endpoint.bodies] == [1, 1]
    assert capsys.readouterr().err.count("error: too [1mbusy") == 2


def test_ctrl_c_stops_an_answer_and_keeps_its_text(
    endpoint: Endpoint, typing_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = chat._content

    def interrupted(event: dict[str, Any]) -> str:
        content = original(event)
        if content == "lo" and len(endpoint.bodies) == 1:
            raise KeyboardInterrupt
        return content

    monkeypatch.setattr(chat, "_content", interrupted)
    typing_in("one", "two")
    assert run_chat(endpoint.url) == 0
    contents = [message["content"] for message in endpoint.bodies[1]["messages"]]
    assert contents == ["one", "Hel", "two"]


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [(404, "no such model", 5), (503, "nobody is there", 6), (400, "bad field", 14)],
)
def test_errors(
    endpoint: Endpoint,
    capsys: pytest.CaptureFixture[str],
    status: int,
    message: str,
    code: int,
) -> None:
    endpoint.error = (status, message)
    assert run_chat(endpoint.url, "hi") == code
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_missing_key(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint.error = (401, "a valid API key is needed")
    assert run_chat(endpoint.url, "hi") == 14
    assert "--api-key" in capsys.readouterr().err


def test_only_the_daemon_of_this_home_gets_its_key(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path))
    own = endpoint.url.removesuffix("/v1")
    note = RunFile.of_this_process(1, own, api_key="own")
    note.save_file(Home(tmp_path).create_folders().run_file)
    bench = ["bench", "serve", "--requests", "1", "--output-tokens", "1", "--url"]
    assert run(["chat", "hi"]) == 0
    assert run(["chat", "hi", "--url", endpoint.url]) == 0
    run([*bench, own])  # fails: this endpoint only streams
    assert endpoint.keys == 3 * ["Bearer own"]
    with serving() as other:
        assert run(["chat", "hi", "--url", other.url]) == 0
        run([*bench, other.url])
        assert other.keys == [None, None]
    endpoint.keys.clear()
    assert run(["chat", "hi", "--api-key", "given"]) == 0
    monkeypatch.setenv("MOLINK_API_KEY", "variable")
    assert run(["chat", "hi"]) == 0
    assert endpoint.keys == ["Bearer given", "Bearer variable"]


def test_an_unreachable_endpoint(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_chat("http://127.0.0.1:1/v1", "hi") == 6
    error = capsys.readouterr().err
    assert "molink up" in error
    assert error.count("\n") == 1


def test_an_endpoint_without_models(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint.models = ()
    assert run_chat(endpoint.url, "hi") == 5
    assert "serves no model" in capsys.readouterr().err


def test_a_dropped_stream(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint.ends = False
    assert run_chat(endpoint.url, "hi") == 6
    captured = capsys.readouterr()
    assert captured.out.startswith("Hello")
    assert "before the answer was complete" in captured.err


def test_nothing_to_ask(endpoint: Endpoint) -> None:
    assert run_chat(endpoint.url, "") == 2


def test_event_parser_at_any_boundary() -> None:
    data = b'data: {"a":1}\n\n: comment\n\nevent: error\r\ndata:{"b":2}\r\n\r\ndata: [DONE]\n\n'
    for size in (1, 3, 7, len(data)):
        parser = EventParser()
        parts = [data[index : index + size] for index in range(0, len(data), size)]
        events = [event for part in parts for event in parser.feed(part)]
        assert events == [b'{"a":1}', b'{"b":2}', b"[DONE]"]


def test_images_go_with_the_next_question(
    endpoint: Endpoint,
    typing_in: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    image, large, talk = tmp_path / "fox.jpg", tmp_path / "large.png", tmp_path / "talk.json"
    image.write_bytes(b"fox")
    large.write_bytes(bytes(MAX_IMAGE_BYTES + 1))
    url = {"url": "data:image/jpeg;base64,Zm94"}
    shown = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What is it?"}]
    assert run_chat(endpoint.url, "What is it?", images=[image]) == 0
    assert endpoint.bodies[-1]["messages"] == [{"role": "user", "content": shown}]
    typing_in(f"/image {image}", "What is it?", "Sure?", "/show messages", f"/save {talk}")
    assert run_chat(endpoint.url) == 0
    asked = [one["content"] for one in endpoint.bodies[-1]["messages"] if one["role"] == "user"]
    assert asked == [shown, "Sure?"]
    assert "user: (image) What is it?" in capsys.readouterr().out
    typing_in(f"/load {talk}", "Again?", f"/image {large}", "/image missing.png", "/clear", "Now?")
    assert run_chat(endpoint.url) == 0
    assert endpoint.bodies[-2]["messages"][0]["content"] == shown
    assert [one["content"] for one in endpoint.bodies[-1]["messages"]] == ["Now?"]
    out = capsys.readouterr().out
    assert "large.png is larger than 20 MiB" in out
    assert "can't read missing.png" in out
    assert run_chat(endpoint.url, "What?", images=[large]) == 2
