"""Pages of other origins that the owner lets in: what browsers have to be told (CORS)."""

import re
from collections.abc import Iterable

from aiohttp import hdrs, web

from molink.errors import UsageError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+")
#: A browser's extensions and webviews have ids that nobody knows beforehand: ``scheme://*``.
_SCHEME = re.compile(r"(?!https?:)([a-z][a-z0-9+.-]*://)\*")
#: Headers that a page may want to send; more are no preflight of a client's.
_MAX_HEADERS = 1024
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]*")
_EXPOSED = "x-request-id, request-id, retry-after"


class AllowedOrigins:
    """Origins that may use the endpoint beside its own: exact ones, ``scheme://*``, or ``*``."""

    def __init__(self, origins: Iterable[str]) -> None:
        """Raises :class:`UsageError` for what is none."""
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
                    f"`cors_origins`: {text!r} is no origin: write it as the browser's address "
                    "line begins, such as https://chat.example:8080, or app://* or *"
                )

    def __contains__(self, origin: str) -> bool:
        origin = origin.lower()
        return self.allows_any or origin in self._origins or origin.startswith(self._schemes)

    def match_origin(self, request: web.BaseRequest) -> str | None:
        """The origin of ``request`` if it is one of these; ``None`` if not, or it has none."""
        origins = request.headers.getall(hdrs.ORIGIN, [])
        return origins[0] if len(origins) == 1 and origins[0] in self else None

    def preflight_response(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks whether its page may; ``None`` if it doesn't ask."""
        method = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if request.method != hdrs.METH_OPTIONS or method is None or not self.match_origin(request):
            return None
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        headers: dict[str, str] = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, OPTIONS",
            hdrs.ACCESS_CONTROL_MAX_AGE: "600",
        }
        if asked and len(asked) <= _MAX_HEADERS and _HEADER_NAMES.fullmatch(asked):
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return web.Response(status=204, headers=headers)

    def add_headers(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Let the page read ``response``, if it may."""
        origin = self.match_origin(request)
        if origin is None:
            return
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
