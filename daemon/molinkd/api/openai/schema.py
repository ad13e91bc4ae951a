"""Request bodies of the OpenAI routes, with vLLM's extensions.

Unknown fields are ignored and reported (``ignored_fields.py``). Fields that would change the answer
but are not supported are declared in :class:`UnsupportedFields`, so that they are rejected by name.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from molink.errors import RequestError
from molink.wire.messages.data_plane import (
    MAX_LOGIT_BIAS,
    MAX_TOP_LOGPROBS,
    Bias,
    RepetitionPenalty,
)
from molink.wire.messages.serving import MAX_STOP_IDS, Priority

MAX_STOPS = 16
MAX_TOOLS = 128
MAX_CALL_ID_LENGTH = 256
MAX_STOP_LENGTH = 256
MAX_CACHE_SALT_LENGTH = 256

StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
#: 0 and -1: off.
TopK = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]
MinP = Annotated[float, msgspec.Meta(ge=0, le=1)]
#: -1 or a value above the limit: as many as fit.
MaxTokens = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
Count = Annotated[int, msgspec.Meta(ge=1, le=128)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
CacheSalt = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CACHE_SALT_LENGTH)]
#: From a millisecond to a day; shorter limits pass before a request can start.
Seconds = Annotated[float, msgspec.Meta(ge=1e-3, le=86400)]
ToolName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
CallId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CALL_ID_LENGTH)]


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: bool | None = None


class JsonSchema(msgspec.Struct):
    """``response_format.json_schema``; enforced whether ``strict`` or not."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct):
    """``structured_outputs``, vLLM's successor of the ``guided_…`` fields.

    ``disable_any_whitespace`` applies to ``response_format`` too.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class UnsupportedFields(msgspec.Struct, kw_only=True):
    """Fields that are rejected unless they have a neutral value."""

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    grammar: Any = None
    json_schema: Any = None
    min_tokens: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    prompt_embeds: Any = None
    chat_template: Any = None
    documents: Any = None


#: Neutral values besides null, false, 0, "", [] and {}.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "truncate_prompt_tokens": (-1,),
}


class GenerationBody(UnsupportedFields, kw_only=True):
    """Fields of both routes. ``None`` means the model's default."""

    #: Optional if only one model is served, as with llama.cpp and vLLM.
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[str, Bias], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    stop: (
        Annotated[str, msgspec.Meta(max_length=MAX_STOP_LENGTH)]
        | Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOPS)]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    #: Order among requests of one API key; lower values run first, as in vLLM.
    priority: Priority | None = None
    #: Maximum time in the queue, in seconds.
    max_queue_time: Seconds | None = None
    #: Maximum time of the whole answer in seconds, as in LiteLLM; it is then cut off.
    timeout: Seconds | None = None
    #: Only requests of the same API key with the same salt share cached prompts, as in vLLM.
    cache_salt: CacheSalt | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ImageUrl(msgspec.Struct):
    """An image of a message; ``detail`` low makes it smaller.

    Errors name ``field``, or ``type_field`` where the model takes no images: names of the protocol
    that an image was converted from, else empty.
    """

    url: str = ""
    detail: str | None = None
    field: str = ""
    type_field: str = ""


class ImageSource(msgspec.Struct):
    """``source`` of an image in the messages protocol."""

    type: str | None = None
    data: str | None = None
    media_type: str | None = None
    url: str | None = None


class ContentPart(msgspec.Struct):
    """A part of a message's content: text or an image."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    detail: str | None = None
    source: ImageSource | None = None


class FunctionCall(msgspec.Struct):
    """The function of a tool call; ``arguments`` are JSON, as text or as an object."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call of an assistant message."""

    id: CallId
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Annotated[str, msgspec.Meta(max_length=MAX_CALL_ID_LENGTH)] | None = None
    reasoning_content: str | None = None


def _parts_of(message: ChatMessage) -> list[ContentPart]:
    return message.content if isinstance(message.content, list) else []


class FunctionDefinition(msgspec.Struct):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct):
    """The function of a :class:`NamedChoice`."""

    name: str


class NamedChoice(msgspec.Struct):
    """``tool_choice``: this function must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    echo: Any = None
    suffix: Any = None
    best_of: Any = None

    @property
    def has_images(self) -> bool:
        """Whether a message has an image."""
        parts = (part for message in self.messages for part in _parts_of(message))
        return any(part.type == "image_url" for part in parts)


class CompletionBody(GenerationBody, kw_only=True):
    """The body of ``POST /v1/completions``; ``prompt`` is validated when it is tokenized."""

    prompt: str | list[Any]
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    #: The text after the answer (fill-in-the-middle).
    suffix: str | None = None
    #: Number of answers to generate, of which the ``n`` likeliest are returned.
    best_of: Count | None = None


BodyT = TypeVar("BodyT", bound=msgspec.Struct)

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def decode_body(data: bytes, kind: type[BodyT]) -> BodyT:
    """Decode JSON into ``kind``.

    Raises:
        RequestError: invalid JSON, or a missing, invalid or unsupported field.
    """
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if isinstance(body, UnsupportedFields):
        _refuse_unsupported(body)
    return body


def pack_body(body: msgspec.Struct) -> bytes:
    """Encode a body for a prompt worker; see :func:`unpack_body`.

    Raises:
        RequestError: an integer exceeds 64 bits.
    """
    try:
        if isinstance(body, GenerationBody):
            # Prompts don't depend on the seed, which may have more than 64 bits.
            body = msgspec.structs.replace(body, seed=None)
        return msgspec.msgpack.encode(body)
    except (OverflowError, RecursionError) as error:
        field = "prompt" if isinstance(body, CompletionBody) else None
        raise RequestError(
            f"`{field}`: {error}" if field else f"the body: {error}", field
        ) from None


def unpack_body(data: bytes, kind: type[BodyT]) -> BodyT:
    """Decode the result of :func:`pack_body`.

    Raises:
        RequestError: a value converted from another protocol is out of range.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None


def _refuse_unsupported(body: UnsupportedFields) -> None:
    for name in UnsupportedFields.__struct_fields__:
        if name in type(body).__annotations__:
            continue  # this route redeclares the field, so it is supported
        value = getattr(body, name)
        if value is None or (
            not value and name not in ("web_search_options", "add_generation_prompt")
        ):
            continue
        if value not in NEUTRAL_VALUES.get(name, ()):
            raise RequestError(f"`{name}` is not supported by this endpoint", name)


def _validation_error(text: str) -> RequestError:
    """Extract field and reason from a msgspec error."""
    at = _AT.search(text)
    path = at[1] if at else ""
    reason = text[: at.start()] if at else text
    missing = _MISSING.match(reason)
    if missing:
        path = f"{path}.{missing[1]}".lstrip(".")
        reason = "required"
    path = path.replace("[...]", "")
    return RequestError(f"`{path}`: {reason}" if path else f"the body: {reason}", path or None)
