"""Which parser an answer has: by what the model's template writes, or by a setting."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from molink.text.tool_calls import harmony, hermes, llama, mistral
from molink.text.tool_calls.base import AnswerParser
from molink.text.tool_calls.reasoning import REASONING_TAGS, PlainTextParser, ReasoningParser

#: Ways in which models write calls.
ToolCallFormat = Literal["hermes", "llama", "mistral", "harmony"]
#: What can be set: by the template, one for all, or answers as they are.
ToolCallParserChoice = Literal["auto", "raw", "hermes", "llama", "mistral", "harmony"]
TOOL_CALL_FORMATS: tuple[ToolCallFormat, ...] = get_args(ToolCallFormat)

#: What a template of each format writes, and what only others write. Harmony comes first.
_TEMPLATE_SIGNS: dict[ToolCallFormat, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "harmony": (("<|channel|>", "<|message|>"), ()),
    "hermes": (("<tool_call>", "arguments"), ("<function=", "<arg_key>")),
    "mistral": (("[TOOL_CALLS]",), ()),
    "llama": (("ipython", '"parameters": '), ("<function=",)),
}
_MARKERS: dict[ToolCallFormat, frozenset[str]] = {
    "harmony": harmony.MARKERS,
    "hermes": hermes.MARKERS,
    "llama": llama.MARKERS,
    "mistral": mistral.MARKERS,
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model's answers are written; ``reasoning_tags`` are around what it thinks first."""

    tool_calls: ToolCallFormat | None = None
    reasoning_tags: tuple[str, str] | None = None

    def special_markers(self, *, tools: bool) -> frozenset[str]:
        """Texts that the parser needs to see, should they be special tokens.

        None if an answer is nothing but its content; ``tools`` says whether it may have calls.
        """
        calls = self.tool_calls if tools or self.tool_calls == "harmony" else None
        return frozenset(self.reasoning_tags or ()) | (_MARKERS[calls] if calls else frozenset())


def detect_answer_format(
    template: str, vocabulary: Collection[str], choice: ToolCallParserChoice = "auto"
) -> AnswerFormat:
    """How answers to prompts of ``template`` (its source) are written.

    ``vocabulary`` are the tokens that the tokenizer keeps whole.
    """
    if choice == "raw":
        return AnswerFormat()
    calls = _detect_tool_calls(template) if choice == "auto" else choice
    if calls == "harmony":
        return AnswerFormat(calls)
    tags = (
        pair
        for pair in REASONING_TAGS
        if pair[1] in template or (pair[0] in vocabulary and pair[1] in vocabulary)
    )
    return AnswerFormat(calls, next(tags, None))


def create_answer_parser(
    form: AnswerFormat, names: frozenset[str], tail: str = ""
) -> AnswerParser | None:
    """A parser for one answer; ``None`` if it is content only.

    ``names`` are the tools that can be called, ``tail`` is the end of the prompt.
    """
    if form.tool_calls == "harmony":
        return harmony.HarmonyParser(names, tail)
    inner: AnswerParser | None = None
    if names and form.tool_calls == "hermes":
        inner = hermes.HermesParser(names)
    elif names and form.tool_calls == "llama":
        inner = llama.LlamaParser(names)
    elif names and form.tool_calls == "mistral":
        inner = mistral.MistralParser(names)
    if form.reasoning_tags is None:
        return inner
    return ReasoningParser(inner or PlainTextParser(), form.reasoning_tags, tail)


def _detect_tool_calls(template: str) -> ToolCallFormat | None:
    for name, (signs, others) in _TEMPLATE_SIGNS.items():
        if all(sign in template for sign in signs) and not any(map(template.__contains__, others)):
            return name
    return None
