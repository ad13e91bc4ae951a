"""Grammars: what is made of them, what is refused, and which tokens they let come next."""

import contextlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from molink.checkpoint.source import demo_model
from molink.errors import MolinkError, RequestError
from molink.text import grammar as text_grammar
from molink.text import matcher
from molink.text.grammar import Layout, check_grammar, grammar_of
from molink.text.matcher import Constraint, Grammars
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.data import MAX_GRAMMAR, Admit, Sampling
from molinkd.worker.request_table import RequestTable

FOLDER = demo_model().path
VOCABULARY = 2048
COLOUR = {"type": "object", "properties": {"c": {"enum": ["red", "green"]}}, "required": ["c"]}
COLOUR |= {"additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(FOLDER)


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(FOLDER, VOCABULARY)


def schema(fields: Any) -> bytes:
    return grammar_of("json_schema", json.dumps(fields))


def tokens_of(mask: bytes) -> set[int]:
    whole = int.from_bytes(mask, "little")
    return {token for token in range(VOCABULARY) if whole >> token & 1}


def allows(constraint: Constraint, tokens: Sequence[int]) -> bool:
    """Whether an answer may be just these tokens, and then has to end."""
    for token in tokens:
        if token not in tokens_of(constraint.allowed()[0]):
            return False
        constraint.add([token])
    return True


def begin(constraint: Constraint, count: int) -> None:
    """The first so many tokens of an answer."""
    for _ in range(count):
        constraint.add([min(tokens_of(constraint.allowed()[0]))])


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (schema(COLOUR), '{"c":"red"}', '{"c":"blue"}'),
        (schema(COLOUR), '{\n  "c": "green"\n}', '{"c":  "red"}'),
        (schema({"type": "object"}), '{"a": [1, {"b": null}]}', "[1]"),
        (grammar_of("regex", "[ab]{2}c/d"), "bac/d", "bc/d"),
        (grammar_of("choice", ["yes", 'n"o\n']), 'n"o\n', "no"),
        (grammar_of("grammar", 'start: "x" B*\nB: /b/'), "xbb", "xa"),
        (grammar_of("grammar", 'root ::= "x" [a-c]+'), "xabc", "xd"),
    ],
    ids=range(7),
)
def test_an_answer_is_held_to_it(
    tokenizer: Tokenizer, grammars: Grammars, grammar: bytes, good: str, bad: str
) -> None:
    check_grammar(grammar)
    ends = set(tokenizer.eos_ids)
    constraint = grammars.begin(grammar)
    assert allows(constraint, tokenizer.encode(good, special=False))
    assert ends <= tokens_of(constraint.allowed()[0])
    other = grammars.begin(grammar)
    said = allows(other, tokenizer.encode(bad, special=False))
    assert not said or not ends & tokens_of(other.allowed()[0])


def test_when_it_is_complete_only_an_end_may_come(tokenizer: Tokenizer, grammars: Grammars) -> None:
    constraint = grammars.begin(schema(COLOUR))
    assert not set(tokenizer.eos_ids) & tokens_of(constraint.allowed()[0])
    constraint.add(tokenizer.encode('{"c":"red"}', special=False))
    assert tokens_of(constraint.allowed()[0]) == set(tokenizer.eos_ids)


def test_tokens_that_are_gone_through_again_lead_to_the_same_place(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    tokens = tokenizer.encode('{"c": "green"}', special=False)[:-2]
    stepwise, at_once = grammars.begin(schema(COLOUR)), grammars.begin(schema(COLOUR))
    assert allows(stepwise, tokens)
    at_once.add(tokens)
    assert stepwise.allowed() == at_once.allowed()


def test_white_space_is_bounded(grammars: Grammars, tokenizer: Tokenizer) -> None:
    text = "{\n" + " " * 41 + '"c":"red"}'
    assert not allows(grammars.begin(schema(COLOUR)), tokenizer.encode(text, special=False))


@pytest.mark.parametrize(
    "grammar",
    [
        b"",
        b"\xff\xfe\x00",
        b"{" * 1000,
        b'{"grammars": []}',
        b'{"grammars": [{"json_schema": {"$ref": "#"}}]}',
        b'{"grammars": [{"json_schema": {"not": {}}}]}',
        b'{"grammars": [{"lark_grammar": "start: @nobody"}]}',
        b"start: /(((((a{100}){100}){100}){100}){100})/",
        b"x" * (MAX_GRAMMAR + 1),
    ],
    ids=lambda grammar: repr(grammar[:40]),
)
def test_hostile_bytes_fail_their_own_answer_only(grammars: Grammars, grammar: bytes) -> None:
    with pytest.raises(MolinkError):
        begin(grammars.begin(grammar), 4)
    with pytest.raises(RequestError):
        check_grammar(grammar)
    assert grammars.begin(schema(COLOUR)).allowed()


def test_an_answer_that_went_another_way_fails(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = grammars.begin(schema(COLOUR))
    constraint.add(tokenizer.encode("Hello", special=False))
    with pytest.raises(RequestError, match="isn't what its grammar allows"):
        constraint.allowed()


def test_few_are_kept_compiled(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    real = matcher.compile_grammar

    def compile_grammar(tokenizer: Any, grammar: bytes) -> Any:
        compiled.append(grammar)
        return real(tokenizer, grammar)

    monkeypatch.setattr(matcher, "compile_grammar", compile_grammar)
    monkeypatch.setattr(matcher, "MAX_KEPT", 2)
    one, two, three = (grammar_of("regex", text) for text in ("a", "b", "c"))
    for grammar in (one, two, one, three, one, two):
        grammars.begin(grammar).allowed()
    assert compiled == [one, two, three, two]
    monkeypatch.setattr(matcher, "MAX_KEPT_BYTES", len(one))
    grammars.begin(three).allowed()
    grammars.begin(two).allowed()
    assert compiled[4:] == [three, two]


def test_a_vocabulary_may_be_longer_than_the_tokenizer(tokenizer: Tokenizer) -> None:
    constraint = Grammars(FOLDER, VOCABULARY + 50).begin(grammar_of("regex", "(?s:.*)"))
    mask = int.from_bytes(constraint.allowed()[0], "little")
    assert mask >> VOCABULARY == 0
    assert tokens_of(constraint.allowed()[0]) & set(tokenizer.special_ids) == set(tokenizer.eos_ids)


def test_a_model_without_an_end_or_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(MolinkError, match=r"tokenizer\.json"):
        Grammars(tmp_path, 10).begin(grammar_of("regex", "a")).allowed()
    source = (FOLDER / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(source)
    with pytest.raises(MolinkError, match="no token that ends an answer"):
        Grammars(tmp_path, 10).begin(grammar_of("regex", "a")).allowed()


def test_after_drafts_it_is_where_it_was(tokenizer: Tokenizer, grammars: Grammars) -> None:
    tokens = tokenizer.encode('{"c":"red"}', special=False)
    end = tokenizer.eos_ids[0]
    ahead, stepwise = grammars.begin(schema(COLOUR)), grammars.begin(schema(COLOUR))
    masks = ahead.allowed([*tokens, end])
    for token, mask in zip([*tokens, end], masks[:-1], strict=True):
        assert stepwise.allowed() == [mask]
        assert token in tokens_of(mask)
        stepwise.add([token])
    wrong = tokenizer.encode("Hello", special=False)[0]
    assert ahead.allowed([*tokens[:2], wrong, tokens[2]]) == [*masks[:3], b"", b""]
    assert ahead.allowed() == masks[:1]


def test_a_compilation_that_takes_long_is_not_waited_for(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt finds it done."""
    gate = threading.Event()
    real = matcher.load_vocabulary

    def load(folder: Path, size: int) -> Any:
        gate.wait(60)
        return real(folder, size)

    monkeypatch.setattr(matcher, "load_vocabulary", load)
    monkeypatch.setattr(matcher, "WAIT_S", 0.01)
    late = grammars.begin(schema(COLOUR))
    with pytest.raises(RequestError, match="isn't compiled"):
        late.allowed()
    gate.set()
    monkeypatch.setattr(matcher, "WAIT_S", 60)
    assert grammars.begin(schema(COLOUR)).allowed()


def test_what_nobody_waits_for_is_not_compiled(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, compiled = threading.Event(), []

    def compile_grammar(tokenizer: Any, grammar: bytes) -> Any:
        gate.wait(60)
        compiled.append(grammar)
        raise RequestError("no")

    monkeypatch.setattr(matcher, "compile_grammar", compile_grammar)
    table = RequestTable(grammars)
    for request in range(3):
        table.admit(Admit(request + 1, request, Sampling(), 1))
        table.grammar(request, b"%d" % request)
    constraint = table[2].constraint
    table.release(1)
    gate.set()
    assert constraint is not None
    with pytest.raises(RequestError):
        constraint.allowed()
    assert compiled == [b"0", b"2"]


def test_forced_tokens_are_those_that_masks_leave(tokenizer: Tokenizer, grammars: Grammars) -> None:
    fields = {"long_name_of_a_key": {"enum": ["x"]}, "another_one": {"type": "boolean"}}
    shape = {"type": "object", "properties": fields, "required": list(fields)}
    shape["additionalProperties"] = False
    grammar = grammar_of("json_schema", json.dumps(shape), "compact")
    constraint, stepwise = grammars.begin(grammar), grammars.begin(grammar)
    assert constraint.forced(100) == []
    constraint.allowed()
    forced = constraint.forced(100)
    assert tokenizer.decode(forced).startswith('{"long_name_of_a_key":"x","another_on')
    assert constraint.forced(3) == forced[:3]
    for token in forced:
        assert tokens_of(stepwise.allowed()[0]) == {token}
        stepwise.add([token])
    said = tokenizer.encode('{"long_name_of_a_key":"x","another_one":true}', special=False)
    constraint.add(said)
    constraint.allowed()
    assert constraint.forced(5) == list(tokenizer.eos_ids)[: len(tokenizer.eos_ids) == 1]


@pytest.mark.parametrize(
    ("layout", "text"),
    [("line", '{"a": 1, "c": ["x"]}'), ("compact", '{"a":1,"c":["x"]}')],
)
def test_layouts(tokenizer: Tokenizer, grammars: Grammars, layout: Layout, text: str) -> None:
    shape = {"properties": {"a": {"type": "integer"}, "c": {"items": {"enum": ["x"]}}}}
    said = tokenizer.encode(text, special=False)
    for each in get_args(Layout):
        grammar = grammar_of("json_schema", json.dumps(shape), each)
        assert allows(grammars.begin(grammar), said) == (each in (layout, "free"))
    hinted = {**shape, "x-guidance": {"whitespace_pattern": "_*"}}
    grammar = grammar_of("json_schema", json.dumps(hinted), layout)
    assert allows(grammars.begin(grammar), said)
    other = tokenizer.encode(text.replace("1", "_1"), special=False)
    assert not allows(grammars.begin(grammar), other)


def test_a_good_grammar_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[bytes] = []
    real = text_grammar.compile_grammar

    def compile_grammar(tokenizer: Any, grammar: bytes) -> Any:
        compiled.append(grammar)
        return real(tokenizer, grammar)

    monkeypatch.setattr(text_grammar, "compile_grammar", compile_grammar)
    good, bad = grammar_of("regex", "good[0-9]"), b"start: nothing"
    check_grammar.cache_clear()
    for grammar in (good, bad, good, bad):
        with contextlib.suppress(RequestError):
            check_grammar(grammar)
    assert compiled == [good, bad, bad]
