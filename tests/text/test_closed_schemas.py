"""Keys that a schema does not name are forbidden, unless the schema allows them."""

import json
from typing import Annotated, Any, Literal

import pydantic
import pytest

from molink.errors import RequestError
from molink.text.closed_schemas import forbid_extra_keys
from molink.text.grammar import build_grammar, compile_grammar, create_grammar_tokenizer
from molink.text.tool_calls.create import AnswerFormat
from molink.text.tool_calls.grammar import build_call_grammar
from molink.wire.messages.data_plane import MAX_GRAMMAR_BYTES

BYTES = [*(bytes([byte]) for byte in range(256)), b"<end>"]
TOKENIZER = create_grammar_tokenizer(BYTES, [256], [256], lambda text: list(text.encode()))

INT = {"type": "integer"}
A: dict[str, Any] = {"type": "object", "properties": {"a": INT}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": INT}, "required": ["b"]}
DEFS = {"A": A, "B": B}
REF_A, REF_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
TREE = {"type": "object", "properties": {"v": INT, "n": {"$ref": "#/$defs/T"}}, "required": ["v"]}


def allows(grammar: bytes, answer: str) -> bool:
    matcher = compile_grammar(TOKENIZER, grammar)
    data = answer.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def accepted(schema: Any, answer: str) -> bool:
    return allows(build_grammar("json_schema", json.dumps(schema), "line"), answer)


#: Schema, valid answers, and invalid ones.
CLOSED: dict[str, tuple[Any, list[str], list[str]]] = {
    "properties": (A, ['{"a": 1}'], ['{"a": 1, "b": 2}', '{"a": 1, "": 2}']),
    "no properties": ({"type": "object", "properties": {}}, ["{}"], ['{"b": 2}']),
    "nested": (
        {"type": "array", "items": {"properties": {"o": A}, "required": ["o"]}},
        ['[{"o": {"a": 1}}]'],
        ['[{"o": {"a": 1, "b": 2}}]', '[{"o": {"a": 1}, "b": 2}]'],
    ),
    "patterns": (
        {"type": "object", "properties": {"a": INT}, "patternProperties": {"^x_": INT}},
        ['{"a": 1, "x_y": 2}'],
        ['{"a": 1, "y": 2}', '{"a": 1, "x_y": "z"}'],
    ),
    "undeclared but required": ({**A, "required": ["c"]}, ['{"c": [1]}'], ['{"c": 1, "d": 1}']),
    "reference": (
        {"$defs": DEFS, "properties": {"o": REF_A, "p": {"$ref": "#/properties/o"}}},
        ['{"o": {"a": 1}, "p": {"a": 2}}'],
        ['{"o": {"a": 1, "b": 2}}', '{"p": {"a": 1, "b": 2}}'],
    ),
    "recursion": (
        {"$defs": {"T": TREE}, "$ref": "#/$defs/T"},
        ['{"v": 1, "n": {"v": 2, "n": {"v": 3}}}'],
        ['{"v": 1, "n": {"v": 2, "w": 3}}'],
    ),
    "all of": (
        {"allOf": [A, B]},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}', '{"a": 1, "b": "2"}', '{"a": 1, "b": 2, "c": 3}'],
    ),
    "inherited, and used alone": (
        {"$defs": DEFS, "properties": {"one": REF_A, "both": {"allOf": [REF_A, B]}}},
        ['{"one": {"a": 1}, "both": {"a": 1, "b": 2}}'],
        ['{"one": {"a": 1, "b": 2}}', '{"both": {"a": 1, "b": 2, "c": 3}}'],
    ),
    "reference and properties": (
        {"$defs": DEFS, **REF_A, "properties": {"z": INT}},
        ['{"z": 1, "a": 1}'],
        ['{"z": 1, "a": 1, "b": 2}'],
    ),
    "any of": (
        {"$defs": DEFS, "anyOf": [REF_A, REF_B]},
        ['{"a": 1}', '{"b": 1}'],
        ['{"a": 1, "b": 2}', '{"b": 1, "c": 2}'],
    ),
    "disjoint one of": ({"oneOf": [A, B]}, ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 2}']),
    "properties and any of": (
        {"$defs": DEFS, "properties": {"c": INT}, "anyOf": [REF_A, REF_B], "type": "object"},
        ['{"c": 1, "a": 1}', '{"c": 1, "b": 2}', '{"b": 2}'],
        ['{"c": 1}', '{"c": 1, "a": 1, "b": 2}', '{"c": 1, "b": 2, "d": 3}'],
    ),
    "one of two required": (
        {"properties": {"a": INT, "b": INT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}'],
        ["{}", '{"a": 1, "c": 2}'],
    ),
    "false": ({**A, "additionalProperties": False}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
    "unevaluated": ({**A, "unevaluatedProperties": False}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
}


@pytest.mark.parametrize(("schema", "good", "bad"), CLOSED.values(), ids=CLOSED)
def test_only_named_keys(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [answer for answer in good if not accepted(schema, answer)] == []
    assert [answer for answer in bad if accepted(schema, answer)] == []


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"type": "object"}, '{"x": [1]}'),
        ({"type": "object", "required": ["x"]}, '{"x": 1, "y": 2}'),
        ({}, '{"x": 1}'),
        ({**A, "additionalProperties": True}, '{"a": 1, "x": "y"}'),
        ({**A, "additionalProperties": INT}, '{"a": 1, "x": 2}'),
        ({**A, "unevaluatedProperties": True}, '{"a": 1, "x": 2}'),
        ({"allOf": [{**A, "additionalProperties": True}, B]}, '{"a": 1, "b": 2, "x": 3}'),
        (
            {"$defs": {"A": {**A, "additionalProperties": True}}, "allOf": [REF_A, B]},
            '{"a": 1, "b": 2, "x": 3}',
        ),
        ({"properties": {"a": {"const": {"properties": {}}}}}, '{"a": {"properties": {}}}'),
    ],
)
def test_any_keys(schema: Any, answer: str) -> None:
    assert accepted(schema, answer)


def test_arguments_of_a_forced_call() -> None:
    form = AnswerFormat("hermes", None)
    text = build_call_grammar(form, {"add": A}, {})
    for arguments, allowed in (('{"a": 1}', True), ('{"a": 1, "b": 2}', False)):
        call = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
        assert allows(text.encode(), call) == allowed


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    tricks: list[str] = []


class Zoo(pydantic.BaseModel):
    animals: list[Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]]
    boss: Cat | Dog | None = None
    visitors: dict[str, int] = {}


def test_models_of_pydantic() -> None:
    """pydantic's schemas never forbid keys, which ``oneOf`` of a discriminated union needs."""
    schema = Zoo.model_json_schema()
    cat, dog = '{"kind": "cat", "lives": 9}', '{"kind": "dog", "tricks": ["sit"]}'
    good = f'{{"animals": [{cat}, {dog}], "boss": {cat}, "visitors": {{"any": 1}}}}'
    assert accepted(schema, good)
    for told, other in (("9}", '9, "x": 1}'), ('"lives": 9', '"tricks": []'), ("]}]", "]}, {}]")):
        assert told in good
        assert not accepted(schema, good.replace(told, other))
    assert not accepted(schema, good[:-1] + ', "weather": "fine"}')


def test_a_schema_that_names_all_keys_is_unchanged() -> None:
    strict = {"type": "object", "properties": {"a": INT}, "additionalProperties": False}
    schema = {"$defs": {"A": strict}, "anyOf": [REF_A, {"type": "null"}], "title": "x"}
    assert forbid_extra_keys(schema) == schema


def chain(length: int, keyword: str) -> dict[str, Any]:
    """Each definition combines the next one twice, with a key of its own."""
    defs = {
        f"d{number}": {
            "properties": {f"key{number}": INT},
            keyword: [{"$ref": f"#/$defs/d{number + 1}"}] * 2,
        }
        for number in range(length)
    }
    return {"$defs": defs, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": INT}, "allOf": [{"$ref": "#"}]},
        {"properties": {"a": INT}, "anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"allOf": [{"$ref": "#/allOf/0"}]},
        chain(60, "allOf"),
        chain(60, "anyOf"),
        chain(1000, "allOf"),
        {"allOf": [{"properties": {f"k{n}": {}}} for n in range(2500)]},
        {"$defs": {"x": 5}, "$ref": "#/$defs/x/y", "properties": {"a": []}, "allOf": [None]},
        {"$ref": "#/" + "9" * 10_000, "properties": {"a": INT}},
    ],
    ids=range(9),
)
def test_hostile_schemas_are_refused_soon(schema: Any) -> None:
    assert len(json.dumps(schema)) < MAX_GRAMMAR_BYTES
    with pytest.raises(RequestError):
        compile_grammar(TOKENIZER, build_grammar("json_schema", json.dumps(schema)))
