"""Chat templates give ``transformers``' prompts, and hostile ones do no harm."""

import json
from pathlib import Path
from typing import Any

import pytest

from molink.errors import BrokenModel, RequestError
from molink.text.chat_template import MAX_SOURCE_CHARACTERS, ChatTemplate, load_chat_templates

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'ipython' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if tools is none and add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' ~ date_string }}
{%- endif %}"""
QWEN3 = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if loop.index0 > ns.last_query_index %}{{ 'late ' }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>' }}{%- endif %}
{{ {'é': [1, 2.5, none, '<'] } | tojson }}{{ [1]|tojson(indent=2) }}"""
MACROS = """{% macro show(m, at=0) %}{{ at }}:{{ m.role|upper }}{% endmacro %}
{%- for m in messages if m.role != 'tool' %}{{ show(m, loop.index) }}
{%- if not loop.last %},{% else %}.{% endif %}{% endfor %}
{{- messages|map(attribute='role')|join('-') }}
{%- generation %}{{ "%s=%03d" % ('x', 7) }}{{ "{} {:>4}".format('a', 1) }}{% endgeneration %}
{%- for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k ~ v }}{% endfor %}
{{- messages|selectattr('role', 'equalto', 'user')|list|length }}
{%- set x %}{{ bos_token }}block{% endset %}{{ x.replace('b', 'd') }}
{{- dict(a=1).items()|list }}{{ range(3)|list }}"""

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "  What is 1 < 2? <think>no</think> "},
    {"role": "assistant", "content": "<think>hm</think>\nYes, é.\n"},
    {"role": "user", "content": "Thanks 🦊"},
]


@pytest.mark.parametrize("source", [CHATML, LLAMA, QWEN3, MACROS])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_equals_transformers(source: str, options: dict[str, Any]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=True, **special, **options
    )[0][0]
    assert ChatTemplate(source, special, "x").render_prompt(MESSAGES, options) == theirs


DOUBLING = "{% for i in range(99) %}{% set n.x = n.x ? n.x %}{% endfor %}"
A_MILLION = "{% set s = 'a' * 1000000 %}"
#: Lists, tuples, objects and namespaces of 2**27 elements that need next to no memory.
DEEP = (
    "{% set n = namespace(l=[1], m=[1], t=(1,), u=(1,), d={}, x=namespace(y=1)) %}"
    "{% for i in range(27) %}{% set n.l = [n.l, n.l] %}{% set n.m = [n.m, n.m] %}"
    "{% set n.t = (n.t, n.t) %}{% set n.u = (n.u, n.u) %}{% set n.d = {1: n.d, 2: n.d} %}"
    "{% set n.x = namespace(y=n.x, z=n.x) %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(100) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(x='aa') %}" + DOUBLING.replace("?", "~"),
        "{% set n = namespace(x='aa') %}" + DOUBLING.replace("?", "+"),
        "{% set n = namespace(x=[1]) %}" + DOUBLING.replace("?", "+"),
        "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60 + "{{ x }}",
        "{% macro f() %}{% for i in range(99999) %}"
        + "x" * 9999
        + "{% endfor %}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10**9 }}",
        "{{ 'a' * 99999 * 99999 }}",
        "{% set n = namespace(x=9) %}" + DOUBLING.replace("?", "*"),
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format('x', '1000000000') }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ strftime_now('%1000000000d') }}",
        A_MILLION + "{{ [s] * 100000 }}",
        A_MILLION + "{{ ([s] * 100000)|string|length }}",
        A_MILLION + "{{ ([s] * 100000)|join|length }}",
        A_MILLION + "{{ ''.join([s] * 100000)|length }}",
        A_MILLION + "{{ s.join([''] * 100000)|length }}",
        A_MILLION + "{{ ([s] * 100000)|tojson|length }}",
        A_MILLION + "{{ s.replace('a', s)|length }}",
        A_MILLION + "{{ s|replace('a', s)|length }}",
        A_MILLION + "{{ '%s' * 1000 % ([s] * 1000) }}",
        "{{ [1]|tojson(indent=1000000000) }}",
        "{{ 'a\nb'|indent(1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{{ 'a'.expandtabs(1000000000) }}",
        "{{ range(10**12)|list }}",
        "{{ '%1000000000d' is odd }}",
        "{{ '%1000000000d' is divisibleby(1) }}",
        "{{ ('%999d' * 1000000)|length }}{{ '%(a)999d' * 300000 % {'a': 1} }}",
        "{{ ('{0:999}' * 900000).format(1)|length }}",
        A_MILLION + "{{ s|replace(new=s, old='a')|length }}",
        A_MILLION + "{{ ('\n' * 9999)|indent(s)|length }}",
        "{{ ([1] * 99999)|tojson(separators=('x' * 99999, ':'))|length }}",
        A_MILLION + "{% set t = 'a' * 999999 ~ 'b' %}{{ t in [s] * 100000 }}",
        "{{ dict([(1, 1)] * 2000) }}",
        "{% for x in [1] recursive %}"
        + "x" * 9999
        + "{% if loop.depth == 1 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
        "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    ],
)
def test_a_template_without_end_or_measure_is_stopped(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, {}, "x", cpu_s=0.3).render_prompt(MESSAGES)
    assert caught.value.param == "messages"


def render_deep(source: str) -> str:
    return ChatTemplate(DEEP + source, {}, "x", produced=2**19).render_prompt(MESSAGES)


@pytest.mark.parametrize(
    "expression",
    [
        "n.l == n.m",
        "n.l != n.m",
        "n.t < n.u",
        "n.d == {1: n.d, 2: n.d}",
        "n.l in [n.m]",
        "n.m not in [n.l]",
        "n.l in [n.m]|map('list')",
        "n.l is eq(n.m)",
        "n.l is in([n.m])",
        "n.l is lower",
        "[n.l]|select('eq', n.m)|list",
        "[n]|selectattr('l', 'in', [n.m])|list",
        "[n.l, n.m]|sort",
        "[[n.l], [n.m]]|map('list')|max",
        "[namespace(k=n.l), namespace(k=n.m)]|sort(attribute='k')",
        "{1: n.l, 2: n.m}|dictsort(by='value')",
        "[n.l].index(n.m)",
        "(n.l, 1).count(n.m)",
        "{n.t: 1}",
        "dict([(n.t, 1)])",
        "dict([[n.t, 1]]|map('list'))",
        "namespace([(n.t, 1)])",
        "{}.get(n.t)",
        "{}[n.t]",
        "messages[n.l].x",
        "{1: n.t}.items() - {}.items()",
        "n.l",
        "n.l ~ ''",
        "n.d",
        "n.x",
        "{1: n.l}.items()",
        "{1: n.l}.values()|string",
        "n.l|tojson",
        "n.d|tojson",
        "n.l|join",
        "','.join(n.l)",
        "'%s'|format(n.l)",
        "'%s' % [n.l]",
        "'{}'.format(n.l)",
        "'{0.l}'.format(n)",
        "''|attr(n.l)",
        "'a'|replace(n.l, '')",
        "'a'|indent(n.l)",
        "raise_exception(n.l)",
    ],
)
def test_a_value_that_holds_another_twice_counts_twice(expression: str) -> None:
    with pytest.raises(RequestError, match="is unusable"):
        render_deep("{{ " + expression + " }}")


def test_a_value_is_not_too_deep() -> None:
    nest = "{% set n = namespace(x=1) %}{% for i in range(?) %}{% set n.x = [n.x] %}{% endfor %}"
    source = nest + "{{ n.x == 1 }}"
    assert ChatTemplate(source.replace("?", "20"), {}, "x").render_prompt(MESSAGES) == "False"
    with pytest.raises(RequestError, match="nested deeper"):
        ChatTemplate(source.replace("?", "900"), {}, "x").render_prompt(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in [[n.l]] %}{{ (n.m, loop) in loop }}{% endfor %}",
        "{% for x in [1, 2] %}{{ loop.changed(n.l if x == 1 else n.m) }}{% endfor %}",
        "{% macro f() %}{% set n.t = varargs %}{% endmacro %}"
        + "{{ f(n.t, n.t) }}" * 2
        + "{{ {n.t: 1} }}",
    ],
)
def test_size_limits_can_not_be_bypassed(source: str) -> None:
    with pytest.raises(RequestError, match="is unusable"):
        render_deep(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum(5) }}",
        "{{ iterate('x', 1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ nothing.at_all }}",
        "{{ (1).to_bytes(9, 'big') }}",
        "{{ {}.fromkeys([1]) }}",
        "{{ (messages|map('list')).send(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_can_reach_nothing(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(source, {}, "x").render_prompt(MESSAGES)


def test_a_refusal_says_why() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, "x")
    with pytest.raises(RequestError, match="roles must alternate"):
        template.render_prompt(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% for",
        "{{ 'a'|center(9) }}",
        "{% extends x",
        "x" * (MAX_SOURCE_CHARACTERS + 1),
        "{{ " + "(" * 5000,
        "{% break %}",
    ],
)
def test_a_template_that_is_not_one_is_named(source: str) -> None:
    with pytest.raises(BrokenModel, match=r"^the-file: "):
        ChatTemplate(source, {}, "the-file")


def test_where_templates_are_found(tmp_path: Path) -> None:
    def render(config: dict[str, Any], *, tools: bool = False) -> str | None:
        template = load_chat_templates(tmp_path, config, {}).select_template(tools=tools)
        return None if template is None else template.render_prompt(MESSAGES)

    assert render({}) is None
    assert render({"chat_template": "one"}) == "one"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "two"}]
    assert render({"chat_template": named}) == "two"
    assert render({"chat_template": named[:1]}) is None
    assert render({"chat_template": named}, tools=True) == "two"
    named.append({"name": "tool_use", "template": "five"})
    assert render({"chat_template": named}) == "two"
    assert render({"chat_template": named}, tools=True) == "five"
    legacy = tmp_path / "chat_template.json"
    legacy.write_text(json.dumps({"chat_template": "four"}), encoding="utf-8")
    assert render({}) == "four"
    (tmp_path / "chat_template.jinja").write_text("three", encoding="utf-8")
    assert render({"chat_template": "one"}) == "three"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BrokenModel, match=r"chat_template\.jinja"):
        render({})


@pytest.mark.parametrize("value", [5, ["x"], [{"name": "default"}]])
def test_a_template_of_a_wrong_type_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(BrokenModel, match="chat_template"):
        load_chat_templates(tmp_path, {"chat_template": value}, {})
