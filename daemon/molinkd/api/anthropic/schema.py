"""Bodies of ``POST /v1/messages``, and their conversion to chat bodies."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from molink.errors import RequestError
from molink.wire.messages.serving import Priority
from molinkd.api.openai.schema import (
    MAX_STOPS,
    MAX_TOOLS,
    CacheSalt,
    CallId,
    ChatBody,
    ChatMessage,
    ContentPart,
    FunctionCall,
    MaxTokens,
    MinP,
    Seconds,
    StopString,
    ToolCall,
    ToolName,
)
from molinkd.api.protocol_conversion import (
    convert_image,
    copy_scheduling,
    join_texts,
    json_response_format,
    make_message,
    make_tool,
    make_tool_choice,
    part_text,
    require_value,
)

#: Names of chat fields in this protocol.
FIELD_NAMES = {
    "stop": "stop_sequences",
    "tools[].function": "tools[]",
    "tools[].function.parameters": "tools[].input_schema",
    "tool_choice.function.name": "tool_choice.name",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
}


class MessagePart(ContentPart, kw_only=True):
    """A content block: text, thinking, ``tool_use`` or ``tool_result``."""

    thinking: str | None = None
    id: CallId | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: CallId | None = None
    content: str | list[ContentPart] | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """A message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[MessagePart]


class Thinking(msgspec.Struct, kw_only=True):
    """``thinking``; its budget has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]


class MessagesTool(msgspec.Struct, kw_only=True):
    """A client tool; server tools have other types."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """``output_config.format``."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """``output_config``."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/messages/count_tokens``."""

    model: str | None = None
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    system: str | list[ContentPart] | None = None
    thinking: Thinking | None = None
    tools: Annotated[list[MessagesTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    def as_openai(self) -> ChatBody:
        """Convert to the body of ``/v1/chat/completions``.

        Raises:
            RequestError: an unsupported or invalid field.
        """
        body = ChatBody(model=self.model, messages=self._chat_messages())
        self._set_tools(body)
        output = self.output_config or OutputConfig()
        form = output.format or self.output_format
        if form is not None:
            body.response_format = json_response_format(form.schema)
        body.reasoning_effort = output.effort
        if self.thinking is not None:
            body.chat_template_kwargs = {"enable_thinking": self.thinking.type != "disabled"}
        return body

    def _set_tools(self, body: ChatBody) -> None:
        for index, tool in enumerate(self.tools or ()):
            if tool.type not in (None, "custom"):
                field = f"tools[{index}].type"
                text = f"`{field}`: {tool.type[:64]!r} is not supported, only 'custom'"
                raise RequestError(text, field)
        if self.tools:
            body.tools = [
                make_tool(one.name, one.description, one.input_schema) for one in self.tools
            ]
        choice = self.tool_choice
        if choice is None:
            return
        if choice.disable_parallel_tool_use:
            body.parallel_tool_calls = False
        if choice.type == "tool":
            body.tool_choice = make_tool_choice(require_value(choice.name, "tool_choice.name"))
        else:
            body.tool_choice = "required" if choice.type == "any" else choice.type

    def _chat_messages(self) -> list[ChatMessage]:
        messages: list[ChatMessage] = []
        if self.system:
            system = self.system
            text = system if isinstance(system, str) else join_texts(system, ("text",), "system")
            messages.append(make_message("system", text, "system"))
        for index, one in enumerate(self.messages):
            where = f"messages[{index}]"
            if isinstance(one.content, str):
                messages.append(make_message(one.role, one.content, where))
            elif one.role == "user":
                messages += _user_messages(one.content, f"{where}.content")
            else:
                messages.append(_assistant_message(one.content, f"{where}.content"))
        if self.messages[-1].role == "assistant":
            text = (
                "`messages`: the last message must be the user's; prefilled answers are not "
                "supported"
            )
            raise RequestError(text, "messages")
        return messages


class MessageRequest(CountTokensRequest, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: MaxTokens
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    min_p: MinP | None = None
    stop_sequences: Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    priority: Priority | None = None
    max_queue_time: Seconds | None = None
    timeout: Seconds | None = None
    cache_salt: CacheSalt | None = None

    def as_openai(self) -> ChatBody:
        """See :class:`CountTokensRequest`."""
        body = super().as_openai()
        body.max_tokens, body.temperature = self.max_tokens, self.temperature
        body.top_k, body.top_p, body.min_p = self.top_k, self.top_p, self.min_p
        body.stop = self.stop_sequences
        copy_scheduling(body, self)
        return body


def _user_messages(parts: Sequence[MessagePart], where: str) -> Iterator[ChatMessage]:
    """Convert a user message: tool results, texts and images, in order."""
    said: list[ContentPart] = []
    for place, part in enumerate(parts):
        field = f"{where}[{place}]"
        if part.type == "image":
            said.append(convert_image(part, field))
            continue
        if part.type != "tool_result":
            said.append(ContentPart("text", part_text(part, ("text", "tool_result"), field)))
            continue
        if said:
            yield _user_message(said)
            said = []
        result = part.content or ""
        if not isinstance(result, str):
            result = join_texts(result, ("text",), f"{field}.content")
        ident = require_value(part.tool_use_id, f"{field}.tool_use_id")
        yield ChatMessage(role="tool", content=result, tool_call_id=ident)
    if said or not parts:
        yield _user_message(said)


def _user_message(parts: list[ContentPart]) -> ChatMessage:
    if any(part.type == "image_url" for part in parts):
        return ChatMessage(role="user", content=parts)
    return ChatMessage(role="user", content="\n".join(part.text or "" for part in parts))


def _assistant_message(parts: Sequence[MessagePart], where: str) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for place, part in enumerate(parts):
        field = f"{where}[{place}]"
        if part.type == "tool_use":
            ident, name = (
                require_value(part.id, f"{field}.id"),
                require_value(part.name, f"{field}.name"),
            )
            calls.append(ToolCall(id=ident, function=FunctionCall(name, part.input or {})))
        elif part.type == "thinking":
            thoughts.append(part.thinking or "")
        elif part.type != "redacted_thinking":
            texts.append(part_text(part, ("text", "tool_use"), field))
    return ChatMessage(
        role="assistant",
        content="\n".join(texts),
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )
