"""A request's body: read within bounds, decoded, and refused by the name of the field at fault."""

import asyncio
import re
from typing import TypeVar

import msgspec
from aiohttp import web

from molink.errors import RequestError
from molinkd.api.endpoint_settings import ApiSettings
from molinkd.api.problem import Problem, ProblemError
from molinkd.api.schema import NEUTRAL, Unsupported

Body = TypeVar("Body", bound=Unsupported)

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


async def read_body(request: web.Request, kind: type[Body], settings: ApiSettings) -> Body:
    """The body of ``request`` as a ``kind``.

    Raises:
        ProblemError: the body is too large, or didn't arrive in time.
        RequestError: it is no valid JSON, or a field is missing, wrong or not supported.
    """
    if (request.content_length or 0) > settings.max_body_bytes:
        raise _too_large(settings)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            data = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(settings) from None
    except TimeoutError:
        text = f"the body did not arrive within {settings.body_timeout_s:g} s"
        raise ProblemError(Problem(408, text, code="timeout")) from None
    except web.RequestPayloadError as error:
        raise RequestError(f"the body is damaged: {error}") from None
    return decode_body(data, kind)


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """``data`` as a ``kind``; see :func:`read_body`."""
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    _refuse_unsupported(body, kind)
    return body


def _refuse_unsupported(body: Unsupported, kind: type[Unsupported]) -> None:
    for name in Unsupported.__struct_fields__:
        value = getattr(body, name)
        if value is None or (
            not value and name not in ("web_search_options", "add_generation_prompt")
        ):
            continue
        if value not in NEUTRAL.get(name, ()):
            raise RequestError(f"`{name}` is not supported by this endpoint", name)


def _invalid(text: str) -> RequestError:
    """The field and the reason out of what msgspec says."""
    at = _AT.search(text)
    path = at[1] if at else ""
    reason = text[: at.start()] if at else text
    missing = _MISSING.match(reason)
    if missing:
        path = f"{path}.{missing[1]}".lstrip(".")
        reason = "required, but missing"
    path = path.replace("[...]", "")
    return RequestError(f"`{path}`: {reason}" if path else f"the body: {reason}", path or None)


def _too_large(settings: ApiSettings) -> ProblemError:
    return ProblemError(
        Problem(
            413,
            f"the body is larger than {settings.max_body_bytes} bytes",
            code="request_too_large",
        )
    )
