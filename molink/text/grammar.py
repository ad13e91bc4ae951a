"""Grammars that answers are held to: from what a client asks for to one text, and its check.

The text is a grammar of llguidance (https://github.com/guidance-ai/llguidance), which compiles it
and says at each token which may follow. It comes from strangers, so every compilation is bounded:
by the length of the text, and by limits beyond which the library gives up.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from molink.errors import RequestError
from molink.native import raise_as
from molink.wire.messages.data_plane import MAX_GRAMMAR_BYTES

if TYPE_CHECKING:
    import llguidance

GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]
#: How JSON is laid out: on one line as most programs write it, without any white space, or as the
#: model likes.
JsonLayout = Literal["line", "compact", "free"]

#: What a compilation and a step may take: half a second and tens of megabytes at worst. The
#: library's own limits leave a regular expression 1.5 s and 200 MB.
LEXER_FUEL, MAX_ITEMS, MAX_STATES = 200_000, 20_000, 20_000
#: White space between JSON's tokens: none, a space, or a new line and its indentation. Without a
#: bound a model could write white space for ever.
_WHITE_SPACE = r"( ?|\n {0,40})"
_LAYOUT_OPTIONS: dict[JsonLayout, dict[str, Any]] = {
    "line": {
        "whitespace_pattern": None,
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    },
    "compact": {
        "whitespace_pattern": None,
        "whitespace_flexible": False,
        "item_separator": ",",
        "key_separator": ":",
    },
    "free": {"whitespace_pattern": _WHITE_SPACE},
}
_END_TOKEN = 256
#: Bytes of an answer that a check goes through; white space, as bits, only where it has to be.
_TRIED_BYTES = 64
_SPACES = sum(1 << byte for byte in b" \t\r\n")
#: Checked grammars that are remembered, of up to :data:`MAX_GRAMMAR_BYTES` bytes each.
_MAX_CACHED_GRAMMARS = 32


def build_grammar(
    kind: GrammarKind, source: str | Sequence[str], layout: JsonLayout = "free"
) -> bytes:
    """The grammar of a JSON schema (JSON), a regular expression, texts to choose from, or Lark.

    A grammar may be in GBNF too. ``layout`` is that of answers to a JSON schema.

    Raises:
        RequestError: it is none, or too long.
    """
    import llguidance

    if not source and kind == "choice":
        raise RequestError("there is nothing to choose from")
    if len(source) > MAX_GRAMMAR_BYTES:
        raise RequestError(f"it is {len(source)} long; at most {MAX_GRAMMAR_BYTES}")

    def refused(reason: str) -> RequestError:
        return RequestError(_first_line(reason))

    with raise_as(refused):
        if kind == "json_schema":
            assert isinstance(source, str)
            options: Any = _LAYOUT_OPTIONS[layout]
            text = llguidance.LLMatcher.grammar_from_json_schema(source, overrides=options)
        else:
            # Its type says that choices are a text, too; it takes a list as well.
            text = llguidance.grammar_from(kind, source)  # type: ignore[arg-type]
    grammar = text.encode("utf-8", "replace")
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise RequestError(f"its grammar has {len(grammar)} bytes; at most {MAX_GRAMMAR_BYTES}")
    return grammar


@lru_cache(_MAX_CACHED_GRAMMARS)
def check_grammar(grammar: bytes) -> None:
    """Compile ``grammar`` for a vocabulary of bytes, and see that an answer can begin.

    Some that are too complex are found so only once they are used: a few bytes are tried. Programs
    ask for the same form again and again, so the last good ones are remembered.

    Raises:
        RequestError: it is invalid, too complex, has what isn't supported, or allows no answer.
    """
    matcher = compile_grammar(_create_byte_tokenizer(), grammar)
    for _ in range(_TRIED_BYTES):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        mask = mask & ~_SPACES or mask  # which would hide what comes behind it
        if mask:
            matcher.consume_token((mask & -mask).bit_length() - 1)
        if matcher.is_error():
            raise RequestError(_explain_error(matcher.get_error()))
        if matcher.is_stopped():
            return


def compile_grammar(tokenizer: "llguidance.LLTokenizer", grammar: bytes) -> "llguidance.LLMatcher":
    """What says which tokens of ``tokenizer`` may follow.

    Raises:
        RequestError: as :func:`check_grammar` does, but for answers that can't begin.
    """
    import llguidance

    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise RequestError(f"a grammar of {len(grammar)} bytes; at most {MAX_GRAMMAR_BYTES}")
    with raise_as(RequestError):
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL,
            step_max_items=MAX_ITEMS,
            max_lexer_states=MAX_STATES,
            verbose_errors=False,
        )
        text = grammar.decode("utf-8", "replace")
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(_explain_error(matcher.get_error()))
        return matcher


def create_grammar_tokenizer(
    tokens: Sequence[bytes],
    end_ids: Sequence[int],
    special_ids: Sequence[int],
    encode: Callable[[str], Sequence[int]],
) -> "llguidance.LLTokenizer":
    """A vocabulary as llguidance sees it: the bytes of each token, by id.

    ``end_ids`` (one at least) end an answer; ``encode`` finds the usual tokens of a text that has
    to come.
    """
    import llguidance

    class Vocabulary:
        eos_token_id, bos_token_id = end_ids[0], None
        special_token_ids = special_ids

        def __init__(self) -> None:
            self.tokens = tokens

        def __call__(self, text: str | bytes) -> Sequence[int]:
            if isinstance(text, bytes):  # the library asks whether bytes would do
                raise TypeError("only texts can be encoded")
            return encode(text)

    wrapper = llguidance.TokenizerWrapper(Vocabulary())
    return llguidance.LLTokenizer(wrapper, eos_token=list(end_ids))


@cache
def _create_byte_tokenizer() -> "llguidance.LLTokenizer":
    """A token for each byte, and one for the end."""
    tokens = [*(bytes([byte]) for byte in range(_END_TOKEN)), b"<end>"]
    return create_grammar_tokenizer(
        tokens, [_END_TOKEN], [_END_TOKEN], lambda text: list(text.encode())
    )


def _explain_error(error: str) -> str:
    """What of the library's error tells a client something."""
    if "NoExtensionBias" in error:
        return "no answer at all can be so"
    return _first_line(error.removeprefix("Parser Error: "))


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "invalid")[:300]
