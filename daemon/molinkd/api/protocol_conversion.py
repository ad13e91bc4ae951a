"""Helpers that convert fields of other protocols to the OpenAI bodies."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast, get_args

from molink.errors import RequestError
from molinkd.api.openai.schema import (
    ChatMessage,
    ContentPart,
    FunctionDefinition,
    GenerationBody,
    ImageUrl,
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
    """Reject fields that molink does not support and that are not empty.

    ``fields`` are keyed by the protocol's own names.

    Raises:
        RequestError: a field has a value.
    """
    for name, value in fields.items():
        if value:
            raise RequestError(f"`{name}` is not supported by this route", name)


class _SchedulingFields(Protocol):
    """Fields for the scheduler that every protocol's body has."""

    priority: int | None
    max_queue_time: float | None
    timeout: float | None
    cache_salt: str | None


def copy_scheduling(body: GenerationBody, source: _SchedulingFields) -> None:
    """Copy priority, time limits and cache salt from ``source`` to ``body``."""
    body.priority, body.max_queue_time = source.priority, source.max_queue_time
    body.timeout, body.cache_salt = source.timeout, source.cache_salt


def make_message(role: str, content: str | list[ContentPart] | None, where: str) -> ChatMessage:
    """Build a chat message.

    Raises:
        RequestError: the role is not supported, or the content is missing.
    """
    if role not in get_args(Role):
        raise RequestError(f"`{where}.role`: {role[:32]!r} is not supported", f"{where}.role")
    if not isinstance(content, list):
        content = require_value(content, f"{where}.content")
    return ChatMessage(role=cast(Role, role), content=content)


def join_texts(parts: Sequence[ContentPart], kinds: Sequence[str], where: str) -> str:
    """Join the texts of message parts of the given ``kinds`` with newlines.

    Raises:
        RequestError: a part is of another kind or has no text.
    """
    return "\n".join(
        part_text(part, kinds, f"{where}[{place}]") for place, part in enumerate(parts)
    )


def convert_parts(
    parts: Sequence[ContentPart], kinds: Sequence[str], image_kind: str, where: str
) -> str | list[ContentPart]:
    """Convert the parts of a message: one text, or texts and images in order.

    Raises:
        RequestError: a part is neither of ``kinds`` nor of ``image_kind``, or lacks its content.
    """
    if not any(part.type == image_kind for part in parts):
        return join_texts(parts, kinds, where)
    return [
        convert_image(part, f"{where}[{place}]")
        if part.type == image_kind
        else ContentPart("text", part_text(part, kinds, f"{where}[{place}]"))
        for place, part in enumerate(parts)
    ]


def convert_image(part: ContentPart, where: str) -> ContentPart:
    """Convert an image with ``source``, or with ``image_url`` and ``detail``, to a chat's."""
    source, shown, field = part.source, part.image_url, f"{where}.image_url"
    if source is not None:
        field = f"{where}.source"
        data = f"data:{source.media_type};base64,{source.data}"
        shown = ImageUrl(source.url or "" if source.data is None else data)
    elif not isinstance(shown, ImageUrl):
        shown = ImageUrl(shown or "", part.detail)
    return make_image(shown.url, field, f"{where}.type", shown.detail)


def make_image(url: str, field: str, type_field: str, detail: str | None = None) -> ContentPart:
    """Build an image of a chat; errors name its fields."""
    return ContentPart("image_url", image_url=ImageUrl(url, detail, field, type_field))


def part_text(part: ContentPart, kinds: Sequence[str], where: str) -> str:
    """Return the text of one message part; see :func:`join_texts`."""
    if part.type not in kinds:
        text = f"`{where}.type`: {part.type[:32]!r} is not supported, only {kinds[0]!r}"
        raise RequestError(text, f"{where}.type")
    return require_value(part.text, f"{where}.text")


def require_value(value: str | None, where: str) -> str:
    """Return ``value``, which must not be missing.

    Raises:
        RequestError: it is ``None``.
    """
    if value is None:
        raise RequestError(f"`{where}`: required", where)
    return value


def make_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    """Build a function tool."""
    return Tool("function", FunctionDefinition(name, description, parameters))


def make_tool_choice(name: str) -> NamedChoice:
    """Build a ``tool_choice`` that requires this function."""
    return NamedChoice("function", NamedFunction(name))


def json_response_format(schema: dict[str, Any] | None) -> ResponseFormat:
    """Build a ``response_format`` for JSON with ``schema``, or for any JSON object."""
    if schema is None:
        return ResponseFormat("json_object")
    return ResponseFormat("json_schema", JsonSchema(schema))


def rename_error_fields(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Translate the field names in ``error`` to those of the client's protocol.

    ``names`` maps fields of the OpenAI body, with ``[]`` for any index, such as
    ``tools[].function``.
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
