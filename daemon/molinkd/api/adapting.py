"""What the adapters of other protocols have in common: from their fields to the OpenAI bodies."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

from molink.errors import RequestError
from molinkd.api.schema import ChatMessage, ContentPart

Role = Literal["system", "developer", "user", "assistant"]


def refuse_tools(fields: Mapping[str, Any]) -> None:
    """The one place where adapters refuse tools and formats of answers: none passes them on yet.

    ``fields`` are by the protocol's names; empty values ask for nothing.

    Raises:
        RequestError: one of them asks for something.
    """
    for name, value in fields.items():
        if value:
            raise RequestError(f"`{name}` is not supported by this route", name)


def message(role: str, content: str | None, where: str) -> ChatMessage:
    """A message of a conversation.

    Raises:
        RequestError: a role or a content that can't be.
    """
    if role not in get_args(Role):
        raise RequestError(f"`{where}.role`: {role[:32]!r} is not supported", f"{where}.role")
    if content is None:
        raise RequestError(f"`{where}.content`: required, but missing", f"{where}.content")
    return ChatMessage(role=cast(Role, role), content=content)


def joined(parts: Sequence[ContentPart], kinds: Sequence[str], where: str) -> str:
    """The text of a message's parts, which are of ``kinds``; joined by line ends.

    Raises:
        RequestError: a part of another kind, or without a text.
    """
    texts = []
    for place, part in enumerate(parts):
        field = f"{where}[{place}]"
        if part.type not in kinds:
            text = f"`{field}.type`: {part.type[:32]!r} is not supported, only {kinds[0]!r}"
            raise RequestError(text, f"{field}.type")
        if part.text is None:
            raise RequestError(f"`{field}.text`: required, but missing", f"{field}.text")
        texts.append(part.text)
    return "\n".join(texts)
