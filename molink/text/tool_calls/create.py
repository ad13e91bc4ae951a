"""Chooses an answer parser by the model's chat template or a setting."""

from collections.abc import Collection
from dataclasses import dataclass

from molink.text.tool_calls import harmony, hermes, llama, mistral
from molink.text.tool_calls.base import AnswerParser
from molink.text.tool_calls.formats import ToolCallFormat, ToolCallParserChoice
from molink.text.tool_calls.reasoning import REASONING_TAGS, PlainTextParser, ReasoningParser

#: Strings that a format's templates contain, and strings that exclude it; harmony is first.
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
    """Format of a model's answers; ``reasoning_tags`` enclose its reasoning."""

    tool_calls: ToolCallFormat | None = None
    reasoning_tags: tuple[str, str] | None = None

    def special_markers(self, *, tools: bool) -> frozenset[str]:
        """Special tokens that the parser needs to see.

        ``tools`` tells whether the answer may have calls.
        """
        calls = self.tool_calls if tools or self.tool_calls == "harmony" else None
        return frozenset(self.reasoning_tags or ()) | (_MARKERS[calls] if calls else frozenset())


def detect_answer_format(
    template: str, vocabulary: Collection[str], choice: ToolCallParserChoice = "auto"
) -> AnswerFormat:
    """Detect the answer format from a chat template's source.

    ``vocabulary`` are the tokenizer's added tokens.
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
    """Create a parser for one answer; ``None`` for content only.

    ``names`` are the callable tools, ``tail`` is the end of the prompt.
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
