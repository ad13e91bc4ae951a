"""Messages between the endpoint and its prompt workers, over pipes."""

from typing import Literal

import msgspec

from molink.errors import BrokenModel, ContextTooLong, MolinkError, RequestError
from molink.facts.images import ImageInput
from molink.text.tool_calls.formats import ToolCallParserChoice
from molink.wire.messages.base import Message
from molinkd.api.model_catalog import LoadedModel
from molinkd.api.openai.schema import ChatBody, GenerationBody, pack_body
from molinkd.api.pooling.schema import RerankBody

#: Bodies whose prompts are tokenized, and their names.
PromptBody = GenerationBody | RerankBody
PromptKind = Literal["chat", "completion", "ranking"]
#: Maximum message size in bytes; the parts have their own limits.
MAX_MESSAGE_BYTES = 1 << 28

#: Errors that a worker may report, by name.
_ERRORS: dict[str, type[MolinkError]] = {
    kind.__name__: kind for kind in (BrokenModel, ContextTooLong, RequestError)
}


class LoadTokenizer(Message, frozen=True, tag="open"):
    """Load a model's tokenizer; answered by an empty :class:`TokenizedPrompts`."""

    folder: str


class TokenizePrompts(Message, frozen=True, tag="read"):
    """Tokenize the prompts of a request with a loaded tokenizer.

    ``body`` is the body of that ``kind``, packed by :func:`~molinkd.api.openai.schema.pack_body`.
    """

    folder: str
    name: str
    max_model_len: int
    kind: PromptKind
    body: bytes
    tool_call_parser: ToolCallParserChoice = "auto"
    sees_images: bool = False

    @classmethod
    def from_body(cls, body: PromptBody, loaded_model: LoadedModel) -> "TokenizePrompts":
        """Build the message for a body and its model.

        Raises:
            RequestError: an integer of the body exceeds 64 bits.
        """
        model = loaded_model.model
        kind: PromptKind = "completion"
        if isinstance(body, ChatBody | RerankBody):
            kind = "chat" if isinstance(body, ChatBody) else "ranking"
        return cls(
            str(model.folder),
            model.name,
            model.max_model_len,
            kind,
            pack_body(body),
            loaded_model.tool_call_parser,
            model.sees_images,
        )


class PromptTokens(msgspec.Struct, frozen=True):
    """Token ids of a prompt; ``text`` only if the answer must echo it.

    ``tail`` is the end of a conversation's text: a template may start the answer there. The ids of
    rows of ``images`` are made of their pixels.
    """

    ids: tuple[int, ...]
    text: str = ""
    tail: str = ""
    images: tuple[ImageInput, ...] = ()


class TokenizedPrompts(Message, frozen=True, tag="prompts"):
    """Tokenized prompts; ``grammar`` constrains the answers, empty without a constraint."""

    prompts: tuple[PromptTokens, ...] = ()
    grammar: bytes = b""


class PromptRefusal(Message, frozen=True, tag="refusal"):
    """The prompt or model is invalid; ``kind`` is a name of :data:`_ERRORS`."""

    kind: str
    text: str
    param: str | None = None

    @classmethod
    def from_error(cls, error: MolinkError) -> "PromptRefusal":
        """Convert ``error``; unexpected kinds become a :class:`RequestError`."""
        kind = type(error).__name__
        known = kind if kind in _ERRORS else RequestError.__name__
        return cls(known, str(error), getattr(error, "param", None))

    def to_error(self) -> MolinkError:
        """Convert back to the error."""
        kind = _ERRORS.get(self.kind, RequestError)
        if issubclass(kind, RequestError):
            return kind(self.text, self.param)
        return kind(self.text)


class PromptWorkerFault(Message, frozen=True, tag="fault"):
    """The worker's own code failed; ``trace`` is for the log."""

    trace: str


PromptWorkerRequest = LoadTokenizer | TokenizePrompts
PromptWorkerReply = TokenizedPrompts | PromptRefusal | PromptWorkerFault
