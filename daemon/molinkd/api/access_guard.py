"""Authenticates requests and protects the endpoint from other sites' pages.

A page of another site can send requests to ``localhost`` (a form post, a ``fetch`` without reading
the answer), and DNS rebinding makes it look like the same site. So the ``Host`` must be a name of
this endpoint, the ``Origin`` must be its own or an allowed one, and a ``POST`` must be JSON, which
no form can send. Ollama's clients send JSON without a content type, or with ``curl``'s default;
their routes accept that unless the browser marks the request as cross-site.

What changes the swarm needs the owner's token, which is new at each start and lies in a file that
only this PC's user can read: other users of the PC, and clients with an API key, have no such
right. Browsers never send it by themselves, so a page of another site cannot use it either.
"""

import hmac
import ipaddress
import secrets
import socket

from aiohttp import hdrs, web
from yarl import URL

from molinkd.api.api_settings import ApiSettings, is_loopback
from molinkd.api.cors import AllowedOrigins
from molinkd.api.problem import Problem, ProblemError

#: Paths that need no API key: they reveal nothing, and the page must be able to ask for the key.
PUBLIC_PATHS = frozenset({"/", "/health", "/openapi.json", "/readyz"})
#: Files of the chat page, which need no API key either.
PAGE_PREFIX = "/page/"
#: Prefix of Ollama's routes.
OLLAMA_PREFIX = "/api/"
_FORM_TYPE = "application/x-www-form-urlencoded"
_CLIENT_NAME = web.RequestKey("caller", str)
_CLIENT_ID = web.RequestKey("client", str)
_IS_OWNER = web.RequestKey("is_owner", bool)


class AccessGuard:
    """Checks every request before it is handled."""

    def __init__(self, settings: ApiSettings) -> None:
        self._keys = settings.keys
        self._owner_token = settings.owner_token.encode()
        #: Random client ids sent to other PCs in place of a key or its name.
        self._client_ids = {name: secrets.token_hex(8) if name else "" for name, _ in self._keys}
        self.origins = AllowedOrigins(settings.cors_origins)
        self._loopback = settings.loopback
        names = {name.lower().rstrip(".") for name in settings.allowed_hosts}
        if not settings.loopback:
            own = socket.gethostname().lower()
            names |= {own, f"{own}.local", settings.host.lower()}
        self._host_names = frozenset(names)

    def check_request(self, request: web.BaseRequest) -> None:
        """Check ``request`` and store its client: see :func:`client_name` and :func:`client_id`.

        Raises:
            ProblemError: foreign host or origin (403), no JSON (415), or no valid key (401).
        """
        host = request.headers.getall(hdrs.HOST, [])
        if len(host) != 1 or not self._is_own_host(host[0]):
            raise _forbidden(
                "the Host header does not match this endpoint; use localhost, or add the "
                "name to `allowed_hosts`",
                "invalid_host",
            )
        self._check_origin(request, host[0])
        if request.method == hdrs.METH_POST:
            _check_content(request)
        preflight = request.method == hdrs.METH_OPTIONS  # browsers send it without the key
        is_open = request.path in PUBLIC_PATHS or request.path.startswith(PAGE_PREFIX)
        given = _given_key(request)
        if self._owner_token and hmac.compare_digest(given, self._owner_token):
            request[_IS_OWNER] = True
            if self._keys:
                request[_CLIENT_NAME], request[_CLIENT_ID] = "", ""
        elif self._keys and not is_open and not preflight:
            name = self._authenticate(given)
            request[_CLIENT_NAME], request[_CLIENT_ID] = name, self._client_ids[name]

    def _is_own_host(self, host: str) -> bool:
        try:
            name = URL(f"http://{host}").host
        except ValueError:
            return False
        if not name:
            return False
        name = name.lower().rstrip(".")
        if is_loopback(name) or name in self._host_names or "*" in self._host_names:
            return True
        return not self._loopback and _is_address(name)  # rebinding needs a name

    def _check_origin(self, request: web.BaseRequest, host: str) -> None:
        for origin in request.headers.getall(hdrs.ORIGIN, []):
            own = (f"http://{host}".lower(), f"https://{host}".lower())
            if origin.lower() not in own and origin not in self.origins:
                raise _forbidden(
                    "pages of other sites can use this endpoint only if their origin is in "
                    "`cors_origins` (--cors-origin)",
                    "invalid_origin",
                )

    def _authenticate(self, given: bytes) -> str:
        # Compare all keys, so that timing reveals nothing.
        found = [name for name, own in self._keys if hmac.compare_digest(given, own.encode())]
        if not found:
            text = "a valid API key is required: send `Authorization: Bearer KEY`"
            problem = Problem(401, text, "authentication_error", None, "invalid_api_key")
            raise ProblemError(problem)
        return found[0]


def _given_key(request: web.BaseRequest) -> bytes:
    """Return the key or token that ``request`` carries; empty without one."""
    scheme, _, key = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() != "bearer":
        key = request.headers.get("X-Api-Key", "")  # Anthropic's clients use this header
    return key.strip().encode("utf-8", "surrogateescape")


def is_owner(request: web.BaseRequest) -> bool:
    """Whether ``request`` carries the token of this PC's owner."""
    return _IS_OWNER in request


def require_owner(request: web.BaseRequest) -> None:
    """Check that ``request`` comes from this PC's owner.

    Raises:
        ProblemError: it does not (403).
    """
    if not is_owner(request):
        raise _forbidden(
            "only the owner of this PC may do this: open the address that `molink page` prints, or "
            "send the token of `molink page --token` as `Authorization: Bearer TOKEN`",
            "owner_only",
        )


def client_name(request: web.BaseRequest) -> str:
    """Return the name of the client's key, or its address."""
    return request.get(_CLIENT_NAME) or request.remote or ""


def key_name(request: web.BaseRequest) -> str | None:
    """Return the name of the client's key, empty for ``api_key``; ``None`` without keys."""
    return request.get(_CLIENT_NAME)


def client_id(request: web.BaseRequest) -> str:
    """Return the id for fair scheduling: one per named key, empty for all others."""
    return request.get(_CLIENT_ID) or ""


def _is_json(request: web.BaseRequest) -> bool:
    """Whether the body is declared as JSON, or may be JSON on Ollama's routes; never a form."""
    kind = request.headers.get(hdrs.CONTENT_TYPE)
    if kind is not None and request.content_type == "application/json":
        return True
    if not request.path.startswith(OLLAMA_PREFIX) or (
        kind is not None and request.content_type != _FORM_TYPE
    ):
        return False
    return request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")


def _check_content(request: web.BaseRequest) -> None:
    if not _is_json(request):
        text = "the body must be JSON: send `Content-Type: application/json`"
        raise ProblemError(Problem(415, text, code="unsupported_media_type"))
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
        text = "the body must not be compressed"
        raise ProblemError(Problem(415, text, code="unsupported_media_type"))


def _forbidden(text: str, code: str) -> ProblemError:
    return ProblemError(Problem(403, text, "permission_error", None, code))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
