"""Serves the chat page under a strict content security policy."""

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from aiohttp import web

from molinkd.api.access_guard import PAGE_PREFIX

#: Content types of the served files, by suffix; includes licences of vendored code.
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
#: No inline code, no foreign content, no forms, and HTML only through DOMPurify.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    # Keeps browsers from resolving the hosts of links in answers.
    "X-DNS-Prefetch-Control": "off",
}


@dataclass(frozen=True, slots=True)
class _PageFile:
    body: bytes
    content_type: str
    etag: str

    @classmethod
    def load_file(cls, source: Traversable, suffix: str) -> "_PageFile":
        """Read a file. A checkout on Windows may have other line ends, so they are normalized."""
        body = source.read_bytes().replace(b"\r\n", b"\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()[:15]).decode()
        return cls(body, _TYPES[suffix], digest)

    async def serve_file(self, request: web.Request) -> web.Response:
        """The chat page."""
        known = request.if_none_match or ()
        if any(etag.value in (self.etag, "*") for etag in known):
            answer = web.Response(status=304, headers=_HEADERS)
        else:
            answer = web.Response(
                body=self.body, content_type=self.content_type, charset="utf-8", headers=_HEADERS
            )
        answer.etag = self.etag
        return answer


class ChatPage:
    """Serves the page. Each file has its own route, so nothing else can be requested."""

    def __init__(self) -> None:
        self._files = dict(_load_files(files("molink") / "data" / "page", PurePosixPath()))

    @property
    def routes(self) -> list[web.RouteDef]:
        """``/`` and the files of the page."""
        return [
            web.get("/" if name == "index.html" else PAGE_PREFIX + name, one.serve_file)
            for name, one in self._files.items()
        ]


def _load_files(folder: Traversable, at: PurePosixPath) -> list[tuple[str, _PageFile]]:
    """Return all files of known types with their paths."""
    found: list[tuple[str, _PageFile]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        path = at / entry.name
        if entry.is_dir():
            found += _load_files(entry, path)
        elif path.suffix in _TYPES:
            found.append((str(path), _PageFile.load_file(entry, path.suffix)))
    return found
