"""Tool calls and reasoning in answers as models write them, and text that only looks like them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.text.tool_calls import call_reader
from molink.text.tool_calls.base import MAX_HELD_SPACE
from tests.text.tool_calls.answers import called, cut_text, parser_of, read, read_text

PARIS = {"city": "Paris", "days": [1, {"x": '}]\\" </tool_call>'}]}
CALL = json.dumps({"name": "get_weather", "arguments": PARIS})
LLAMA = json.dumps({"name": "get_weather", "parameters": PARIS})
NOW = '{"name": "now", "arguments": {}}'
ARGS = json.dumps(PARIS)
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
BOTH = [("get_weather", PARIS), ("now", {})]

#: Format, answer, content, calls.
GOOD: list[tuple[str, str, str, Any]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", BOTH[:1]),
    (
        "hermes",
        f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{NOW}</tool_call>\n",
        "Let me see.",
        BOTH,
    ),
    ("hermes", f"<tool_call>{CALL}</tool_call>\nDone.", "\nDone.", BOTH[:1]),
    ("hermes", f"One.\n<tool_call>{CALL}</tool_call> \nTwo.", "One.\n \nTwo.", BOTH[:1]),
    ("hermes", f"<tool_call>{NOW[:-1]}</tool_call>", "", BOTH[1:]),
    ("hermes", f"<tool_call>{NOW}", "", BOTH[1:]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", BOTH[1:]),
    ("hermes", '<tool_call>{"arguments": null, "name": "now"}</tool_call>', "", BOTH[1:]),
    ("hermes", '<tool_call>{"id": [1], "arguments": {}, "name": "now"}</tool_call>', "", BOTH[1:]),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("now", {"a": 1})],
    ),
    ("llama", LLAMA, "", BOTH[:1]),
    ("llama", f"\n {LLAMA}; {NOW}", "", BOTH),
    ("llama", f"{LLAMA}\n{NOW}\n", "", BOTH),
    ("llama", f"<|python_tag|>{LLAMA}", "", BOTH[:1]),
    ("llama", f"I'll look.<|python_tag|> {LLAMA};{NOW}", "I'll look.", BOTH),
    ("llama", '{"type": "function", "name": "now", "parameters": {}}', "", BOTH[1:]),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {NOW}]", "", BOTH),
    ("mistral", f'[TOOL_CALLS][{CALL[:-1]}, "id": "123456789"}}]', "", BOTH[:1]),
    ("mistral", f"Well. [TOOL_CALLS]{CALL}", "Well.", BOTH[:1]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGS}[TOOL_CALLS]now[ARGS]{{}}", "", BOTH),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abc123xyz[ARGS]{ARGS}", "", BOTH[:1]),
    ("mistral", f"[TOOL_CALLS]get_weather{ARGS}", "", BOTH[:1]),
    (
        "harmony",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGS}",
        "",
        BOTH[:1],
    ),
    (
        "harmony",
        f"{ANALYSIS}Hm.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary "
        f"json<|message|>{ARGS}<|call|>",
        "",
        BOTH[:1],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
        " to=functions.now<|message|> <|call|>",
        "I look.",
        BOTH[1:],
    ),
]

#: Answers that are text only.
NO_CALLS = [
    ("hermes", "Use <tool_call> and </tool_call> for it, a < b."),
    ("hermes", '<tool_call>\n{"name": "launch", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "x"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call> '),
    ("hermes", '<tool_call>{name: "now"}</tool_call>'),
    ("hermes", '<tool_call>{"x": 5"y", "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"x": 5:6, "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "no'),
    ("hermes", "<tool_call><tool_call"),
    ("hermes", "fine \n\n"),
    ("llama", '{"name": "Bob", "age": 4}'),
    ("llama", '{"age": 4}'),
    ("llama", "{}"),
    ("llama", '{"name": "no'),
    ("llama", "{ braces }"),
    ("llama", f"Like this: {LLAMA}"),
    ("llama", '<|python_tag|>print("now")'),
    ("llama", "<|python_t"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS] are marks"),
    ("mistral", "[TOOL_CALLS]launch[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]" + "now " * 100 + "{}"),
    ("mistral", '[TOOL_CALLS][{"name": "launch", "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS]now[ARGS]"),
    ("mistral", '[TOOL_CALLS][{"na'),
    ("mistral", "a [TOOL"),
    ("harmony", "Plain text < all of it."),
    ("harmony", "x" * 1000),
    ("harmony", "<|channel|>commentary to=functions.launch <|constrain|>json<|message|>{}"),
    ("harmony", "<|channel|>commentary to=browser<|message|>{}"),
    ("harmony", "<|channel|>secret<|message|>x"),
    ("harmony", "<|channel|>fin"),
    ("harmony", "<|channel|>" + "y" * 1000),
]


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


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral"])
def test_the_name_comes_before_the_arguments_are_there(form: str) -> None:
    opening = {"hermes": "<tool_call>", "llama": "", "mistral": "[TOOL_CALLS]["}[form]
    parser = parser_of(form)
    found = read(parser, [opening + '{"name": "get_weather", "arguments": {"city": "Par'])
    assert found.calls == [("get_weather", '{"city": "Par')]
    assert not found.ended


def test_an_invalid_second_call_is_text() -> None:
    bad = '{"name": "launch", "arguments": {}}'
    for form, answer, text in (
        ("hermes", f"<tool_call>{NOW}</tool_call><tool_call>{bad}", f"<tool_call>{bad}"),
        ("llama", f"{NOW}; {bad}", f"; {bad}"),
        ("llama", f"{NOW} and {bad}", f" and {bad}"),
        ("mistral", f"[TOOL_CALLS][{NOW}, {bad}]", f", {bad}]"),
    ):
        found = read_text(form, answer)
        assert called(found) == BOTH[1:]
        assert found.text == text


def test_no_more_is_held_back_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_reader, "MAX_HELD_CHARACTERS", 1000)
    for form, opening in (("hermes", "<tool_call>"), ("llama", ""), ("mistral", "[TOOL_CALLS]")):
        answer = opening + '{"x": "' + "y" * 1000 + '", "name": "now"}'
        assert read_text(form, answer).text == answer
    found = read_text("hermes", "a" + " " * 3 * MAX_HELD_SPACE + f"<tool_call>{NOW}</tool_call>")
    assert len(found.text) == 1 + 2 * MAX_HELD_SPACE


THOUGHTS = [
    ("<think>\nHm.\n</think>\n\nYes.", "", "Hm.", "Yes."),
    ("\n<think>Hm. </think>Yes.", "", "Hm.", "Yes."),
    ("Hm.\n</think>\nYes.", "<|im_start|>assistant\n<think>\n", "Hm.", "Yes."),
    ("<think>Hm.</think>Yes.", "assistant\n<think>\n", "Hm.", "Yes."),
    ("<think>\n\n</think>\n\nYes.", "", "", "Yes."),
    ("Yes.", "<think>\n\n</think>\n\n", "", "Yes."),
    ("Yes, <think>no</think>", "", "", "Yes, <think>no</think>"),
    (" <thin", "", "", " <thin"),
    ("Hm. a < b </thi", "<think>", "Hm. a < b </thi", ""),
    ("\n", "", "", "\n"),
]


@pytest.mark.parametrize(("answer", "tail", "thought", "text"), THOUGHTS)
def test_reasoning_is_split_off(answer: str, tail: str, thought: str, text: str) -> None:
    found = read_text(None, answer, tail, thinks=True)
    assert (found.thought, found.text) == (thought, text)


def test_calls_after_thoughts() -> None:
    answer = f"<think>I'd <tool_call>{NOW}</tool_call></think>\n<tool_call>{CALL}</tool_call>"
    found = read_text("hermes", answer, thinks=True)
    assert found.thought == f"I'd <tool_call>{NOW}</tool_call>"
    assert called(found) == BOTH[:1]
    assert read_text("llama", f"<think>x</think>\n{LLAMA}", thinks=True).text == ""


def test_channels() -> None:
    start = "<|start|>assistant"
    found = read_text("harmony", f"{ANALYSIS}One.<|end|>{start}{FINAL}Two.<|return|>", start)
    assert (found.thought, found.text) == ("One.", "Two.")
    found = read_text("harmony", "Two.", start + FINAL)
    assert (found.thought, found.text) == ("", "Two.")
    again = f"{ANALYSIS}a<|end|>\n{start}{ANALYSIS}b<|channel|>final<|message|>c"
    found = read_text("harmony", again)
    assert (found.thought, found.text) == ("a\n\nb", "c")
    lost = f"{FINAL}a<|end|> b <|message|> c"
    assert read_text("harmony", lost).text == "a\n\nb <|message|> c"


@pytest.mark.parametrize("thinks", [False, True])
def test_whether_it_thinks(thinks: bool) -> None:
    parser = parser_of("hermes", "<think>\n" if thinks else "", thinks=True)
    assert parser.is_reasoning == thinks
    parser.parse_delta("x")
    assert parser.is_reasoning == thinks
    parser.parse_delta("</think>")
    assert not parser.is_reasoning


PIECES = (
    *('{"name": "now", "arguments": {}}', '{"name": "get_weather", "parameters": {"a": "b"}}'),
    *('{"name": "', "now", "get_weather", '"', ', "arguments": ', "{", "}", "[", "]", ",", ":"),
    *("<tool_call>", "</tool_call>", "<|python_tag|>", ";", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<|start|>assistant", "<|channel|>", "analysis", "commentary", "final", "<|message|>"),
    *(" to=functions.now", "<|constrain|>json", "<|end|>", "<|call|>", "<think>", "</think>"),
    *(" ", "\n", "x", "\\", "é🦊", "1.5", "null", "<", "<|"),
)


@given(
    st.sampled_from(["hermes", "llama", "mistral", "harmony"]),
    st.booleans(),
    st.sampled_from(["", "<think>\n", "<|start|>assistant<|channel|>final<|message|>"]),
    st.lists(st.sampled_from(PIECES), max_size=30).map("".join),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_cuts_change_nothing(
    form: str, thinks: bool, tail: str, answer: str, cuts: list[int]
) -> None:
    whole = read_text(form, answer, tail, thinks=thinks)
    assert read(parser_of(form, tail, thinks=thinks), cut_text(answer, cuts)) == whole
    if not whole.calls and not whole.thought and form != "harmony" and not thinks:
        assert whole.text == answer
