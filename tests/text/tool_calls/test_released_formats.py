"""Formats of Qwen3-Coder, Seed-OSS, GLM, MiniMax, DeepSeek, Kimi, Granite, Phi and Python."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.text.tool_calls import pythonic, tagged
from molink.text.tool_calls.create import create_answer_parser, detect_answer_format
from tests.text.tool_calls.answers import TOOLS, called, cut_text, parser_of, read, read_text

PARIS = {"city": "Paris, é", "days": [1, {"x": '}]\\" <'}]}
ARGS = json.dumps(PARIS, ensure_ascii=False)
LIST = f'{{"name": "get_weather", "arguments": {ARGS}}}, {{"name": "now", "arguments": {{}}}}'
BOTH = [("get_weather", PARIS), ("now", {})]
DAYS = '[1, {"x": "}]\\\\\\" <"}]'
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis, é\n</parameter>\n"
    f"<parameter=days>\n{DAYS}\n</parameter>\n</function>\n</tool_call>"
)
SEED = (
    "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris, é</parameter>\n"
    f"<parameter=days>{DAYS}</parameter>\n</function>\n</seed:tool_call>"
)
CODER_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris, é</arg_value>\n"
    f"<arg_key>days</arg_key>\n<arg_value>{DAYS}</arg_value>\n</tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris, é</parameter>'
    f'\n<parameter name="days">{DAYS}</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
    "</minimax:tool_call>"
)
CALLS, CALL, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENT, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

LFM, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"

#: Format, answer, content, calls.
GOOD: list[tuple[str, str, str, Any]] = [
    ("qwen3_coder", CODER, "", BOTH[:1]),
    ("qwen3_coder", f"Let me see.\n{CODER}\n{CODER_NOW}\n", "Let me see.", BOTH),
    ("qwen3_coder", CODER.removeprefix("<tool_call>\n") + CODER_NOW, "", BOTH),
    ("qwen3_coder", "<tool_call><tool_call>\n<function=now>\n</function>", "<tool_call>", BOTH[1:]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</tool_call> Done.", " Done.", BOTH[1:]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n", "", BOTH[1:]),
    (
        "qwen3_coder",
        "<function=get_weather><parameter=city>\n\n a </b> \n\n</parameter>"
        "<parameter=count>\n5\n</parameter><parameter=note>null</parameter>"
        "<parameter=other>True</parameter></function>",
        "",
        [("get_weather", {"city": "\n a </b> \n", "count": 5, "note": None, "other": True})],
    ),
    (
        "qwen3_coder",
        "<function=get_weather><parameter=city>5</parameter><parameter=count>many</parameter>"
        "<parameter=note>7</parameter></function>",
        "",
        [("get_weather", {"city": "5", "count": "many", "note": "7"})],
    ),
    ("seed_oss", f"Hm. {SEED}", "Hm.", BOTH[:1]),
    ("glm", GLM, "", BOTH[:1]),
    ("glm", f"{GLM}\n<tool_call>now</tool_call>", "", BOTH),
    ("glm", GLM.replace("\n", "") + "<tool_call>now\n</tool_call>", "", BOTH),
    ("glm", "I look.<tool_call>now\n</tool_call>\nBye.", "I look.\nBye.", BOTH[1:]),
    ("minimax_m2", MINIMAX, "", BOTH),
    ("minimax_m2", f"I look.\n{MINIMAX}\n", "I look.", BOTH),
    (
        "deepseek",
        f"{CALLS}{CALL}function{SEP}get_weather\n```json\n{ARGS}\n```{CALL_END}\n"
        f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        "",
        BOTH,
    ),
    (
        "deepseek",
        f"I look.\n\n{CALLS}{CALL}get_weather{SEP}{ARGS}{CALL_END}{CALL}now{SEP}{{}}{CALL_END}"
        f"{CALLS_END}",
        "I look.",
        BOTH,
    ),
    ("deepseek", f"{CALL}now{SEP}{{}}", "", BOTH[1:]),
    (
        "kimi_k2",
        f"{SECTION}{BEGIN}functions.get_weather:0{ARGUMENT}{ARGS}{END}"
        f"{BEGIN}functions.now:1{ARGUMENT}{{}}{END}{SECTION_END}",
        "",
        BOTH,
    ),
    (
        "kimi_k2",
        f"Hm. {SECTION}\n {BEGIN} now:1 {ARGUMENT} {{}} {END} {SECTION_END}",
        "Hm.",
        BOTH[1:],
    ),
    ("granite", f"<|tool_call|>[{LIST}]", "", BOTH),
    ("granite", f"<|tool_call|> [ {LIST}]\nDone.", "\nDone.", BOTH),
    ("phi4_mini", f"functools[{LIST}]", "", BOTH),
    ("phi4_mini", f"<|tool_call|>[{LIST}]<|/tool_call|>", "", BOTH),
    ("pythonic", "[get_weather(city='Paris, é', days=[1, {'x': '}]\\\\\" <'}]), now()]", "", BOTH),
    (
        "pythonic",
        ' \n<|python_tag|> [now(x=-1.5, y=("a", None), z=True)]\n',
        "",
        [
            ("now", {"x": -1.5, "y": ["a", None], "z": True}),
        ],
    ),
    ("pythonic", "[now()] Done.", " Done.", BOTH[1:]),
    (
        "lfm2",
        f"I look.{LFM}[get_weather(city='Paris, é', days=[1, {{'x': '}}]\\\\\" <'}}]), now()]"
        f"{LFM_END}",
        "I look.",
        BOTH,
    ),
    (
        "lfm2",
        f'{LFM}[now(x={{"a": true, "b": null}})]',
        "",
        [("now", {"x": {"a": True, "b": None}})],
    ),
    ("lfm2", f"{LFM} [now()] {LFM_END}{LFM}[now()]{LFM_END}", "", [*BOTH[1:], *BOTH[1:]]),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Paris, é<|"|>,days:[1,{x:<|"|>}]\\" <<|"|>}]}'
        "<tool_call|><|tool_call>call:now{}<tool_call|>",
        "",
        BOTH,
    ),
    (
        "gemma4",
        'Hm.<|tool_call>call:now{ a : -1.5, <|"|>b c<|"|> : [true, None] }<tool_call|>',
        "Hm.",
        [("now", {"a": -1.5, "b c": [True, None]})],
    ),
    ("gemma4", "<|tool_call>call:now{}", "", BOTH[1:]),
]

#: Answers that are text only.
NO_CALLS = [
    ("qwen3_coder", "Use <tool_call> and </tool_call> for it, a < b."),
    ("qwen3_coder", "<tool_call>\n<function=launch>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<function=launch> <function=start></function>"),
    ("qwen3_coder", '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
    ("qwen3_coder", "<tool_call><tool_call><tool_"),
    ("qwen3_coder", "<tool_call>\n<function=no"),
    ("qwen3_coder", "<function=" + "x" * 2000 + ">"),
    ("glm", "<tool_call>launch\n</tool_call>"),
    ("glm", "<tool_call>now then</tool_call>"),
    ("glm", '<tool_call>{"name": "now"}</tool_call>'),
    ("glm", "<tool_call>now"),
    ("glm", "<tool_call><tool_call>"),
    ("minimax_m2", '<minimax:tool_call><invoke name="launch"></invoke></minimax:tool_call>'),
    ("minimax_m2", "<minimax:tool_call>now</minimax:tool_call>"),
    ("deepseek", f"{CALLS}{CALL}launch{SEP}{{}}{CALL_END}{CALLS_END}"),
    ("deepseek", f"{CALLS}  now {CALLS}"),
    ("deepseek", f"{CALLS}{' ' * 1000}{CALL}now"),
    ("deepseek", f"{CALL}{'now' * 1000}{{}}"),
    ("deepseek", f"{CALLS}{CALL}now{SEP}none"),
    ("deepseek", "<｜tool▁"),
    ("kimi_k2", f"{SECTION}{BEGIN}functions.launch:0{ARGUMENT}{{}}{END}{SECTION_END}"),
    ("kimi_k2", f"{SECTION}{BEGIN}now{{}}"),
    ("granite", "<|tool_call|> is a mark"),
    ("granite", "<|tool_call|>[]"),
    ("granite", f"<|tool_call|>{' ' * 100}[{LIST}]"),
    ("granite", "<|/tool_call|>"),
    ("granite", f"functools[{LIST}]"),
    ("phi4_mini", "functools are modules, functools[0] is none"),
    ("phi4_mini", 'functools[{"name": "launch", "arguments": {}}]'),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[now(1)]"),
    ("pythonic", "[now(x=open('f'))]"),
    ("pythonic", "[launch()]"),
    ("pythonic", "[now(**{})]"),
    ("pythonic", "[now(x=1e999)]"),
    ("pythonic", "[now(x='\\ud800')]"),
    ("pythonic", "[now(x={1, 2})]"),
    ("pythonic", "[now(), 5]"),
    ("pythonic", "[]"),
    ("pythonic", "[now(]"),
    ("pythonic", "[now(x='a"),
    ("pythonic", "[" * 1000),
    ("pythonic", "[now(x=" + "-" * 50_000 + "1)]"),
    ("pythonic", "So: [now()]"),
    ("pythonic", "<|python_tag|>print(1)"),
    ("pythonic", " " * 3000),
    ("lfm2", f"{LFM}[launch()]{LFM_END} and more"),
    ("lfm2", f"{LFM}now"),
    ("lfm2", f"{LFM}[now(x=yes)]{LFM_END}"),
    ("lfm2", f"{LFM}{'x' * 70_000}{LFM_END}"),
    ("lfm2", "<|tool_call"),
    ("gemma4", "<|tool_call>call:launch{}<tool_call|>"),
    ("gemma4", "<|tool_call>now{}<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{a}<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{a:1 b:2}<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{a:b}<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{a:}<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{a:1e999}<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{a:[1}<tool_call|>"),
    ("gemma4", "<|tool_call>call:now{} then<tool_call|>"),
    ("gemma4", '<|tool_call>call:now{a:<|"|>b<tool_call|>'),
    ("gemma4", f"<|tool_call>call:now{{a:{'[' * 500}{']' * 500}}}<tool_call|>"),
]
FORMS = sorted({form for form, *_ in GOOD})


@pytest.mark.parametrize(("form", "answer", "text", "calls"), GOOD)
def test_calls(form: str, answer: str, text: str, calls: Any) -> None:
    found = read_text(form, answer)
    assert called(found) == calls
    assert found.text == text


@pytest.mark.parametrize(("form", "answer"), NO_CALLS)
def test_malformed_calls_are_text(form: str, answer: str) -> None:
    found = read_text(form, answer)
    assert found.text == answer
    assert not found.calls


@pytest.mark.parametrize(
    ("form", "answer", "arguments"),
    [
        (
            "qwen3_coder",
            "<function=get_weather>\n<parameter=city>\nPar\nis\n",
            '{"city": "Par\\nis',
        ),
        ("glm", "<tool_call>get_weather\n<arg_key>city</arg_key><arg_value>P", '{"city": "P'),
        ("minimax_m2", '<invoke name="get_weather"><parameter name="city">P', '{"city": "P'),
        ("deepseek", f'{CALL}get_weather{SEP}{{"city": "P', '{"city": "P'),
        ("kimi_k2", f'{BEGIN}functions.get_weather:0{ARGUMENT}{{"city": "P', '{"city": "P'),
        (
            "granite",
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "P',
            '{"city": "P',
        ),
    ],
)
def test_texts_stream_before_they_are_complete(form: str, answer: str, arguments: str) -> None:
    parser = parser_of(form)
    parts = parser.parse_delta(answer)
    assert "".join(getattr(part, "text", "") for part in parts) == arguments
    assert not read(parser_of(form), [answer]).ended


def test_a_broken_call_ends_and_the_rest_is_text() -> None:
    answer = "<function=get_weather><parameter=city>P</parameter> and more</function>"
    found = read_text("qwen3_coder", answer)
    assert called(found) == [("get_weather", {"city": "P"})]
    assert found.text == "and more</function>"
    found = read_text("deepseek", f"{CALL}now{SEP}{{}} and {CALL_END}more{CALLS_END}")
    assert called(found) == BOTH[1:]
    assert found.text == " and more"


def test_no_more_is_held_back_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pythonic, tagged):
        monkeypatch.setattr(module, "MAX_HELD_CHARACTERS", 1000)
    answer = f'[now(x="{"y" * 2000}")]'
    assert read_text("pythonic", answer).text == answer
    long = "1" * 2000
    answer = f"<function=get_weather><parameter=count>{long}</parameter></function>"
    assert called(read_text("qwen3_coder", answer)) == [("get_weather", {"count": long})]


def test_thoughts_come_before_calls() -> None:
    for form, answer in (
        ("glm", GLM),
        ("minimax_m2", MINIMAX),
        ("deepseek", f"{CALL}now{SEP}{{}}"),
        ("lfm2", f"{LFM}[now()]{LFM_END}"),
    ):
        found = read_text(form, f"Hm.</think>\n\n{answer}", "<think>", thinks=True)
        assert found.thought == "Hm."
        assert found.text == ""
        assert called(found)


def test_gemma_4_thinks_in_a_channel() -> None:
    form = detect_answer_format(TEMPLATES["gemma4"] + "<|channel>thought\\n<channel|>", ())
    assert form.reasoning_tags == ("<|channel>thought", "<channel|>")
    assert {"<|channel>", "<channel|>", "<|tool_call>"} < form.special_markers(tools=True)
    parser = create_answer_parser(form, TOOLS)
    assert parser is not None
    answer = "<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:now{}<tool_call|>"
    found = read(parser, cut_text(answer, range(1, len(answer))))
    assert (found.thought, found.text, called(found)) == ("Hm.", "I look.", BOTH[1:])


TEMPLATES = {
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + call.name }}<parameter=' + key arguments",
    "seed_oss": "{{ '<seed:tool_call>\\n<function=' + call.name }}<parameter=",
    "glm": "{{ '\\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ arguments",
    "minimax_m2": "{%- set begin = '<minimax:tool_call>' -%}<invoke name=\"' + call.name",
    "deepseek": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>",
    "granite": "<|start_of_role|>respond with <|tool_call|> followed by a JSON list of tools",
    "phi4_mini": "<|system|>{{ '<|tool|>' + message.tools + '<|/tool|>' }}",
    "pythonic": "ipython [func_name1(params_name1=params_value1, ...)]",
    "lfm2": "{{- '<|im_start|>system\\nList of tools: <|tool_list_start|>[' + tools }}",
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}} {{- '}<tool_call|>' -}}",
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_formats_are_chosen_by_the_template(form: str) -> None:
    found = detect_answer_format(TEMPLATES[form], ())
    assert found.tool_calls == form
    assert found.special_markers(tools=True)
    assert set(TEMPLATES) == set(FORMS)


PIECES = (
    *("<tool_call>", "</tool_call>", "<function=now>", "<function=get_weather>", "</function>"),
    *("<parameter=city>", "<parameter=count>", "</parameter>", "now", "get_weather", "launch"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "city", "count"),
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="now">', "</invoke>"),
    *('<parameter name="note">', CALLS, CALL, SEP, CALL_END, CALLS_END, "function", "```json\n"),
    *("\n```", SECTION, BEGIN, "functions.now:0", ARGUMENT, END, SECTION_END, "<|tool_call|>"),
    *("functools[", "<|/tool_call|>", '{"name": "now", "arguments": {}}', "[", "]", ", ", "{}"),
    *("[now()]", "now(x=", "'", '"', "(", ")", "\\", "<", "</", "\n", " ", "5", "null", "é🦊"),
    *("<think>", "</think>", '{"a": "b"}', "<|python_tag|>"),
)


@given(
    st.sampled_from(FORMS),
    st.booleans(),
    st.lists(st.sampled_from(PIECES), max_size=30).map("".join),
    st.lists(st.integers(0, 300), max_size=12),
)
def test_cuts_change_nothing(form: str, thinks: bool, answer: str, cuts: list[int]) -> None:
    whole = read_text(form, answer, thinks=thinks)
    assert read(parser_of(form, thinks=thinks), cut_text(answer, cuts)) == whole
    for index in whole.ended:
        _, arguments = whole.calls[index]
        if form in ("qwen3_coder", "glm", "minimax_m2", "pythonic"):
            assert isinstance(json.loads(arguments), dict)
    if not whole.calls and not thinks:
        assert whole.text == answer


@given(
    st.sampled_from(["qwen3_coder", "seed_oss", "glm", "minimax_m2"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_a_text_arrives_as_it_was_written(form: str, city: str, cuts: list[int]) -> None:
    before, after = {
        "qwen3_coder": ("<function=get_weather>\n<parameter=city>\n", "\n</parameter></function>"),
        "seed_oss": ("<function=get_weather>\n<parameter=city>", "</parameter></function>"),
        "glm": (
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>",
            "</arg_value></tool_call>",
        ),
        "minimax_m2": (
            '<invoke name="get_weather"><parameter name="city">',
            "</parameter></invoke>",
        ),
    }[form]
    answer = before + city + after
    found = read(parser_of(form), cut_text(answer, cuts))
    assert called(found) == [("get_weather", {"city": city})]
