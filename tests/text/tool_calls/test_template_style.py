"""Earlier calls in prompts, in the form that each family's template expects."""

import copy
import json
from typing import Any

import pytest

from molink.errors import RequestError
from molink.text.chat_template import ChatTemplate
from molink.text.tool_calls.create import detect_answer_format
from molink.text.tool_calls.template_style import ToolCallStyle, apply_call_style
from tests.support.tool_templates import ALL

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}


def call(ident: str, arguments: Any) -> dict[str, Any]:
    function = {"name": "now", "arguments": arguments}
    return {"id": ident, "type": "function", "function": function}


def answered(ident: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": ident, "content": f"result of {ident}"}


MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "When?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [call("call_1", '{"zone": "é\\n"}'), call("call_2", "")],
    },
    answered("call_2"),
    answered("call_1"),
    {"role": "assistant", "content": "Noon."},
]


@pytest.fixture(params=sorted(ALL))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_styles(name: str) -> None:
    expected = {
        "hermes": ToolCallStyle(),
        "thinking": ToolCallStyle(),
        "llama": ToolCallStyle(one_call_per_message=True),
        "mistral": ToolCallStyle(needs_short_ids=True),
        "harmony": ToolCallStyle(one_call_per_message=True, takes_reasoning=True),
        "texts": ToolCallStyle(arguments_as_objects=False, omits_content=True),
    }
    assert ChatTemplate(ALL[name], SPECIAL, "x").call_style == expected[name]


def test_a_conversation_with_calls_renders(name: str) -> None:
    template = ChatTemplate(ALL[name], SPECIAL, "x")
    before = copy.deepcopy(MESSAGES)
    fitted = apply_call_style(MESSAGES, template.call_style)
    assert before == MESSAGES
    text = template.render_prompt(fitted, {}, [TOOL])
    assert '{"zone": "é\\n"}' in text
    assert "{}" in text
    assert text.count("result of call_") == 2
    assert "The time." in text
    if name == "harmony":
        assert text.index("Hm.") < text.index("é") < text.index("result of call_1")
        assert text.index("result of call_1") < text.index("result of call_2")
    assert template.takes_tools


def test_unadapted_calls_are_refused_or_garbled(name: str) -> None:
    template = ChatTemplate(ALL[name], SPECIAL, "x")
    try:
        text = template.render_prompt(MESSAGES, {}, [TOOL])
    except RequestError:
        return
    assert '{"zone": "é\\n"}' not in text


def test_one_call_a_message() -> None:
    style = ToolCallStyle(one_call_per_message=True)
    messages = [*MESSAGES[:2], answered("other"), *MESSAGES[2:]]
    fitted = apply_call_style(messages, style)
    assert [message["role"] for message in fitted] == [
        *("user", "assistant", "tool", "assistant", "tool", "tool", "assistant")
    ]
    idents = [message.get("tool_call_id") for message in fitted]
    assert idents == [None, None, "call_1", None, "call_2", "other", None]
    assert "reasoning_content" in fitted[1]
    assert "reasoning_content" not in fitted[3]


def test_ids_stay_paired() -> None:
    style = ToolCallStyle(needs_short_ids=True)
    fitted = apply_call_style([*MESSAGES, answered("abcdef123")], style)
    first, second = (each["id"] for each in fitted[1]["tool_calls"])
    assert len({first, second}) == 2
    assert {len(first), len(second)} == {9}
    assert fitted[2]["tool_call_id"] == second
    assert fitted[-1]["tool_call_id"] == "abcdef123"


@pytest.mark.parametrize("arguments", ['{"a": tru', "[1]", "5", '"x"', "{" * 5000])
def test_arguments_that_are_no_object_stay_as_they_were(arguments: str) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [call("1", arguments)]}
    fitted = apply_call_style([message], ToolCallStyle())
    assert fitted[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_objects_become_texts() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [call("1", {"a": "é"})]}
    fitted = apply_call_style(
        [message], ToolCallStyle(arguments_as_objects=False, omits_content=True)
    )
    assert json.loads(fitted[0]["tool_calls"][0]["function"]["arguments"]) == {"a": "é"}
    assert fitted[0]["content"] == "x"


def test_formats_by_templates() -> None:
    found = {name: detect_answer_format(source, ()) for name, source in ALL.items()}
    assert {name: form.tool_calls for name, form in found.items()} == {
        "hermes": "hermes",
        "thinking": "hermes",
        "llama": "llama",
        "mistral": "mistral",
        "harmony": "harmony",
        "texts": "hermes",
    }
    assert {name for name, form in found.items() if form.reasoning_tags} == {"thinking"}


def test_formats_by_vocabulary_and_setting() -> None:
    assert detect_answer_format("", ("<think>", "</think>")).reasoning_tags == (
        "<think>",
        "</think>",
    )
    assert detect_answer_format("", ("[THINK]", "[/THINK]")).reasoning_tags == (
        "[THINK]",
        "[/THINK]",
    )
    assert detect_answer_format("", ("<think>",)).reasoning_tags is None
    assert detect_answer_format(ALL["llama"], (), "mistral").tool_calls == "mistral"
    assert (
        detect_answer_format(ALL["thinking"], (), "raw").special_markers(tools=True) == frozenset()
    )
    assert detect_answer_format("<tool_call><function= arguments", ()).tool_calls is None
