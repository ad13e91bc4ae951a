"""Request ids, which appear in response headers and in the log."""

import re
import secrets

from aiohttp import web

_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_KEY = web.RequestKey("request_id", str)


def assign_request_id(request: web.BaseRequest) -> None:
    """Assign an id to ``request``: the client's ``X-Request-Id`` if valid, else a random one."""
    given = request.headers.get("X-Request-Id", "")
    request[_KEY] = given if _VALID_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def get_request_id(request: web.BaseRequest) -> str:
    """Return the id; empty if the request was rejected before it got one."""
    found: str = request.get(_KEY, "")
    return found
