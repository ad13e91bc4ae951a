"""A web server on loopback with the files of a release, which tests can corrupt."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SUMS = "SHA256SUMS"


class ReleaseServer:
    """``files`` by name are served at :attr:`url`; ``cut`` ones end too early."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.moved: dict[str, str] = {}
        self.asked: list[str] = []

    def publish(self, version: str, files: Mapping[str, bytes], protocol: int = 10) -> str:
        """Serve a release; returns the wheel's name, whose content may be in ``files``."""
        wheel = f"molink-{version}-py3-none-any.whl"
        notes = {"version": version, "protocol": protocol, "state": 10}
        self.files = {
            wheel: b"wheel",
            "requirements.txt": b"",
            "release.json": json.dumps(notes).encode(),
            **files,
        }
        lines = [
            f"{hashlib.sha256(body).hexdigest()}  {name}\n" for name, body in self.files.items()
        ]
        self.files[SUMS] = "".join(lines).encode()
        return wheel

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        name = request.path.rpartition("/")[2]
        self.asked.append(name)
        if name in self.moved:
            request.send_response(302)
            request.send_header("Location", self.moved[name])
            request.end_headers()
            return
        body = self.files.get(name)
        request.send_response(404 if body is None else 200)
        request.send_header("Content-Length", str(len(body or b"")))
        request.end_headers()
        sent = body or b""
        request.wfile.write(sent[: len(sent) // 2] if name in self.cut else sent)


@contextmanager
def serve_release() -> Iterator[ReleaseServer]:
    """Serve on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        server = ReleaseServer(f"http://127.0.0.1:{listener.server_port}/molink")
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()
