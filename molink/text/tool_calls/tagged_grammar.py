"""Rules for calls whose arguments are tagged one by one, in llguidance's Lark dialect.

Arguments come in the order of the tool's schema; optional ones may be left out.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from molink.text.closed_schemas import forbid_extra_keys
from molink.text.tool_calls.formats import ToolCallFormat
from molink.text.tool_calls.tagged import is_text

ANY_TEXT_RULE = r"/(.|\n)*/"
#: JSON as models write it; with flexible white space some models never stop.
_JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: Keywords under which a schema keeps its definitions.
_DEFINITIONS = ("$defs", "definitions")

#: Quotes a marker or a text for a rule.
Quote = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class CallLayout:
    """The layout of a call; ``{}`` stands for a name.

    Parts are single tags or text. ``open`` and ``close`` enclose each call or, with ``is_shared``,
    all calls. After a value come the text ``frame``, ``value_end`` and ``gap``.
    """

    open: tuple[str, ...]
    begin: tuple[str, ...]
    key: tuple[str, ...]
    frame: str
    value_end: str
    gap: str
    end: tuple[str, ...]
    close: tuple[str, ...]
    is_shared: bool = False


_QWEN3_CODER = CallLayout(
    ("<tool_call>", "\n"),
    ("<function={}>\n",),
    ("<parameter={}>\n",),
    "\n",
    "</parameter>",
    "\n",
    ("</function>\n",),
    ("</tool_call>",),
)
TAG_LAYOUTS: dict[ToolCallFormat, CallLayout] = {
    "qwen3_coder": _QWEN3_CODER,
    "seed_oss": replace(
        _QWEN3_CODER,
        open=("<seed:tool_call>", "\n"),
        key=("<parameter={}>",),
        frame="",
        close=("</seed:tool_call>",),
    ),
    "glm": CallLayout(
        ("<tool_call>",),
        ("{}\n",),
        ("<arg_key>", "{}", "</arg_key>", "\n", "<arg_value>"),
        "",
        "</arg_value>",
        "\n",
        (),
        ("</tool_call>",),
    ),
    "minimax_m2": CallLayout(
        ("<minimax:tool_call>", "\n"),
        ('<invoke name="{}">\n',),
        ('<parameter name="{}">',),
        "",
        "</parameter>",
        "\n",
        ("</invoke>\n",),
        ("</minimax:tool_call>",),
        is_shared=True,
    ),
}


def json_rule(schema: Mapping[str, Any]) -> str:
    """Build the rule of JSON by ``schema``, without keys that it does not name.

    Raises:
        RequestError: the schema is nested too deeply, or combines too many.
    """
    return f"%json {json.dumps({**forbid_extra_keys(schema), 'x-guidance': _JSON_LAYOUT})}"


def answer_rule(layout: CallLayout, quote: Quote, *, parallel: bool) -> str:
    """Build the rule of one or several calls."""
    if not layout.is_shared:
        return 'call ("\\n" call)*' if parallel else "call"
    calls = "call call*" if parallel else "call"
    return f"{_sequence(layout.open, quote)} {calls} {_sequence(layout.close, quote)}"


def call_rules(
    layout: CallLayout,
    quote: Quote,
    ids: Mapping[str, int],
    call: str,
    name: str,
    schema: Mapping[str, Any],
) -> Iterator[str]:
    """Build the rule ``call`` of a tool, and the rules that it needs."""
    parts = [] if layout.is_shared else [*layout.open]
    rules = [_sequence((*parts, *layout.begin), quote, name)]
    properties, required = schema.get("properties", {}), schema.get("required", ())
    for number, (key, inner) in enumerate(properties.items()):
        rule = f"{call}_{number}"
        rules.append(rule if key in required else f"{rule}?")
        value, *more = _value_rules(layout, quote, ids, f"{rule}_value", schema, inner)
        begin = _sequence(layout.key, quote, key)
        yield f"{rule}: {begin} {value} {_sequence((layout.gap,), quote)}"
        yield from more
    rules.append(_sequence(layout.end if layout.is_shared else (*layout.end, *layout.close), quote))
    yield f"{call}: {' '.join(filter(None, rules))}"


def _value_rules(
    layout: CallLayout,
    quote: Quote,
    ids: Mapping[str, int],
    name: str,
    schema: Mapping[str, Any],
    inner: Any,
) -> Iterator[str]:
    """Build the expression of a value and its end, and the rules that it needs."""
    closing = _sequence((layout.frame, layout.value_end), quote)
    if is_text(inner):
        choices = inner.get("enum")
        if choices:
            yield f"({' | '.join(json.dumps(str(one)) for one in choices)}) {closing}"
        elif layout.value_end in ids:
            yield f"{ANY_TEXT_RULE} {closing}"
        else:
            yield name
            suffix = json.dumps(layout.frame + layout.value_end)
            yield f"{name}[suffix={suffix}]: {ANY_TEXT_RULE}"
        return
    yield f"{name} {closing}"
    shape = inner if isinstance(inner, dict) else {}
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    yield f"{name}: {json_rule({**definitions, **shape})}"


def _sequence(parts: tuple[str, ...], quote: Quote, name: str = "") -> str:
    return " ".join(quote(part.replace("{}", name)) for part in parts if part)
