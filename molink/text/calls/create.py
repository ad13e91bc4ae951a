"""Which parser an answer has: by what the model's template writes, or by a setting."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from molink.text.calls import harmony, hermes, llama, mistral
from molink.text.calls.base import AnswerParser
from molink.text.calls.thinking import TAGS, PlainText, ThinkingParser

#: Ways in which models write calls.
CallFormat = Literal["hermes", "llama", "mistral", "harmony"]
#: What can be set: by the template, one for all, or answers as they are.
FormatChoice = Literal["auto", "raw", "hermes", "llama", "mistral", "harmony"]
CALL_FORMATS: tuple[CallFormat, ...] = get_args(CallFormat)

#: What a template of each format writes, and what only others write. Harmony comes first.
_SIGNS: dict[CallFormat, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "harmony": (("<|channel|>", "<|message|>"), ()),
    "hermes": (("<tool_call>", "arguments"), ("<function=", "<arg_key>")),
    "mistral": (("[TOOL_CALLS]",), ()),
    "llama": (("ipython", '"parameters": '), ("<function=",)),
}
_MARKERS: dict[CallFormat, frozenset[str]] = {
    "harmony": harmony.MARKERS,
    "hermes": hermes.MARKERS,
    "llama": llama.MARKERS,
    "mistral": mistral.MARKERS,
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model's answers are written; ``tags`` are around what it thinks first."""

    calls: CallFormat | None = None
    tags: tuple[str, str] | None = None

    def markers(self, *, tools: bool) -> frozenset[str]:
        """Texts that the parser needs to see, should they be special tokens.

        None if an answer is nothing but its content; ``tools`` says whether it may have calls.
        """
        calls = self.calls if tools or self.calls == "harmony" else None
        return frozenset(self.tags or ()) | (_MARKERS[calls] if calls else frozenset())


def detect_format(
    template: str, vocabulary: Collection[str], choice: FormatChoice = "auto"
) -> AnswerFormat:
    """How answers to prompts of ``template`` (its source) are written.

    ``vocabulary`` are the tokens that the tokenizer keeps whole.
    """
    if choice == "raw":
        return AnswerFormat()
    calls = _calls(template) if choice == "auto" else choice
    if calls == "harmony":
        return AnswerFormat(calls)
    tags = (
        pair
        for pair in TAGS
        if pair[1] in template or (pair[0] in vocabulary and pair[1] in vocabulary)
    )
    return AnswerFormat(calls, next(tags, None))


def create_parser(form: AnswerFormat, names: frozenset[str], tail: str = "") -> AnswerParser | None:
    """A parser for one answer; ``None`` if it is content only.

    ``names`` are the tools that can be called, ``tail`` is the end of the prompt.
    """
    if form.calls == "harmony":
        return harmony.HarmonyParser(names, tail)
    inner: AnswerParser | None = None
    if names and form.calls == "hermes":
        inner = hermes.HermesParser(names)
    elif names and form.calls == "llama":
        inner = llama.LlamaParser(names)
    elif names and form.calls == "mistral":
        inner = mistral.MistralParser(names)
    if form.tags is None:
        return inner
    return ThinkingParser(inner or PlainText(), form.tags, tail)


def _calls(template: str) -> CallFormat | None:
    for name, (signs, others) in _SIGNS.items():
        if all(sign in template for sign in signs) and not any(map(template.__contains__, others)):
            return name
    return None
