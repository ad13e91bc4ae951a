"""The id of a request: in its answer's headers and in the log, so that one finds the other."""

import re
import secrets

from aiohttp import web

_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_KEY = web.RequestKey("request_id", str)


def assign_request_id(request: web.BaseRequest) -> None:
    """Give ``request`` its id: the client's own where it sends a sane one."""
    given = request.headers.get("X-Request-Id", "")
    request[_KEY] = given if _VALID_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def get_request_id(request: web.BaseRequest) -> str:
    """The id; empty if the request was refused before it got one."""
    found: str = request.get(_KEY, "")
    return found
