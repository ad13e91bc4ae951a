"""A hub with one model, for the calls that ``huggingface_hub`` and molink make of it."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

REPOSITORY = "owner/some-model"
#: Suffixes of large files.
WEIGHTS = (".safetensors", ".gguf")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """The server's files, and its misbehaviour."""

    def __init__(self, folder: Path, repository: str = REPOSITORY) -> None:
        self.folder, self.repository = folder, repository
        #: Requests for weights: file and range.
        self.asked: list[tuple[str, str]] = []
        #: Status of all answers; ``None``: the usual one.
        self.status = 0
        self.gated = False
        #: The next responses with weights break off, each after this number of bytes.
        self.cuts: list[int] = []
        #: Weights differ from their stated hash.
        self.altered = False
        #: This number of leading bytes of each file stays correct.
        self.honest = 0
        #: Whether range requests are honoured.
        self.ranges = True
        #: Where those that ask for weights are sent, another name of this server, if not here; and
        #: what they said there who they are.
        self.elsewhere = ""
        #: The other name of this server serves nothing any more.
        self.expired = ""
        self.said: list[str] = []
        #: Bytes of files of weights that were given, by who asked (the header) and the file.
        self.sent = Counter[tuple[str, str]]()
        self.url = ""
        #: What the description of the model says otherwise of some files, by their real names.
        self.lies: dict[str, dict[str, object]] = {}
        #: The commit in the model's description, and the one in response headers.
        self.commit = self.header_commit = COMMIT
        #: ETags that are not the file's hash, and files that are listed and missing.
        self.etags: dict[str, str] = {}
        self.missing: set[str] = set()

    def listed(self) -> list[dict[str, object]]:
        """The list of files in the description of the model, with lies."""
        return [
            {"rfilename": path.name, **self.described(path), **self.lies.get(path.name, {})}
            for path in self.files()
        ]

    def find(self, name: str) -> Path:
        """The file of a listed name."""
        names = {str(told.get("rfilename")): file for file, told in self.lies.items()}
        return self.folder / names.get(name, name.rpartition("/")[2])

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.is_file())

    def described(self, path: Path) -> dict[str, object]:
        data = path.read_bytes()
        sha = hashlib.sha256(data).hexdigest()
        oid = hashlib.sha1(b"blob %d\0%s" % (len(data), data), usedforsecurity=False).hexdigest()
        found: dict[str, object] = {"size": len(data), "oid": oid, "blobId": oid}
        if path.suffix in WEIGHTS:
            found["lfs"] = {"sha256": sha, "oid": sha, "size": len(data), "pointerSize": 100}
        return found


class Handler(BaseHTTPRequestHandler):
    """Answers for :attr:`hub`."""

    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        if hub.status:
            self._json(hub.status, {"error": "out of order"}, body=body)
        elif path.startswith(f"/api/models/{hub.repository}/tree/"):
            files = [{"type": "file", "path": p.name, **hub.described(p)} for p in hub.files()]
            self._json(200, files, body=body)
        elif path.startswith(f"/api/models/{hub.repository}"):
            info = {"id": hub.repository, "sha": hub.commit, "siblings": hub.listed()}
            self._json(200, info, body=body)
        elif hub.expired and f"http://{self.headers['Host']}" == hub.expired:
            self._json(403, {}, body=body)
        elif hub.elsewhere and f"http://{self.headers['Host']}" != hub.elsewhere:
            self._json(302, {}, body=body, Location=hub.elsewhere + self.path)
        elif path.startswith(f"/{hub.repository}/resolve/"):
            hub.said.append(self.headers.get("Authorization", ""))
            self._file(hub.find(path.split("/", 5)[5]), body=body)
        else:
            self._json(404, {}, body=body, **{"X-Error-Code": "RepoNotFound"})

    def _json(self, status: int, value: object, *, body: bool, **headers: str) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        for name, one in headers.items():
            self.send_header(name, one)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if body:
            self.wfile.write(text)

    def _file(self, path: Path, *, body: bool) -> None:
        hub = self.hub
        if hub.gated:
            self._json(403, {}, body=body, **{"X-Error-Code": "GatedRepo"})
            return
        if path.name in hub.missing:
            said = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": hub.header_commit}
            self._json(404, {}, body=body, **said)
            return
        data, weights = path.read_bytes(), path.suffix in WEIGHTS
        asked = self.headers.get("Range", "") if hub.ranges else ""
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin, end = int(first or 0), min(int(last or len(data)) + 1, len(data))
        if body and weights:
            hub.asked.append((path.name, self.headers.get("Range", "")))
        described = hub.described(path)
        lfs = described.get("lfs")
        etag = lfs["sha256"] if isinstance(lfs, dict) else described["oid"]
        etag = hub.etags.get(path.name, etag)
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", hub.header_commit)
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if not body:
            return
        rest = data[begin:end]
        if weights and hub.altered and begin >= hub.honest:
            rest = bytes(byte ^ 1 for byte in rest)
        if weights and hub.cuts:
            rest = rest[: hub.cuts.pop(0)]
            self.close_connection = True
        if weights:
            hub.sent[self.headers.get("Authorization", ""), path.name] += len(rest)
        self.wfile.write(rest)


@contextmanager
def serving(folder: Path, repository: str = REPOSITORY) -> Iterator[FakeHub]:
    """The hub, with the model in ``folder``; meanwhile it listens at ``url``."""
    hub = FakeHub(folder, repository)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Of", (Handler,), {"hub": hub}))
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        huggingface_hub.close_session()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def in_place(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, repository: str = REPOSITORY
) -> Iterator[FakeHub]:
    """Replace the real hub in this process, with a separate cache."""
    with serving(folder, repository) as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        yield hub
