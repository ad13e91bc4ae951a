"""Chooses an answer parser by the model's chat template or a setting."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from molink.text.tool_calls import (
    enclosed,
    harmony,
    hermes,
    listed,
    llama,
    marked,
    mistral,
    pythonic,
    tagged,
)
from molink.text.tool_calls.base import AnswerParser
from molink.text.tool_calls.formats import ToolCallFormat, ToolCallParserChoice
from molink.text.tool_calls.reasoning import (
    REASONING_TAGS,
    TAG_TOKENS,
    PlainTextParser,
    ReasoningParser,
)

#: Strings that identify a format's templates, and strings that exclude the format; harmony is
#: first.
_TEMPLATE_SIGNS: dict[ToolCallFormat, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "harmony": (("<|channel|>", "<|message|>"), ()),
    "deepseek": (("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"), ()),
    "kimi_k2": (("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), ()),
    "minimax_m2": (("<minimax:tool_call>", "<invoke name="), ()),
    "seed_oss": (("<seed:tool_call>", "<function="), ()),
    "glm": (("<tool_call>", "<arg_key>", "<arg_value>"), ()),
    "qwen3_coder": (("<tool_call>", "<function=", "<parameter="), ()),
    "hermes": (("<tool_call>", "arguments"), ("<function=", "<arg_key>")),
    "mistral": (("[TOOL_CALLS]",), ()),
    "llama": (("ipython", '"parameters": '), ("<function=",)),
    "granite": (("<|tool_call|>", "<|start_of_role|>"), ()),
    "phi4_mini": (("<|tool|>", "<|/tool|>"), ()),
    "pythonic": (("ipython", "params_name1=params_value1"), ()),
    "gemma4": (("<|tool_call>call:", "<tool_call|>"), ()),
    "lfm2": (("<|im_start|>", "List of tools: "), ()),
}
_MARKERS: dict[ToolCallFormat, frozenset[str]] = {
    "harmony": harmony.MARKERS,
    "hermes": hermes.MARKERS,
    "llama": llama.MARKERS,
    "mistral": mistral.MARKERS,
    "qwen3_coder": tagged.QWEN3_CODER.markers,
    "glm": tagged.GLM.markers,
    "minimax_m2": tagged.MINIMAX.markers,
    "seed_oss": tagged.SEED.markers,
    "deepseek": marked.DEEPSEEK.markers,
    "kimi_k2": marked.KIMI.markers,
    "granite": listed.MARKERS,
    "phi4_mini": listed.MARKERS,
    "pythonic": pythonic.MARKERS,
    "lfm2": enclosed.LFM2.markers,
    "gemma4": enclosed.GEMMA4.markers,
}
_CALL_PARSERS: dict[ToolCallFormat, Callable[[tagged.ToolSchemas], AnswerParser]] = {
    "hermes": lambda tools: hermes.HermesParser(frozenset(tools)),
    "llama": lambda tools: llama.LlamaParser(frozenset(tools)),
    "mistral": lambda tools: mistral.MistralParser(frozenset(tools)),
    "qwen3_coder": lambda tools: tagged.TaggedCallParser(tools, tagged.QWEN3_CODER),
    "seed_oss": lambda tools: tagged.TaggedCallParser(tools, tagged.SEED),
    "glm": lambda tools: tagged.TaggedCallParser(tools, tagged.GLM),
    "minimax_m2": lambda tools: tagged.TaggedCallParser(tools, tagged.MINIMAX),
    "deepseek": lambda tools: marked.MarkedCallParser(frozenset(tools), marked.DEEPSEEK),
    "kimi_k2": lambda tools: marked.MarkedCallParser(frozenset(tools), marked.KIMI),
    "granite": lambda tools: listed.ListedCallParser(frozenset(tools), listed.OPEN),
    "phi4_mini": lambda tools: listed.ListedCallParser(
        frozenset(tools), listed.OPEN, listed.FUNCTOOLS
    ),
    "pythonic": lambda tools: pythonic.PythonicParser(frozenset(tools)),
    "lfm2": lambda tools: enclosed.EnclosedCallParser(frozenset(tools), enclosed.LFM2),
    "gemma4": lambda tools: enclosed.EnclosedCallParser(frozenset(tools), enclosed.GEMMA4),
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format of a model's answers; ``reasoning_tags`` enclose its reasoning."""

    tool_calls: ToolCallFormat | None = None
    reasoning_tags: tuple[str, str] | None = None

    def special_markers(self, *, tools: bool) -> frozenset[str]:
        """Special tokens that the parser needs to see.

        ``tools`` says whether the answer may have calls.
        """
        calls = self.tool_calls if tools or self.tool_calls == "harmony" else None
        tags = {TAG_TOKENS.get(tag, tag) for tag in self.reasoning_tags or ()}
        return frozenset(tags) | (_MARKERS[calls] if calls else frozenset())


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
    form: AnswerFormat, tools: tagged.ToolSchemas, tail: str = ""
) -> AnswerParser | None:
    """Create a parser for one answer; ``None`` for content only.

    ``tools`` maps the callable tools to their arguments schemas, ``tail`` is the end of the prompt.
    """
    if form.tool_calls == "harmony":
        return harmony.HarmonyParser(frozenset(tools), tail)
    inner = None
    if tools and form.tool_calls is not None:
        inner = _CALL_PARSERS[form.tool_calls](tools)
    if form.reasoning_tags is None:
        return inner
    return ReasoningParser(inner or PlainTextParser(), form.reasoning_tags, tail)


def _detect_tool_calls(template: str) -> ToolCallFormat | None:
    for name, (signs, others) in _TEMPLATE_SIGNS.items():
        if all(sign in template for sign in signs) and not any(map(template.__contains__, others)):
            return name
    return None
