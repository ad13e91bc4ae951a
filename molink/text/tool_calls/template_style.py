"""Adapts tool calls of earlier answers to the model's chat template.

Clients send arguments as strings, several calls per message, and arbitrary ids. Templates differ in
what they accept, so each is probed once with a small conversation.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from molink.errors import RequestError

#: A message or tool in the form that templates read.
TemplateValue = dict[str, Any]
RenderMessages = Callable[[Sequence[TemplateValue], Sequence[TemplateValue]], str]

_VALID_ID = re.compile(r"[a-zA-Z0-9]{9}")
_ID_LENGTH = 9
_PROBE_TOOL: TemplateValue = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Try it.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True, slots=True)
class ToolCallStyle:
    """How a template expects tool calls.

    Arguments are objects or strings; content is omitted or empty with calls; there may be one call
    per message; ids may need nine alphanumeric characters; reasoning may be accepted.
    """

    arguments_as_objects: bool = True
    omits_content: bool = False
    one_call_per_message: bool = False
    needs_short_ids: bool = False
    takes_reasoning: bool = False


def detect_call_style(source: str, render: RenderMessages) -> ToolCallStyle:
    """Probe the template ``source``, rendered by ``render``."""
    objects, no_content = next(_find_argument_forms(render), (True, False))
    return ToolCallStyle(
        arguments_as_objects=objects,
        omits_content=no_content,
        one_call_per_message="tool_calls[0]" in source,
        needs_short_ids="length != 9" in source,
        takes_reasoning="message.thinking" in source,
    )


def apply_call_style(
    messages: Sequence[TemplateValue], style: ToolCallStyle
) -> list[TemplateValue]:
    """Convert ``messages`` with calls and results to a style."""
    fitted = [_fit_message(message, style) for message in messages]
    return _split_calls(fitted) if style.one_call_per_message else fitted


def _find_argument_forms(render: RenderMessages) -> Iterator[tuple[bool, bool]]:
    """Find the forms of arguments that a template renders correctly, as JSON or otherwise."""
    for objects in (True, False):
        for no_content in (False, True):
            arguments: Any = {"needle": "hay"} if objects else '{"needle": "hay"}'
            function = {"name": "probe", "arguments": arguments}
            call = {"id": "abcdefghi", "type": "function", "function": function}
            answer = {"role": "assistant", "content": None if no_content else ""}
            messages: list[TemplateValue] = [
                {"role": "user", "content": "Go."},
                answer | {"tool_calls": [call]},
                {"role": "tool", "tool_call_id": "abcdefghi", "content": "Gone."},
            ]
            try:
                text = render(messages, [_PROBE_TOOL])
            except RequestError:
                continue
            if "needle" in text and "'needle" not in text and '\\"needle' not in text:
                yield objects, no_content


def _fit_message(message: TemplateValue, style: ToolCallStyle) -> TemplateValue:
    message = dict(message)
    if style.needs_short_ids and "tool_call_id" in message:
        message["tool_call_id"] = _shorten_id(message["tool_call_id"])
    if "tool_calls" not in message:
        return message
    message["tool_calls"] = [_fit_call(call, style) for call in message["tool_calls"]]
    if style.omits_content and not message["content"]:
        message["content"] = None
    if style.takes_reasoning and not message["content"] and "reasoning_content" in message:
        message["thinking"] = message["reasoning_content"]
    return message


def _fit_call(call: TemplateValue, style: ToolCallStyle) -> TemplateValue:
    function = dict(call["function"])
    arguments = function["arguments"] or "{}"
    if style.arguments_as_objects and isinstance(arguments, str):
        arguments = _parse_object(arguments)
    elif not style.arguments_as_objects and not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode("utf-8")
    function["arguments"] = arguments
    ident = _shorten_id(call["id"]) if style.needs_short_ids else call["id"]
    return {**call, "id": ident, "function": function}


def _parse_object(arguments: str) -> Any:
    """Parse arguments to an object; anything else stays a string."""
    try:
        value = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _shorten_id(ident: str) -> str:
    if _VALID_ID.fullmatch(ident):
        return ident
    return hashlib.sha256(ident.encode("utf-8", "replace")).hexdigest()[:_ID_LENGTH]


def _split_calls(messages: Sequence[TemplateValue]) -> list[TemplateValue]:
    """Split into one call per message, each followed by its result."""
    found: list[TemplateValue] = []
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
