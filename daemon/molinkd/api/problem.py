"""HTTP errors in OpenAI's envelope ``{"error": {message, type, param, code}}``."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from molink.errors import (
    ContextTooLong,
    DeadlineExceeded,
    ModelNotFound,
    MolinkError,
    NotAuthorized,
    Overloaded,
    RequestError,
    Unavailable,
)

_INVALID = "invalid_request_error"
_SERVER = "server_error"

#: Type and code of errors that aiohttp raises, by status.
_HTTP: dict[int, tuple[str, str]] = {
    404: (_INVALID, "unknown_url"),
    405: (_INVALID, "method_not_allowed"),
    413: (_INVALID, "request_too_large"),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """The HTTP status and envelope fields of an error."""

    status: int
    message: str
    type: str = _INVALID
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    def error_fields(self) -> dict[str, str | None]:
        """Return the fields of the envelope."""
        return {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }

    def to_json(self) -> bytes:
        """Encode the envelope as JSON."""
        return msgspec.json.encode({"error": self.error_fields()})

    def to_response(self, envelope: "Envelope | None" = None) -> web.Response:
        """Build the response, in OpenAI's format or that of ``envelope``."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        answer = web.Response(
            status=self.status,
            body=self.to_json() if envelope is None else envelope(self),
            headers=headers,
            content_type="application/json",
        )
        if self.status in (408, 413):
            answer.force_close()  # the rest of the body is not read
        return answer


#: Encodes an error in a protocol's format.
Envelope = Callable[[Problem], bytes]


class ProblemError(Exception):
    """An HTTP error without a counterpart in :mod:`molink.errors`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def problem_of(error: BaseException, request: str = "this request") -> Problem | None:
    """Map ``error`` to a problem; ``None`` if it is unexpected.

    ``request`` is the method and path, for errors that aiohttp raises.
    """
    match error:
        case ProblemError():
            return error.problem
        case web.HTTPException():
            kind, code = _HTTP.get(error.status, (_INVALID, "http_error"))
            text = f"{request[:256]}: {error.reason.lower()}"
            return Problem(error.status, text, kind, None, code)
        case MolinkError():
            return _from_molink_error(error)
    return None


def internal_problem() -> Problem:
    """The problem for an unexpected error, whose details are only logged."""
    return Problem(500, "internal error; see the log of the endpoint", _SERVER, None, "internal")


def _from_molink_error(error: MolinkError) -> Problem:
    text = str(error)
    match error:
        case ContextTooLong():
            return Problem(400, text, param=error.param, code="context_length_exceeded")
        case RequestError():
            return Problem(400, text, param=error.param, code="invalid_value")
        case ModelNotFound():
            return Problem(404, text, param="model", code="model_not_found")
        case Overloaded():
            return Problem(
                429, text, "rate_limit_error", None, "overloaded", retry_after=error.retry_after
            )
        case DeadlineExceeded():
            return Problem(504, text, _SERVER, None, "timeout")
        case Unavailable():
            return Problem(503, text, _SERVER, None, "unavailable", retry_after=1.0)
        case NotAuthorized():
            return Problem(403, text, "permission_error", None, "forbidden")
    return Problem(500, text, _SERVER, None, type(error).__name__)
