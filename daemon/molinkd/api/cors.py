"""Cross-origin requests (CORS) of pages that the owner allows."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from molink.errors import UsageError

if TYPE_CHECKING:
    from aiohttp import web

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+")
#: ``scheme://*``: extensions and webviews have ids that are not known in advance.
_SCHEME = re.compile(r"(?!https?:)([a-z][a-z0-9+.-]*://)\*")
#: Maximum length of a preflight's header list.
_MAX_HEADERS = 1024
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]*")
_EXPOSED = "x-request-id, request-id, retry-after, x-molink-ignored-fields"


class AllowedOrigins:
    """Origins allowed to use the endpoint: exact ones, ``scheme://*``, or ``*``."""

    def __init__(self, origins: Iterable[str]) -> None:
        """Raises :class:`UsageError` for an invalid origin."""
        self._origins: set[str] = set()
        self._schemes: tuple[str, ...] = ()
        self.allows_any = False
        for text in origins:
            origin = text.strip().lower().rstrip("/")
            if origin == "*":
                self.allows_any = True
            elif match := _SCHEME.fullmatch(origin):
                self._schemes += (match[1],)
            elif _ORIGIN.fullmatch(origin):
                self._origins.add(origin)
            else:
                raise UsageError(
                    f"`cors_origins`: {text!r} is not an origin; use scheme and host, such "
                    "as https://chat.example:8080, or app://* or *"
                )

    def __contains__(self, origin: str) -> bool:
        origin = origin.lower()
        return self.allows_any or origin in self._origins or origin.startswith(self._schemes)

    def match_origin(self, request: "web.BaseRequest") -> str | None:
        """Return the origin of ``request`` if it is allowed, else ``None``."""
        origins = request.headers.getall("Origin", [])
        return origins[0] if len(origins) == 1 and origins[0] in self else None

    def preflight_response(self, request: "web.Request") -> "web.Response | None":
        """Answer a CORS preflight; ``None`` if ``request`` is not one."""
        from aiohttp import hdrs, web

        method = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if request.method != hdrs.METH_OPTIONS or method is None or not self.match_origin(request):
            return None
        requested = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        headers: dict[str, str] = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, OPTIONS",
            hdrs.ACCESS_CONTROL_MAX_AGE: "600",
        }
        if requested and len(requested) <= _MAX_HEADERS and _HEADER_NAMES.fullmatch(requested):
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = requested
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return web.Response(status=204, headers=headers)

    def add_headers(self, request: "web.BaseRequest", response: "web.StreamResponse") -> None:
        """Add CORS headers to ``response`` if the origin is allowed."""
        origin = self.match_origin(request)
        if origin is None:
            return
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED
        response.headers.add("Vary", "Origin")
