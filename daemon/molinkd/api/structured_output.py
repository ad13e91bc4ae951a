"""What a client wants an answer to be like: JSON, by a schema or not, a regular expression, …"""

from collections.abc import Iterator
from typing import Any

import msgspec

from molink.errors import RequestError
from molink.text.grammar import GrammarKind, JsonLayout, build_grammar, check_grammar
from molink.text.tokenizer import Tokenizer
from molink.text.tool_calls.grammar import build_call_grammar
from molinkd.api.loaded_model import LoadedModel
from molinkd.api.openai_schema import ChatBody, GenerationBody
from molinkd.api.tool_validation import choose_answer_format, required_tools

#: A field, and the kind and the text of what it asks for.
_GrammarSource = tuple[str, GrammarKind, Any]
_ANY_OBJECT = {"type": "object"}


def compile_grammar(body: GenerationBody, tokenizer: Tokenizer) -> bytes:
    """The grammar that an answer to ``body`` is held to; empty if it may be anything.

    It is compiled once, to see that it can be, which may take half a second.

    Raises:
        RequestError: it is invalid, too complex, not supported, or not the only one; names the
            field.
    """
    asked = list(_requested_grammars(body))
    if not asked:
        return b""
    field, kind, source = asked[0]
    if len(asked) > 1:
        raise RequestError(f"`{field}` and `{asked[1][0]}` can't go together", asked[1][0])
    _check_eos(body, tokenizer, field)
    try:
        if kind == "json_schema" and not isinstance(source, str):
            source = msgspec.json.encode(source).decode()
        grammar = build_grammar(kind, source, _json_layout(body))
        check_grammar(grammar)
    except RequestError as error:
        raise RequestError(f"`{field}`: {error}", field) from None
    except RecursionError:
        raise RequestError(f"`{field}`: it is nested too deeply", field) from None
    return grammar


def compile_call_grammar(body: ChatBody, loaded_model: LoadedModel, tail: str) -> bytes:
    """The grammar of an answer that has to call a tool; empty if it need not.

    ``tail`` is the end of the prompt.

    Raises:
        RequestError: the schema of a tool is too complex or not supported, or the answer is to have
            another form besides.
    """
    tools = required_tools(body)
    if not tools:
        return b""
    for other, _, _ in _requested_grammars(body):
        raise RequestError(f"`tool_choice` and `{other}` can't go together", other)
    _check_eos(body, loaded_model.tokenizer, "tool_choice")
    form = choose_answer_format(loaded_model, tools=True)
    parallel = body.tool_choice == "required" and body.parallel_tool_calls is not False
    try:
        text = build_call_grammar(form, tools, {}, tail=tail, parallel=parallel)
        check_grammar(build_grammar("grammar", text))
        ids = loaded_model.tokenizer.find_special_ids(form.special_markers(tools=True))
        text = build_call_grammar(form, tools, ids, tail=tail, parallel=parallel)
        return build_grammar("grammar", text)
    except RequestError as error:
        raise RequestError(f"`tools`: {error}", "tools") from None


def _json_layout(body: GenerationBody) -> JsonLayout:
    """How JSON is laid out. Where it is known, much of it is forced, and comes many at a time."""
    wanted = body.structured_outputs
    if wanted is None or wanted.disable_any_whitespace is None:
        return "line"
    return "compact" if wanted.disable_any_whitespace else "free"


def _check_eos(body: GenerationBody, tokenizer: Tokenizer, field: str) -> None:
    if body.ignore_eos:
        raise RequestError(f"`ignore_eos` and `{field}` can't go together", "ignore_eos")
    if not tokenizer.eos_ids:
        raise RequestError(f"`{field}`: this model has no token that ends an answer", field)


def _requested_grammars(body: GenerationBody) -> Iterator[_GrammarSource]:
    named = body.response_format
    if named is not None and named.type == "json_object":
        yield "response_format", "json_schema", _ANY_OBJECT
    if named is not None and named.type == "json_schema":
        schema = None if named.json_schema is None else named.json_schema.schema
        field = "response_format.json_schema.schema"
        if schema is None:
            raise RequestError(f"`{field}`: required, but missing", field)
        yield field, "json_schema", schema
    yield from _skip_null(
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
    )
    wanted = body.structured_outputs
    if wanted is not None:
        yield from _skip_null(
            ("structured_outputs.json", "json_schema", wanted.json),
            ("structured_outputs.regex", "regex", wanted.regex),
            ("structured_outputs.choice", "choice", wanted.choice),
            ("structured_outputs.grammar", "grammar", wanted.grammar),
        )
        if wanted.json_object:
            yield "structured_outputs.json_object", "json_schema", _ANY_OBJECT


def _skip_null(*fields: _GrammarSource) -> Iterator[_GrammarSource]:
    return (each for each in fields if each[2] is not None)
