"""Reports fields of a body that its route does not know, such as misspelt ones."""

import logging
import re
import time

import msgspec
from aiohttp import web

from molink.util.token_bucket import RateLimit, TokenBucket

_LOG = logging.getLogger(__name__)

#: Response header with the names.
IGNORED_FIELDS_HEADER = "X-Molink-Ignored-Fields"
#: Fields that clients send and that could not change an answer: for caches, speed, loading,
#: display, and the records of the companies that made the protocols.
_HARMLESS_FIELDS = frozenset({
    "cache_control", "cache_prompt", "client_metadata", "container", "context_management",
    "id_slot", "inference_geo", "metadata", "moderation", "prediction", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "reasoning.generate_summary",
    "reasoning.summary", "request_id", "response_format.json_schema.description",
    "return_progress", "safety_identifier", "service_tier", "shift", "speed", "store",
    "stream_options", "stream_options.include_obfuscation", "text.verbosity",
    "thinking.budget_tokens", "thinking.display", "timings_per_token", "truncate", "truncation",
    "user", "verbose", "verbosity", "options.f16_kv", "options.logits_all", "options.low_vram",
    "options.main_gpu", "options.num_batch", "options.num_gpu", "options.num_keep",
    "options.num_thread", "options.numa", "options.use_mlock", "options.use_mmap",
    "options.vocab_only",
})  # fmt: skip
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")
#: Maximum names, and characters of one.
_MAX_NAMES, _MAX_NAME_LENGTH = 8, 64
#: Rate of warnings, and how many are remembered so that none is repeated.
_LOG_LIMIT = RateLimit(burst=10, per_second=1 / 60)
_MAX_LOGGED = 256
_KEY = web.RequestKey("ignored_fields", str)


def find_ignored_fields(data: bytes, body: msgspec.Struct) -> list[str]:
    """Return the fields of ``data`` that ``body``, decoded from it, does not have.

    Those of objects inside are named like ``options.num_predct``; lists are not searched.
    """
    found: list[str] = []
    # Ignored names may be invalid UTF-8.
    text = data.decode("utf-8", "replace")
    for name, raw in msgspec.json.decode(text, type=dict[str, msgspec.Raw]).items():
        if name not in body.__struct_fields__:
            found.append(name)
        elif isinstance(inner := getattr(body, name), msgspec.Struct):
            found += [f"{name}.{field}" for field in find_ignored_fields(bytes(raw), inner)]
    return found


class IgnoredFieldsReporter:
    """Names ignored fields in a header of the response, and once in the log."""

    def __init__(self) -> None:
        self._limit = TokenBucket(_LOG_LIMIT, time.monotonic())
        self._logged: set[tuple[str, str]] = set()

    def report_fields(self, request: web.Request, data: bytes, body: msgspec.Struct) -> None:
        """Report the fields of ``data`` that ``body`` ignores."""
        found = [name for name in find_ignored_fields(data, body) if name not in _HARMLESS_FIELDS]
        if not found:
            return
        shown = [_NO_NAME.sub("?", name[:_MAX_NAME_LENGTH]) for name in found[:_MAX_NAMES]]
        request[_KEY] = names = ", ".join(shown) + (", ..." if len(found) > _MAX_NAMES else "")
        entry = (request.path, names)
        if entry not in self._logged and self._limit.try_take(time.monotonic()):
            if len(self._logged) >= _MAX_LOGGED:
                self._logged.clear()
            self._logged.add(entry)
            _LOG.warning("%s: ignored unknown fields: %s", *entry)


def add_ignored_fields(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Add the header to ``response`` if fields of ``request`` were ignored."""
    names = request.get(_KEY)
    if names:
        response.headers[IGNORED_FIELDS_HEADER] = names
