"""The chat page: one file of the package's data, served with a policy that lets it do little."""

import base64
import hashlib
import re
from importlib.resources import files

from aiohttp import web

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class ChatPage:
    """Serves the page. Its policy allows its own script and style (by hash) and this endpoint."""

    def __init__(self) -> None:
        source = files("molink") / "data" / "chat.html"
        page = source.read_text(encoding="utf-8").replace("\r\n", "\n")
        self._body = page.encode()
        hashes: dict[str, list[str]] = {"script": [], "style": []}
        for kind, text in _INLINE.findall(page):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            hashes[kind].append(f"'sha256-{digest}'")
        self._policy = "; ".join(
            (
                "default-src 'none'",
                "script-src " + " ".join(hashes["script"]),
                "style-src " + " ".join(hashes["style"]),
                "connect-src 'self'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            )
        )

    async def handle(self, request: web.Request) -> web.Response:
        """``GET /``."""
        headers = {
            "Content-Security-Policy": self._policy,
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return web.Response(
            body=self._body, content_type="text/html", charset="utf-8", headers=headers
        )
