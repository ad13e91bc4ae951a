"""The body of ``POST /v1/responses``, and what it means in that of a chat.

Nothing is kept: an answer can't be asked for again, or gone on from by its id.
"""

from typing import Annotated, Any

import msgspec

from molink.errors import RequestError
from molinkd.api.adapting import joined, message, refuse_tools
from molinkd.api.schema import ChatBody, ChatMessage, ContentPart, MaxTokens, TopLogprobs

#: Kinds of a message's parts: what goes in, and what came out before.
_TEXTS = ("input_text", "output_text", "text")


class InputItem(msgspec.Struct, kw_only=True):
    """An item of ``input``; only messages can be used, and what was thought before is left out."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    """``reasoning``."""

    effort: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """``text.format``."""

    type: str = "text"


class TextOptions(msgspec.Struct, kw_only=True):
    """``text``."""

    format: TextFormat | None = None


class ResponseRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/responses``. Fields that only say how OpenAI keeps or bills it are ignored."""

    model: str | None = None
    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[str], msgspec.Meta(max_length=32)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: list[Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None

    def as_openai(self) -> ChatBody:
        """The body of the same request at ``/v1/chat/completions``.

        Raises:
            RequestError: it asks for what is not there.
        """
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name):
                text = f"`{name}`: answers are not kept here; send the conversation in `input`"
                raise RequestError(text, name)
        format_of = self.text.format if self.text is not None else None
        other = format_of is not None and format_of.type != "text"
        refuse_tools(
            {
                "tools": self.tools,
                "text.format": other,
                "prompt": self.prompt,
                "background": self.background,
            }
        )
        logprobs = "message.output_text.logprobs" in (self.include or ())
        return ChatBody(
            model=self.model,
            messages=self._messages(),
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=logprobs or None,
            top_logprobs=self.top_logprobs if logprobs else None,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
        )

    def _messages(self) -> list[ChatMessage]:
        messages = []
        if self.instructions is not None:
            messages.append(message("system", self.instructions, "instructions"))
        if isinstance(self.input, str):
            messages.append(message("user", self.input, "input"))
            return messages
        for index, item in enumerate(self.input):
            where = f"input[{index}]"
            if item.type == "reasoning":
                continue
            if item.type != "message":
                text = f"`{where}.type`: {item.type[:32]!r} is not supported, only 'message'"
                raise RequestError(text, f"{where}.type")
            content = item.content
            if isinstance(content, list):
                content = joined(content, _TEXTS, f"{where}.content")
            messages.append(message(item.role or "", content, where))
        return messages


#: What fields of a chat are called here.
NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}
