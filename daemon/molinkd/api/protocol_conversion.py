"""What the adapters of other protocols have in common: from their fields to the OpenAI bodies."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast, get_args

from molink.errors import RequestError
from molinkd.api.openai_schema import (
    ChatMessage,
    ContentPart,
    FunctionDefinition,
    GenerationBody,
    JsonSchema,
    NamedChoice,
    NamedFunction,
    ResponseFormat,
    Tool,
)

Role = Literal["system", "developer", "user", "assistant"]

_INDEX = re.compile(r"\[\d+\]")
_FIELD_END = re.compile(r"[.\[]|$")
_QUOTED = re.compile(r"`([^`\s]+)`")


def refuse_fields(fields: Mapping[str, Any]) -> None:
    """Refuse what changes an answer in a way that nothing here can.

    ``fields`` are by the protocol's names; empty values ask for nothing.

    Raises:
        RequestError: one of them asks for something.
    """
    for name, value in fields.items():
        if value:
            raise RequestError(f"`{name}` is not supported by this route", name)


class _SchedulingFields(Protocol):
    """What says when it is a request's turn, in every protocol's body."""

    priority: int | None
    max_queue_time: float | None
    timeout: float | None


def copy_scheduling(body: GenerationBody, asked: _SchedulingFields) -> None:
    """Have in ``body`` when it is its turn, and how long all of it may take."""
    body.priority, body.max_queue_time = asked.priority, asked.max_queue_time
    body.timeout = asked.timeout


def make_message(role: str, content: str | None, where: str) -> ChatMessage:
    """A message of a conversation.

    Raises:
        RequestError: a role or a content that can't be.
    """
    if role not in get_args(Role):
        raise RequestError(f"`{where}.role`: {role[:32]!r} is not supported", f"{where}.role")
    return ChatMessage(role=cast(Role, role), content=require_value(content, f"{where}.content"))


def join_texts(parts: Sequence[ContentPart], kinds: Sequence[str], where: str) -> str:
    """The text of a message's parts, which are of ``kinds``; joined by line ends.

    Raises:
        RequestError: a part of another kind, or without a text.
    """
    return "\n".join(
        part_text(part, kinds, f"{where}[{place}]") for place, part in enumerate(parts)
    )


def part_text(part: ContentPart, kinds: Sequence[str], where: str) -> str:
    """The text of one part of a message; see :func:`join_texts`."""
    if part.type not in kinds:
        text = f"`{where}.type`: {part.type[:32]!r} is not supported, only {kinds[0]!r}"
        raise RequestError(text, f"{where}.type")
    return require_value(part.text, f"{where}.text")


def require_value(value: str | None, where: str) -> str:
    """``value``, which has to be there.

    Raises:
        RequestError: it isn't.
    """
    if value is None:
        raise RequestError(f"`{where}`: required, but missing", where)
    return value


def make_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    """A tool."""
    return Tool("function", FunctionDefinition(name, description, parameters))


def make_tool_choice(name: str) -> NamedChoice:
    """That this function has to be called."""
    return NamedChoice("function", NamedFunction(name))


def json_response_format(schema: dict[str, Any] | None) -> ResponseFormat:
    """That an answer is JSON by ``schema``, or any object if there is none."""
    if schema is None:
        return ResponseFormat("json_object")
    return ResponseFormat("json_schema", JsonSchema(schema))


def rename_error_fields(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """``error`` about fields of a body as their protocol calls them.

    ``names`` has them by those of the body, with ``[]`` for any index: ``tools[].function``.
    """
    if not names:
        return error
    text = _QUOTED.sub(lambda field: f"`{_rename_field(field[1], names)}`", str(error))
    return type(error)(text, None if error.param is None else _rename_field(error.param, names))


def _rename_field(field: str, names: Mapping[str, str]) -> str:
    for end in sorted({bound.start() for bound in _FIELD_END.finditer(field)}, reverse=True):
        name = names.get(_INDEX.sub("[]", field[:end]))
        if name is not None:
            for index in _INDEX.findall(field[:end]):
                name = name.replace("[]", index, 1)
            return name + field[end:]
    return field
