"""Grammars that force tool calls: ``tool_choice`` ``required``, or a named function.

They use llguidance's Lark dialect (https://github.com/guidance-ai/llguidance). Schemas are embedded
whole, so that their internal references stay valid.
"""

import json
from collections.abc import Mapping
from typing import Any

from molink.errors import RequestError
from molink.text.tool_calls import listed, marked
from molink.text.tool_calls.create import AnswerFormat
from molink.text.tool_calls.reasoning import is_tag_open
from molink.text.tool_calls.tagged_grammar import (
    ANY_TEXT_RULE,
    TAG_LAYOUTS,
    Quote,
    answer_rule,
    call_rules,
    json_rule,
)

_NO_PARAMETERS = {"type": "object", "properties": {}}
_LINE_RULE = r"/\n{0,2}/"


def build_call_grammar(
    form: AnswerFormat,
    tools: Mapping[str, dict[str, Any] | None],
    ids: Mapping[str, int],
    *,
    tail: str = "",
    parallel: bool = False,
) -> str:
    """Build the grammar of an answer that calls one of ``tools`` (name → arguments schema).

    ``parallel`` allows several calls. ``ids`` are special tokens; other markers are plain text.
    ``tail`` is the end of the prompt. Reasoning may come first.

    Raises:
        RequestError: the model's call format is unknown.
    """

    def quote(text: str) -> str:
        token = max((one for one in ids if text.startswith(one)), key=len, default=None)
        if token is None:
            return json.dumps(text)
        rest = text.removeprefix(token)
        return f"<[{ids[token]}]>" + (f" {json.dumps(rest)}" if rest else "")

    named = "[ARGS]" in ids
    rules = ["%llguidance {}", *_start_rule(form, quote, ids, tail)]
    rules.append(f"answer: {_answer_rule(form, quote, named=named, parallel=parallel)}")
    rules.append("call: " + " | ".join(f"call{number}" for number in range(len(tools))))
    layout = None if form.tool_calls is None else TAG_LAYOUTS.get(form.tool_calls)
    for number, (name, schema) in enumerate(tools.items()):
        shape = schema or _NO_PARAMETERS
        if layout is not None:
            rules += call_rules(layout, quote, ids, f"call{number}", name, shape)
            continue
        call = _call_rule(form, quote, name, f"arguments{number}", named=named)
        rules += [f"call{number}: {call}", f"arguments{number}: {json_rule(shape)}"]
    return "\n".join(rules) + "\n"


def _start_rule(form: AnswerFormat, quote: Quote, ids: Mapping[str, int], tail: str) -> list[str]:
    """Build the rule of an answer: optional reasoning, then calls."""
    if form.tool_calls == "harmony":
        opening = f'{quote("<|channel|>")} "analysis" {quote("<|message|>")}'
        behind = f'{quote("<|start|>")} "assistant"'
        return ["start: thought? answer", *_reasoning_rule(opening, "<|end|>", behind, quote, ids)]
    if form.reasoning_tags is None:
        return ["start: answer"]
    opened = is_tag_open(tail, form.reasoning_tags[0])
    opening = "" if opened else quote(form.reasoning_tags[0])
    start = "start: thought answer" if opened else "start: thought? answer"
    return [start, *_reasoning_rule(opening, form.reasoning_tags[1], _LINE_RULE, quote, ids)]


def _reasoning_rule(
    opening: str, closing: str, behind: str, quote: Quote, ids: Mapping[str, int]
) -> list[str]:
    """Build the rule of text up to ``closing``, which may be a special token."""
    if closing in ids:
        return [f"thought: {opening} {ANY_TEXT_RULE} {quote(closing)} {behind}"]
    return [
        f"thought: {opening} thinking {behind}",
        f"thinking[suffix={json.dumps(closing)}]: {ANY_TEXT_RULE}",
    ]


def _answer_rule(form: AnswerFormat, quote: Quote, *, named: bool, parallel: bool) -> str:
    """Build the rule of one call, or several if the format allows it."""
    if form.tool_calls in TAG_LAYOUTS:
        return answer_rule(TAG_LAYOUTS[form.tool_calls], quote, parallel=parallel)
    match form.tool_calls:
        case "hermes":
            return 'call ("\\n" call)*' if parallel else "call"
        case "mistral" if named:
            return "call call*" if parallel else "call"
        case "mistral":
            calls = 'call (", " call)*' if parallel else "call"
            return f'{quote("[TOOL_CALLS]")} "[" {calls} "]"'
        case "deepseek" | "kimi_k2":
            tokens = marked.DEEPSEEK if form.tool_calls == "deepseek" else marked.KIMI
            calls = "call call*" if parallel else "call"
            return f"{quote(tokens.open)} {calls} {quote(tokens.close)}"
        case "granite" | "phi4_mini":
            calls = 'call (", " call)*' if parallel else "call"
            return f'{quote(listed.OPEN)} "[" {calls} "]"'
        case "llama" | "harmony":
            return "call"
        case None:
            raise RequestError("this model's tool call format is unknown", "tool_choice")
    raise RequestError(
        f"calls in this model's format ({form.tool_calls}) can't be forced; use `auto`",
        "tool_choice",
    )


def _call_rule(form: AnswerFormat, quote: Quote, name: str, arguments: str, *, named: bool) -> str:
    key = "parameters" if form.tool_calls == "llama" else "arguments"
    begin = f'{{"name": "{name}", "{key}": '
    match form.tool_calls:
        case "hermes":
            begin, end = quote("\n" + begin), quote("}\n")
            return f"{quote('<tool_call>')} {begin} {arguments} {end} {quote('</tool_call>')}"
        case "mistral" if named:
            return f"{quote('[TOOL_CALLS]')} {quote(name)} {quote('[ARGS]')} {arguments}"
        case "deepseek":
            tokens, head = marked.DEEPSEEK, f"{quote(name)} {quote(marked.DEEPSEEK.separator)}"
            return f"{quote(tokens.begin)} {head} {arguments} {quote(tokens.end)}"
        case "kimi_k2":
            tokens, head = marked.KIMI, quote(f"functions.{name}:0")
            head = f"{head} {quote(tokens.separator)}"
            return f"{quote(tokens.begin)} {head} {arguments} {quote(tokens.end)}"
        case "harmony":
            begin = quote(f"commentary to=functions.{name} ")
            kind = f'{quote("<|constrain|>")} "json" {quote("<|message|>")}'
            return f"{quote('<|channel|>')} {begin} {kind} {arguments}"
    return f"{quote(begin)} {arguments} {quote('}')}"
