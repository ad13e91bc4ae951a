"""What the endpoint and the processes that read prompts say to each other, over their pipes."""

import msgspec

from molink.errors import BrokenModel, ContextTooLong, MolinkError, RequestError
from molink.text.tool_calls.create import ToolCallParserChoice
from molink.wire.messages.base import Message
from molinkd.api.loaded_model import LoadedModel
from molinkd.api.openai_schema import ChatBody, GenerationBody, pack_body

#: Bytes of a message; its parts have bounds of their own, so a longer one is garbage.
MAX_MESSAGE_BYTES = 1 << 28

#: What can be wrong with a prompt or a model, by the names of the errors.
_ERRORS: dict[str, type[MolinkError]] = {
    kind.__name__: kind for kind in (BrokenModel, ContextTooLong, RequestError)
}


class LoadTokenizer(Message, frozen=True, tag="open"):
    """Load the tokenizer of a model's folder; answered with :class:`TokenizedPrompts` without
    any."""

    folder: str


class TokenizePrompts(Message, frozen=True, tag="read"):
    """Tokenize the prompts of a request for a loaded tokenizer.

    ``body`` is a :class:`ChatBody` (``is_chat``) or a :class:`CompletionBody`, packed by
    :func:`~molinkd.api.openai_schema.pack_body`.
    """

    folder: str
    name: str
    max_model_len: int
    is_chat: bool
    body: bytes
    tool_call_parser: ToolCallParserChoice = "auto"

    @classmethod
    def from_body(cls, body: GenerationBody, loaded_model: LoadedModel) -> "TokenizePrompts":
        """The message for a body that asks for that model.

        Raises:
            RequestError: the body has an integer of more than 64 bits.
        """
        model = loaded_model.model
        return cls(
            str(model.folder),
            model.name,
            model.max_model_len,
            isinstance(body, ChatBody),
            pack_body(body),
            loaded_model.tool_call_parser,
        )


class PromptTokens(msgspec.Struct, frozen=True):
    """Ids of one prompt; ``text`` only where the answer has to echo it.

    ``tail`` is the end of a conversation's text: a template may begin the answer there.
    """

    ids: tuple[int, ...]
    text: str = ""
    tail: str = ""


class TokenizedPrompts(Message, frozen=True, tag="prompts"):
    """What was read; ``grammar`` is what the answers are held to, empty if they may be anything."""

    prompts: tuple[PromptTokens, ...] = ()
    grammar: bytes = b""


class PromptRefusal(Message, frozen=True, tag="refusal"):
    """Something is wrong with the prompt or the model; ``kind`` is a name of :data:`_ERRORS`."""

    kind: str
    text: str
    param: str | None = None

    @classmethod
    def from_error(cls, error: MolinkError) -> "PromptRefusal":
        """What stands for ``to_error``; for one that is not foreseen, as for a request's."""
        kind = type(error).__name__
        known = kind if kind in _ERRORS else RequestError.__name__
        return cls(known, str(error), getattr(error, "param", None))

    def to_error(self) -> MolinkError:
        """The error itself."""
        kind = _ERRORS.get(self.kind, RequestError)
        if issubclass(kind, RequestError):
            return kind(self.text, self.param)
        return kind(self.text)


class PromptWorkerFault(Message, frozen=True, tag="fault"):
    """Our own code failed; ``trace`` is for the log."""

    trace: str


PromptWorkerRequest = LoadTokenizer | TokenizePrompts
PromptWorkerReply = TokenizedPrompts | PromptRefusal | PromptWorkerFault
