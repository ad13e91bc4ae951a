"""Builds and checks grammars that constrain answers.

A grammar is a text in the syntax of llguidance (https://github.com/guidance-ai/llguidance), which
compiles it and computes the allowed tokens. It is untrusted, so its length and the library's limits
bound every compilation.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from molink.errors import RequestError
from molink.native import raise_as
from molink.text.closed_schemas import forbid_extra_keys
from molink.wire.messages.data_plane import MAX_GRAMMAR_BYTES

if TYPE_CHECKING:
    import llguidance

GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]
#: JSON layout: on one line with usual spaces, without white space, or flexible.
JsonLayout = Literal["line", "compact", "free"]

#: Limits of a compilation and of a step: half a second and tens of megabytes at worst. The
#: library's defaults allow a regular expression 1.5 s and 200 MB.
LEXER_FUEL, MAX_ITEMS, MAX_STATES = 200_000, 20_000, 20_000
#: White space between JSON tokens: none, a space, or a line break and indentation. Without a bound,
#: a model could write white space forever.
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
#: Bytes of an answer that a check generates, and a bit mask of white space, which it generates only
#: if nothing else is allowed.
_TRIED_BYTES = 64
_SPACES = sum(1 << byte for byte in b" \t\r\n")
#: Cached results of successful checks, each of up to :data:`MAX_GRAMMAR_BYTES` bytes.
_MAX_CACHED_GRAMMARS = 32


def build_grammar(
    kind: GrammarKind, source: str | Sequence[str], layout: JsonLayout = "free"
) -> bytes:
    """Build a grammar from a JSON schema, regular expression, list of choices, Lark or GBNF.

    ``layout`` applies to JSON answers. Keys that a schema does not name are forbidden; see
    :func:`~molink.text.closed_schemas.forbid_extra_keys`.

    Raises:
        RequestError: the grammar is invalid or too long.
    """
    import llguidance

    if not source and kind == "choice":
        raise RequestError("the list of choices is empty")
    if len(source) > MAX_GRAMMAR_BYTES:
        raise RequestError(f"it has {len(source)} characters; at most {MAX_GRAMMAR_BYTES}")

    def refused(reason: str) -> RequestError:
        return RequestError(_first_line(reason))

    with raise_as(refused):
        if kind == "json_schema":
            assert isinstance(source, str)
            schema = json.dumps(forbid_extra_keys(json.loads(source)), ensure_ascii=False)
            options: Any = _LAYOUT_OPTIONS[layout]
            text = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
        else:
            # Lists are accepted, although the annotation lacks them.
            text = llguidance.grammar_from(kind, source)  # type: ignore[arg-type]
    grammar = text.encode("utf-8", "replace")
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise RequestError(f"its grammar has {len(grammar)} bytes; at most {MAX_GRAMMAR_BYTES}")
    return grammar


@lru_cache(_MAX_CACHED_GRAMMARS)
def check_grammar(grammar: bytes) -> None:
    """Check that a grammar compiles and allows an answer.

    Some grammars prove too complex only in use, so a few bytes are generated. Results are cached,
    since clients often repeat a schema.

    Raises:
        RequestError: the grammar is invalid, too complex or unsupported, or allows no answer.
    """
    matcher = compile_grammar(_create_byte_tokenizer(), grammar)
    for _ in range(_TRIED_BYTES):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        mask = mask & ~_SPACES or mask  # white space would hide problems after it
        if mask:
            matcher.consume_token((mask & -mask).bit_length() - 1)
        if matcher.is_error():
            raise RequestError(_explain_error(matcher.get_error()))
        if matcher.is_stopped():
            return


def compile_grammar(tokenizer: "llguidance.LLTokenizer", grammar: bytes) -> "llguidance.LLMatcher":
    """Compile a grammar for a tokenizer.

    Raises:
        RequestError: as :func:`check_grammar`, except for grammars that allow no answer.
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
    """Create llguidance's view of a vocabulary from each token's bytes.

    ``end_ids`` (at least one) end an answer; ``encode`` tokenizes forced text.
    """
    import llguidance

    class Vocabulary:
        eos_token_id, bos_token_id = end_ids[0], None
        special_token_ids = special_ids

        def __init__(self) -> None:
            self.tokens = tokens

        def __call__(self, text: str | bytes) -> Sequence[int]:
            if isinstance(text, bytes):  # the library tries bytes first
                raise TypeError("only text can be encoded")
            return encode(text)

    wrapper = llguidance.TokenizerWrapper(Vocabulary())
    return llguidance.LLTokenizer(wrapper, eos_token=list(end_ids))


@cache
def _create_byte_tokenizer() -> "llguidance.LLTokenizer":
    """Create a tokenizer with one token per byte, and an end token."""
    tokens = [*(bytes([byte]) for byte in range(_END_TOKEN)), b"<end>"]
    return create_grammar_tokenizer(
        tokens, [_END_TOKEN], [_END_TOKEN], lambda text: list(text.encode())
    )


def _explain_error(error: str) -> str:
    """Extract the part of the library's error that helps a client."""
    if "NoExtensionBias" in error:
        return "no answer can match it"
    return _first_line(error.removeprefix("Parser Error: "))


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "invalid")[:300]
