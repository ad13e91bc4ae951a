"""The bodies of ``POST /v1/messages``, and what they mean in that of a chat."""

from typing import Annotated, Any, Literal

import msgspec

from molink.errors import RequestError
from molinkd.api.adapting import joined, message, refuse_tools
from molinkd.api.schema import MAX_STOPS, ChatBody, ChatMessage, ContentPart, MaxTokens, StopString

#: What was thought before is left out of a conversation.
_THOUGHTS = ("thinking", "redacted_thinking")


class InputMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[ContentPart]


class Thinking(msgspec.Struct, kw_only=True):
    """``thinking``."""

    type: Literal["enabled", "disabled", "adaptive"]


class CountRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/messages/count_tokens``."""

    model: str | None = None
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    system: str | list[ContentPart] | None = None
    thinking: Thinking | None = None
    tools: list[Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None

    def as_openai(self) -> ChatBody:
        """The body of the same request at ``/v1/chat/completions``.

        Raises:
            RequestError: it asks for what is not there.
        """
        refuse_tools(
            {
                "tools": self.tools,
                "output_format": self.output_format,
                "output_config.format": (self.output_config or {}).get("format"),
            }
        )
        body = ChatBody(model=self.model, messages=self._messages())
        if self.thinking is not None:
            body.chat_template_kwargs = {"enable_thinking": self.thinking.type != "disabled"}
        return body

    def _messages(self) -> list[ChatMessage]:
        messages = []
        if self.system:
            system = self.system
            text = system if isinstance(system, str) else joined(system, ("text",), "system")
            messages.append(message("system", text, "system"))
        for index, one in enumerate(self.messages):
            where = f"messages[{index}]"
            content = one.content
            if isinstance(content, list):
                said = [part for part in content if part.type not in _THOUGHTS]
                content = joined(said, ("text",), f"{where}.content")
            messages.append(message(one.role, content, where))
        if self.messages[-1].role == "assistant":
            text = "`messages`: the last one is the user's; answers are not begun by the client"
            raise RequestError(text, "messages")
        return messages


class MessageRequest(CountRequest, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: MaxTokens
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOPS)] | None = None

    def as_openai(self) -> ChatBody:
        """See :class:`CountRequest`."""
        body = super().as_openai()
        body.max_tokens, body.temperature = self.max_tokens, self.temperature
        body.top_k, body.top_p, body.stop = self.top_k, self.top_p, self.stop_sequences
        return body
