"""Calls of earlier answers, as a model's chat template wants them.

Clients send arguments as texts, several calls in one message, and ids of any kind. Templates differ
in what they take of that, so each is tried on a small conversation once.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from molink.errors import RequestError

#: A message, or a tool, as templates take them.
Plain = dict[str, Any]
Render = Callable[[Sequence[Plain], Sequence[Plain]], str]

_ID = re.compile(r"[a-zA-Z0-9]{9}")
_ID_LENGTH = 9
_TOOL: Plain = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Try it.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True, slots=True)
class CallStyle:
    """What a template wants: arguments as objects, or as texts; no content beside calls, or an
    empty one; one call a message; ids of nine letters and digits; thoughts as ``thinking``."""

    objects: bool = True
    no_content: bool = False
    one_call: bool = False
    short_ids: bool = False
    thinking: bool = False


def find_style(source: str, render: Render) -> CallStyle:
    """The style of the template ``source``, which ``render`` renders."""
    objects, no_content = next(_working(render), (True, False))
    return CallStyle(
        objects=objects,
        no_content=no_content,
        one_call="tool_calls[0]" in source,
        short_ids="length != 9" in source,
        thinking="message.thinking" in source,
    )


def fit_calls(messages: Sequence[Plain], style: CallStyle) -> list[Plain]:
    """``messages`` with their calls, and what came of them, in this style."""
    fitted = [_fitted(message, style) for message in messages]
    return _split(fitted) if style.one_call else fitted


def _working(render: Render) -> Iterator[tuple[bool, bool]]:
    """The ways in which a template writes a call's arguments as JSON, or in its own words."""
    for objects in (True, False):
        for no_content in (False, True):
            arguments: Any = {"needle": "hay"} if objects else '{"needle": "hay"}'
            function = {"name": "probe", "arguments": arguments}
            call = {"id": "abcdefghi", "type": "function", "function": function}
            answer = {"role": "assistant", "content": None if no_content else ""}
            messages: list[Plain] = [
                {"role": "user", "content": "Go."},
                answer | {"tool_calls": [call]},
                {"role": "tool", "tool_call_id": "abcdefghi", "content": "Gone."},
            ]
            try:
                text = render(messages, [_TOOL])
            except RequestError:
                continue
            if "needle" in text and "'needle" not in text and '\\"needle' not in text:
                yield objects, no_content


def _fitted(message: Plain, style: CallStyle) -> Plain:
    message = dict(message)
    if style.short_ids and "tool_call_id" in message:
        message["tool_call_id"] = _short(message["tool_call_id"])
    if "tool_calls" not in message:
        return message
    message["tool_calls"] = [_fitted_call(call, style) for call in message["tool_calls"]]
    if style.no_content and not message["content"]:
        message["content"] = None
    if style.thinking and not message["content"] and "reasoning_content" in message:
        message["thinking"] = message["reasoning_content"]
    return message


def _fitted_call(call: Plain, style: CallStyle) -> Plain:
    function = dict(call["function"])
    arguments = function["arguments"] or "{}"
    if style.objects and isinstance(arguments, str):
        arguments = _object(arguments)
    elif not style.objects and not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode("utf-8")
    function["arguments"] = arguments
    ident = _short(call["id"]) if style.short_ids else call["id"]
    return {**call, "id": ident, "function": function}


def _object(arguments: str) -> Any:
    """Arguments as an object; what a model wrote that is none stays a text."""
    try:
        value = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _short(ident: str) -> str:
    if _ID.fullmatch(ident):
        return ident
    return hashlib.sha256(ident.encode("utf-8", "replace")).hexdigest()[:_ID_LENGTH]


def _split(messages: Sequence[Plain]) -> list[Plain]:
    """One call a message, each followed by what came of it."""
    found: list[Plain] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        first = at
        while at < len(messages) and messages[at]["role"] == "tool":
            at += 1
        results = list(messages[first:at])
        for number, call in enumerate(calls):
            alone = {"role": "assistant", "content": None if message["content"] is None else ""}
            found.append((message if number == 0 else alone) | {"tool_calls": [call]})
            found += [each for each in results if each.get("tool_call_id") == call["id"]]
            results = [each for each in results if each.get("tool_call_id") != call["id"]]
        found += results
    return found
