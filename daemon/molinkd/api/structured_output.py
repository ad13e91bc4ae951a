"""Structured output: compiles a request's JSON schema, regex or grammar."""

from collections.abc import Iterator
from typing import Any

import msgspec

from molink.errors import RequestError
from molink.text.grammar import GrammarKind, JsonLayout, build_grammar, check_grammar
from molink.text.tokenizer import Tokenizer
from molink.text.tool_calls.grammar import build_call_grammar
from molinkd.api.model_catalog import LoadedModel
from molinkd.api.openai.schema import ChatBody, GenerationBody
from molinkd.api.tool_validation import choose_answer_format, required_tools

#: The field, grammar kind and source of a constraint.
_GrammarSource = tuple[str, GrammarKind, Any]
_ANY_OBJECT = {"type": "object"}


def compile_grammar(body: GenerationBody, tokenizer: Tokenizer) -> bytes:
    """Compile the grammar of a request's answer; empty without a constraint.

    It is compiled once here to validate it, which may take half a second.

    Raises:
        RequestError: the constraint is invalid, too complex, unsupported, or not the only one. The
            message names the field.
    """
    grammars = list(_requested_grammars(body))
    if not grammars:
        return b""
    field, kind, source = grammars[0]
    if len(grammars) > 1:
        raise RequestError(f"`{field}` and `{grammars[1][0]}` can't be combined", grammars[1][0])
    _check_eos(body, tokenizer, field)
    try:
        if kind == "json_schema" and not isinstance(source, str):
            source = msgspec.json.encode(source).decode()
        grammar = build_grammar(kind, source, _json_layout(body))
        check_grammar(grammar)
    except RequestError as error:
        raise RequestError(f"`{field}`: {error}", field) from None
    except RecursionError:
        raise RequestError(f"`{field}`: nested too deeply", field) from None
    return grammar


def compile_call_grammar(body: ChatBody, loaded_model: LoadedModel, tail: str) -> bytes:
    """Compile the grammar of an answer that must call a tool; empty if it need not.

    ``tail`` is the end of the prompt.

    Raises:
        RequestError: a tool's schema is too complex or unsupported, or the request has another
            constraint.
    """
    tools = required_tools(body)
    if not tools:
        return b""
    for other, _, _ in _requested_grammars(body):
        raise RequestError(f"`tool_choice` and `{other}` can't be combined", other)
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
    """Choose the JSON whitespace. A fixed layout forces many tokens, which are sampled at once."""
    outputs = body.structured_outputs
    if outputs is None or outputs.disable_any_whitespace is None:
        return "line"
    return "compact" if outputs.disable_any_whitespace else "free"


def _check_eos(body: GenerationBody, tokenizer: Tokenizer, field: str) -> None:
    if body.ignore_eos:
        raise RequestError(f"`ignore_eos` and `{field}` can't be combined", "ignore_eos")
    if not tokenizer.eos_ids:
        raise RequestError(f"`{field}`: this model has no end-of-sequence token", field)


def _requested_grammars(body: GenerationBody) -> Iterator[_GrammarSource]:
    named = body.response_format
    if named is not None and named.type == "json_object":
        yield "response_format", "json_schema", _ANY_OBJECT
    if named is not None and named.type == "json_schema":
        schema = None if named.json_schema is None else named.json_schema.schema
        field = "response_format.json_schema.schema"
        if schema is None:
            raise RequestError(f"`{field}`: required", field)
        yield field, "json_schema", schema
    yield from _skip_null(
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
    )
    outputs = body.structured_outputs
    if outputs is not None:
        yield from _skip_null(
            ("structured_outputs.json", "json_schema", outputs.json),
            ("structured_outputs.regex", "regex", outputs.regex),
            ("structured_outputs.choice", "choice", outputs.choice),
            ("structured_outputs.grammar", "grammar", outputs.grammar),
        )
        if outputs.json_object:
            yield "structured_outputs.json_object", "json_schema", _ANY_OBJECT


def _skip_null(*fields: _GrammarSource) -> Iterator[_GrammarSource]:
    return (each for each in fields if each[2] is not None)
