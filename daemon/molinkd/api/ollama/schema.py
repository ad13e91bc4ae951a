"""Bodies of Ollama's routes, and their conversion to OpenAI bodies.

Options for loading and computing (``num_gpu``, ``num_thread``, …) and ``keep_alive`` are accepted
without effect: the swarm places models, and they stay loaded. ``num_ctx`` has no effect either:
every request may use the whole context.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from molink.errors import RequestError
from molink.wire.messages.data_plane import RepetitionPenalty
from molink.wire.messages.serving import Priority
from molinkd.api.openai.schema import (
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOOLS,
    CacheSalt,
    CallId,
    ChatBody,
    ChatMessage,
    CompletionBody,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    GenerationBody,
    MinP,
    Penalty,
    Seconds,
    StopString,
    ToolCall,
    TopK,
    TopLogprobs,
)
from molinkd.api.protocol_conversion import (
    copy_scheduling,
    json_response_format,
    make_image,
    make_message,
    make_tool,
    refuse_fields,
)


class OllamaToolCall(msgspec.Struct, kw_only=True):
    """A tool call in a message."""

    function: FunctionCall
    id: CallId | None = None


class ToolCallIds:
    """Assigns ids to calls and matches results to them."""

    def __init__(self) -> None:
        self._count = 0
        #: Ids of calls without a result, in order; ids by tool.
        self._pending: dict[str, None] = {}
        self._ids_by_tool: defaultdict[str, deque[str]] = defaultdict(deque)

    def assign_ids(self, calls: Sequence[OllamaToolCall]) -> list[ToolCall] | None:
        """Return the calls of an answer with ids."""
        found = []
        for call in calls:
            ident = call.id or self._next_id()
            self._pending[ident] = None
            self._ids_by_tool[call.function.name].append(ident)
            found.append(ToolCall(id=ident, function=call.function))
        return found or None

    def match_result(self, content: str, ident: str | None, name: str | None) -> ChatMessage:
        """Match a result to a pending call: by ``ident``, else by tool name, else the first."""
        if ident is None:
            ident = (
                self._first_pending(name or "")
                or next(iter(self._pending), None)
                or self._next_id()
            )
        self._pending.pop(ident, None)
        return ChatMessage(role="tool", content=content, tool_call_id=ident, name=name)

    def _first_pending(self, name: str) -> str | None:
        queue = self._ids_by_tool.get(name, deque())
        while queue and queue[0] not in self._pending:
            queue.popleft()
        return queue[0] if queue else None

    def _next_id(self) -> str:
        self._count += 1
        return f"call_{self._count}"


#: Names of OpenAI fields in this protocol.
FIELD_NAMES = {"response_format.json_schema.schema": "format", "response_format": "format"}

Kind = TypeVar("Kind", bound=GenerationBody)
Context = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Think = bool | Literal["low", "medium", "high"]


class OllamaOptions(msgspec.Struct, kw_only=True):
    """``options``; others are ignored."""

    num_predict: Annotated[int, msgspec.Meta(ge=-2, le=2**53)] | None = None
    num_ctx: Context | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_k: TopK | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    min_p: MinP | None = None
    seed: int | None = None
    priority: Priority | None = None
    max_queue_time: Seconds | None = None
    timeout: Seconds | None = None
    cache_salt: CacheSalt | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: (
        Annotated[str, msgspec.Meta(max_length=MAX_STOP_LENGTH)]
        | Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOPS)]
        | None
    ) = None


class ModelReference(msgspec.Struct, kw_only=True):
    """A reference to a model; older clients send ``name``."""

    model: str | None = None
    name: str | None = None

    @property
    def served_name(self) -> str | None:
        """The model's served name, without the tag ``latest``."""
        name = self.model or self.name
        return None if name is None else name.removesuffix(":latest")


class PullRequest(ModelReference, kw_only=True):
    """``POST /api/pull``."""

    stream: bool | None = None
    insecure: bool | None = None


class OllamaRequest(ModelReference, kw_only=True):
    """Fields of both generating routes."""

    stream: bool | None = None
    options: OllamaOptions | None = None
    keep_alive: str | int | float | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    #: A JSON schema, or any JSON object.
    format: dict[str, Any] | Literal["", "json"] | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """A message of ``/api/chat``; role ``tool`` is the result of a call."""

    role: str
    content: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: CallId | None = None
    thinking: str | None = None


class OllamaTool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    function: FunctionDefinition
    type: Literal["function"] | None = None


class ChatRequest(OllamaRequest, kw_only=True):
    """``POST /api/chat``."""

    messages: list[OllamaMessage] = []
    tools: Annotated[list[OllamaTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None

    def as_openai(self) -> ChatBody:
        """Convert to the body of ``/v1/chat/completions``.

        Raises:
            RequestError: an unsupported or invalid field.
        """
        calls = ToolCallIds()
        messages = []
        for index, one in enumerate(self.messages):
            where = f"messages[{index}]"
            if one.role == "tool":
                messages.append(
                    calls.match_result(one.content or "", one.tool_call_id, one.tool_name)
                )
                continue
            content = "" if one.tool_calls and one.content is None else one.content
            message = make_message(one.role, content, where)
            _add_images(message, one.images, f"{where}.images")
            message.reasoning_content = one.thinking
            message.tool_calls = calls.assign_ids(one.tool_calls or ())
            messages.append(message)
        body = ChatBody(model=self.served_name, messages=messages)
        functions = [tool.function for tool in self.tools or ()]
        body.tools = [make_tool(one.name, one.description, one.parameters) for one in functions]
        return _apply_options(body, self)


class GenerateRequest(OllamaRequest, kw_only=True):
    """``POST /api/generate``."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[Any] | None = None
    raw: bool | None = None
    images: list[str] | None = None

    def as_openai(self) -> GenerationBody:
        """Convert to a chat body, or to a completion body for raw prompts.

        Raises:
            RequestError: an unsupported or invalid field.
        """
        refuse_fields({"template": self.template})
        if self.context:
            text = "`context` is not supported: send the conversation to /api/chat"
            raise RequestError(text, "context")
        prompt = self.prompt or ""
        if self.raw or self.suffix:
            refuse_fields({"images": self.images})
            body = CompletionBody(model=self.served_name, prompt=prompt, suffix=self.suffix)
            return _apply_options(body, self)
        messages = [] if self.system is None else [make_message("system", self.system, "system")]
        messages.append(make_message("user", prompt, "prompt"))
        _add_images(messages[-1], self.images, "images")
        return _apply_options(ChatBody(model=self.served_name, messages=messages), self)


def _add_images(message: ChatMessage, images: Sequence[str] | None, where: str) -> None:
    """Put images in base64 before the text of ``message``."""
    if images:
        shown = [
            make_image(f"data:;base64,{image}", f"{where}[{place}]", where)
            for place, image in enumerate(images)
        ]
        assert isinstance(message.content, str)
        message.content = [*shown, ContentPart("text", message.content)]


def _apply_options(body: Kind, request: OllamaRequest) -> Kind:
    """Copy options, format and thinking of ``request`` to ``body``."""
    options = request.options or OllamaOptions()
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop"):
        setattr(body, name, getattr(options, name))
    copy_scheduling(body, options)
    body.presence_penalty = options.presence_penalty
    body.frequency_penalty = options.frequency_penalty
    body.repetition_penalty = options.repeat_penalty
    if request.format:
        schema = request.format if isinstance(request.format, dict) else None
        body.response_format = json_response_format(schema)
    limit = options.num_predict
    body.max_tokens = limit if limit is not None and limit > 0 else -1
    if isinstance(body, ChatBody):
        body.logprobs, body.top_logprobs = request.logprobs, request.top_logprobs
        if isinstance(request.think, bool):
            body.chat_template_kwargs = {"enable_thinking": request.think}
        else:
            body.reasoning_effort = request.think
    elif isinstance(body, CompletionBody) and request.logprobs:
        body.logprobs = request.top_logprobs or 0
    return body
