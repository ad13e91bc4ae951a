"""Parsers can read every call that the grammars allow."""

import json
from pathlib import Path
from typing import Any

import llguidance
import pytest

from molink.errors import RequestError
from molink.text.grammar import build_grammar, compile_grammar
from molink.text.grammar_matcher import load_grammar_tokenizer
from molink.text.tokenizer import Tokenizer
from molink.text.tool_calls.create import AnswerFormat, create_answer_parser
from molink.text.tool_calls.grammar import build_call_grammar
from tests.support.fake_backend import build_model
from tests.text.tool_calls.answers import THINK, called, read

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"name": {"type": "string", "maxLength": 9}},
    },
    "now": None,
}
SPECIAL = (
    *("[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>"),
    *("<|end|>", "<|call|>", "</think>"),
)
IDS = {text: 257 + number for number, text in enumerate(SPECIAL)}
CHANNEL = "<|channel|>commentary to=functions."
WEATHER, PARIS = '"name": "get_weather"', '{"city": "Pa}is"}'
#: Format, special tokens, and an answer.
ANSWERS: list[tuple[str, tuple[str, ...], str]] = [
    ("hermes", (), f'<tool_call>\n{{{WEATHER}, "arguments": {PARIS}}}\n</tool_call>'),
    ("hermes", (), '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    ("llama", (), f'{{{WEATHER}, "parameters": {PARIS}}}'),
    ("mistral", SPECIAL[:1], f'[TOOL_CALLS][{{{WEATHER}, "arguments": {PARIS}}}]'),
    ("mistral", SPECIAL[:2], f"[TOOL_CALLS]get_weather[ARGS]{PARIS}"),
    (
        "deepseek",
        (),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "kimi_k2",
        (),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{PARIS}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    ("granite", (), f'<|tool_call|>[{{{WEATHER}, "arguments": {PARIS}}}]'),
    ("phi4_mini", (), f'<|tool_call|>[{{{WEATHER}, "arguments": {PARIS}}}]'),
    ("harmony", SPECIAL, f"{CHANNEL}get_weather <|constrain|>json<|message|>{PARIS}"),
    (
        "harmony",
        SPECIAL,
        "<|channel|>analysis<|message|>Hm. <b>\n<|end|><|start|>assistant"
        f"{CHANNEL}now <|constrain|>json<|message|>{{}}",
    ),
]


class Vocabulary:
    """A token for each byte, one end token, and the special tokens."""

    eos_token_id, bos_token_id = 256, None

    def __init__(self) -> None:
        self.special_token_ids = list(range(256, 257 + len(SPECIAL)))
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += [b"", *(text.encode() for text in SPECIAL)]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def encoded(text: str, special: tuple[str, ...]) -> list[int]:
    ids: list[int] = []
    while text:
        mark = next((mark for mark in special if text.startswith(mark)), None)
        ids += [IDS[mark]] if mark else text[0].encode()
        text = text[len(mark or text[0]) :]
    return ids


def allows(grammar: str, answer: str, special: tuple[str, ...] = ()) -> bool:
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary()))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = encoded(answer, special)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar_for(
    calls: Any, special: tuple[str, ...] = (), *, thinks: bool = False, **options: Any
) -> str:
    ids = {text: IDS[text] for text in special}
    return build_call_grammar(AnswerFormat(calls, THINK if thinks else None), TOOLS, ids, **options)


@pytest.mark.parametrize(("calls", "special", "answer"), ANSWERS)
def test_calls_are_let_through_and_read(calls: Any, special: tuple[str, ...], answer: str) -> None:
    grammar = grammar_for(calls, special)
    assert allows(grammar, answer, special)
    parser = create_answer_parser(AnswerFormat(calls), TOOLS)
    assert parser is not None
    name, arguments = called(read(parser, [answer]))[0]
    assert arguments == ({"city": "Pa}is"} if name == "get_weather" else {})
    for before, after in (
        ("get_weather", "launch"),
        ('"Pa}is"', "5"),
        ('"city"', '"town"'),
        ("Pa}is", "0123456789"),
    ):
        if before in answer:
            assert not allows(grammar, answer.replace(before, after), special)
    assert not allows(grammar, "Hello", special)
    assert not allows(grammar, "", special)


@pytest.mark.parametrize(
    ("calls", "special", "answer"),
    [
        ("hermes", (), ANSWERS[0][2] + "\n" + ANSWERS[1][2]),
        ("mistral", SPECIAL[:1], ANSWERS[3][2][:-1] + ', {"name": "now", "arguments": {}}]'),
        ("mistral", SPECIAL[:2], ANSWERS[4][2] + "[TOOL_CALLS]now[ARGS]{}"),
    ],
)
def test_several_calls(calls: Any, special: tuple[str, ...], answer: str) -> None:
    assert allows(grammar_for(calls, special, parallel=True), answer, special)
    assert not allows(grammar_for(calls, special), answer, special)


@pytest.mark.parametrize("special", [(), ("</think>",)])
def test_reasoning_may_come_first(special: tuple[str, ...]) -> None:
    call = ANSWERS[2][2]
    grammar = grammar_for("llama", special, thinks=True)
    assert allows(grammar, call, special)
    assert allows(grammar, f"<think>\nHm < {{}}\n</think>\n\n{call}", special)
    assert not allows(grammar, f"Hm.</think>{call}", special)
    opened = grammar_for("llama", special, thinks=True, tail="<think>\n")
    assert allows(opened, f"Hm.</think>{call}", special)
    assert not allows(opened, call, special)


def test_a_tag_that_begins_with_a_token() -> None:
    form = AnswerFormat("llama", ("<|channel>thought", "<channel|>"))
    grammar = build_call_grammar(form, TOOLS, {"<|channel>": 7, "<channel|>": 8})
    assert '<[7]> "thought"' in grammar
    assert "<[8]>" in grammar


@pytest.mark.parametrize("calls", ["mistral", "harmony"])
def test_special_tokens_of_a_tokenizer(calls: Any, tmp_path: Path) -> None:
    """Marks are single tokens, not spelled out; after them the answer may end."""
    folder = build_model(tmp_path / "m", "", SPECIAL, "<|call|>")
    tokenizer = Tokenizer.open(folder)
    form = AnswerFormat(calls)
    ids = tokenizer.find_special_ids(form.special_markers(tools=True))
    grammar = build_grammar("grammar", build_call_grammar(form, TOOLS, ids))
    matcher = compile_grammar(load_grammar_tokenizer(folder, tokenizer.vocab_size), grammar)
    answer = next(answer for each, _, answer in reversed(ANSWERS) if each == calls)
    tokens = tokenizer.encode(answer, special=False)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    assert mask == 1 << tokenizer.eos_ids[0]


TAGGED_TOOLS: dict[str, Any] = {
    "order": {
        "type": "object",
        "properties": {
            "note": {"type": "string"},
            "count": {"type": "integer"},
            "size": {"enum": ["small", "large"]},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["note", "count"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
    "now": None,
}
ORDER = {"note": "two\nlines </b>", "count": 5, "size": "large", "place": {"x": 1.5}}


def tagged_answer(calls: str, values: dict[str, Any]) -> str:
    """A call of ``order`` in the format's own notation."""
    texts = [
        (key, value if isinstance(value, str) else json.dumps(value))
        for key, value in values.items()
    ]
    if calls == "glm":
        keys = (f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts)
        return f"<tool_call>order\n{''.join(keys)}</tool_call>"
    if calls == "minimax_m2":
        keys = (f'<parameter name="{key}">{text}</parameter>\n' for key, text in texts)
        inner = f'<invoke name="order">\n{"".join(keys)}</invoke>\n'
        return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"
    tag, frame = ("seed:tool_call", "") if calls == "seed_oss" else ("tool_call", "\n")
    keys = (f"<parameter={key}>{frame}{text}{frame}</parameter>\n" for key, text in texts)
    return f"<{tag}>\n<function=order>\n{''.join(keys)}</function>\n</{tag}>"


@pytest.mark.parametrize("calls", ["qwen3_coder", "seed_oss", "glm", "minimax_m2"])
def test_tagged_calls_are_let_through_and_read(calls: Any) -> None:
    grammar = build_call_grammar(AnswerFormat(calls), TAGGED_TOOLS, {})
    short = {key: ORDER[key] for key in ("note", "count")}
    for values in (ORDER, short):
        answer = tagged_answer(calls, values)
        assert allows(grammar, answer)
        parser = create_answer_parser(AnswerFormat(calls), TAGGED_TOOLS)
        assert parser is not None
        assert called(read(parser, [answer])) == [("order", values)]
    for wrong in ({"note": "x"}, short | {"count": "x"}, short | {"size": "huge"}, {}):
        assert not allows(grammar, tagged_answer(calls, wrong))
    assert not allows(grammar, "Hello")
    both = build_call_grammar(AnswerFormat(calls), TAGGED_TOOLS, {}, parallel=True)
    one = tagged_answer(calls, short)
    if calls == "minimax_m2":
        inner = one.removeprefix("<minimax:tool_call>\n").removesuffix("</minimax:tool_call>")
        twice = f"<minimax:tool_call>\n{inner}{inner}</minimax:tool_call>"
    else:
        twice = f"{one}\n{one}"
    assert allows(both, twice)
    assert not allows(grammar, twice)


def test_tags_that_are_tokens_of_their_own(tmp_path: Path) -> None:
    special = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>")
    special = (*special, "</arg_value>", "<|call|>")
    folder = build_model(tmp_path / "m", "", special, "<|call|>")
    tokenizer = Tokenizer.open(folder)
    form = AnswerFormat("glm")
    ids = tokenizer.find_special_ids(form.special_markers(tools=True))
    assert "</arg_value>" in ids
    grammar = build_grammar("grammar", build_call_grammar(form, TAGGED_TOOLS, ids))
    matcher = compile_grammar(load_grammar_tokenizer(folder, tokenizer.vocab_size), grammar)
    tokens = tokenizer.encode(tagged_answer("glm", ORDER), special=False)
    assert matcher.try_consume_tokens(tokens) == len(tokens)


def test_a_model_that_writes_no_calls() -> None:
    with pytest.raises(RequestError, match="is unknown"):
        grammar_for(None)


@pytest.mark.parametrize("calls", ["pythonic"])
def test_calls_that_can_not_be_forced(calls: Any) -> None:
    with pytest.raises(RequestError, match=rf"\({calls}\) can't be forced; use `auto`"):
        grammar_for(calls)


def test_schemas_are_theirs() -> None:
    grammar = grammar_for("llama")
    assert json.dumps(TOOLS["get_weather"])[1:-1] in grammar
