"""The body of ``POST /v1/responses``, and its conversion to a chat body.

Responses are not stored, so they can't be retrieved or continued by id.
"""

from typing import Annotated, Any, Literal

import msgspec

from molink.errors import RequestError
from molink.wire.messages.serving import Priority
from molinkd.api.openai.schema import (
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
    ToolCall,
    ToolName,
    TopK,
    TopLogprobs,
)
from molinkd.api.protocol_conversion import (
    convert_parts,
    copy_scheduling,
    join_texts,
    json_response_format,
    make_message,
    make_tool,
    make_tool_choice,
    refuse_fields,
    require_value,
)

#: Kinds of content parts: text, and reasoning.
_TEXT_KINDS = ("input_text", "output_text", "text")
_REASONING_KINDS = ("reasoning_text", "text", "summary_text")

#: Names of chat fields in this protocol.
FIELD_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "tools[].function": "tools[]",
    "tool_choice.function.name": "tool_choice.name",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}


class InputItem(msgspec.Struct, kw_only=True):
    """An item of ``input``: message, reasoning, call or call output."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    call_id: CallId | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    """``reasoning``; summaries are not supported."""

    effort: str | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """``text``."""

    format: TextFormat | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A client tool; OpenAI's built-in tools are not supported."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, kw_only=True):
    """``tool_choice``: this function must be called."""

    type: Literal["function"]
    name: str


class ResponseRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/responses``. Fields about storage and billing are ignored."""

    model: str | None = None
    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[str], msgspec.Meta(max_length=32)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    priority: Priority | None = None
    max_queue_time: Seconds | None = None
    timeout: Seconds | None = None
    cache_salt: CacheSalt | None = None

    @property
    def text_format(self) -> TextFormat:
        """``text.format``, or plain text."""
        requested = self.text.format if self.text is not None else None
        return requested or TextFormat(type="text")

    def as_openai(self) -> ChatBody:
        """Convert to the body of ``/v1/chat/completions``.

        Raises:
            RequestError: an unsupported or invalid field.
        """
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name):
                text = f"`{name}`: responses are not stored; send the conversation in `input`"
                raise RequestError(text, name)
        refuse_fields({"prompt": self.prompt, "background": self.background})
        logprobs = "message.output_text.logprobs" in (self.include or ())
        body = ChatBody(
            model=self.model,
            messages=self._chat_messages(),
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            logprobs=logprobs or None,
            top_logprobs=self.top_logprobs if logprobs else None,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            parallel_tool_calls=self.parallel_tool_calls,
        )
        if self.tools:
            body.tools = [
                make_tool(one.name, one.description, one.parameters) for one in self.tools
            ]
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            body.tool_choice = make_tool_choice(choice.name)
        else:
            body.tool_choice = choice
        self._set_response_format(body)
        copy_scheduling(body, self)
        return body

    def _set_response_format(self, body: ChatBody) -> None:
        form = self.text_format
        if form.type == "text":
            return
        if form.type == "json_schema" and form.schema is None:
            field = "text.format.schema"
            raise RequestError(f"`{field}`: required", field)
        body.response_format = json_response_format(
            form.schema if form.type == "json_schema" else None
        )

    def _chat_messages(self) -> list[ChatMessage]:
        messages = []
        if self.instructions is not None:
            messages.append(make_message("system", self.instructions, "instructions"))
        if isinstance(self.input, str):
            messages.append(make_message("user", self.input, "input"))
            return messages
        thoughts = ""
        for index, item in enumerate(self.input):
            where = f"input[{index}]"
            match item.type:
                case "reasoning":
                    thoughts = _reasoning_text(item, where)
                    continue
                case "message":
                    content = item.content
                    if isinstance(content, list):
                        content = convert_parts(
                            content, _TEXT_KINDS, "input_image", f"{where}.content"
                        )
                    messages.append(make_message(item.role or "", content, where))
                case "function_call":
                    if not messages or messages[-1].role != "assistant":
                        messages.append(ChatMessage(role="assistant"))
                    calls = messages[-1].tool_calls or []
                    messages[-1].tool_calls = [*calls, _tool_call(item, where)]
                case "function_call_output":
                    messages.append(_tool_message(item, where))
                case _:
                    raise _unsupported_item(item, f"{where}.type")
            if messages[-1].role == "assistant" and thoughts:
                before = messages[-1].reasoning_content
                messages[-1].reasoning_content = "\n".join(filter(None, (before, thoughts)))
            thoughts = ""
        return messages


def _unsupported_item(item: InputItem, where: str) -> RequestError:
    text = f"`{where}`: {item.type[:32]!r} is not supported, only 'message', 'function_call', …"
    if item.type == "item_reference":
        text = (
            f"`{where}`: responses are not stored; set `store` to false so that your client "
            "sends items"
        )
    return RequestError(text, where)


def _reasoning_text(item: InputItem, where: str) -> str:
    """Return the reasoning, or its summary."""
    if item.content:
        return _content_text(item.content, f"{where}.content", _REASONING_KINDS) or ""
    return _content_text(item.summary, f"{where}.summary", _REASONING_KINDS) or ""


def _tool_call(item: InputItem, where: str) -> ToolCall:
    name = require_value(item.name, f"{where}.name")
    function = FunctionCall(name, item.arguments or "")
    return ToolCall(id=require_value(item.call_id, f"{where}.call_id"), function=function)


def _tool_message(item: InputItem, where: str) -> ChatMessage:
    content = require_value(_content_text(item.output, f"{where}.output"), f"{where}.output")
    ident = require_value(item.call_id, f"{where}.call_id")
    return ChatMessage(role="tool", content=content, tool_call_id=ident)


def _content_text(
    content: str | list[ContentPart] | None, where: str, kinds: tuple[str, ...] = _TEXT_KINDS
) -> str | None:
    return join_texts(content, kinds, where) if isinstance(content, list) else content
