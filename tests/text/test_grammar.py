"""Grammars: how they are compiled, which are refused, and which next tokens they allow."""

import contextlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from molink.checkpoint.model_source import find_demo_model
from molink.errors import MolinkError, RequestError
from molink.text import grammar as text_grammar
from molink.text import grammar_matcher as matcher
from molink.text.grammar import JsonLayout, build_grammar, check_grammar
from molink.text.grammar_matcher import GrammarCompiler, GrammarMatcher
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.data_plane import MAX_GRAMMAR_BYTES, Admit, SamplingParams
from molinkd.worker.request_table import RequestTable

FOLDER = find_demo_model().path
VOCABULARY = 2048
COLOUR = {"type": "object", "properties": {"c": {"enum": ["red", "green"]}}, "required": ["c"]}
COLOUR |= {"additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(FOLDER)


@pytest.fixture
def grammars() -> GrammarCompiler:
    return GrammarCompiler(FOLDER, VOCABULARY)


def schema(fields: Any) -> bytes:
    return build_grammar("json_schema", json.dumps(fields))


def tokens_of(mask: bytes) -> set[int]:
    whole = int.from_bytes(mask, "little")
    return {token for token in range(VOCABULARY) if whole >> token & 1}


def allows(constraint: GrammarMatcher, tokens: Sequence[int]) -> bool:
    """Whether these tokens are a complete answer that can't continue."""
    for token in tokens:
        if token not in tokens_of(constraint.compute_masks()[0]):
            return False
        constraint.add_tokens([token])
    return True


def begin(constraint: GrammarMatcher, count: int) -> None:
    """Add the first ``count`` allowed tokens of an answer."""
    for _ in range(count):
        constraint.add_tokens([min(tokens_of(constraint.compute_masks()[0]))])


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (schema(COLOUR), '{"c":"red"}', '{"c":"blue"}'),
        (schema(COLOUR), '{\n  "c": "green"\n}', '{"c":  "red"}'),
        (schema({"type": "object"}), '{"a": [1, {"b": null}]}', "[1]"),
        (build_grammar("regex", "[ab]{2}c/d"), "bac/d", "bc/d"),
        (build_grammar("choice", ["yes", 'n"o\n']), 'n"o\n', "no"),
        (build_grammar("grammar", 'start: "x" B*\nB: /b/'), "xbb", "xa"),
        (build_grammar("grammar", 'root ::= "x" [a-c]+'), "xabc", "xd"),
    ],
    ids=range(7),
)
def test_an_answer_is_held_to_it(
    tokenizer: Tokenizer, grammars: GrammarCompiler, grammar: bytes, good: str, bad: str
) -> None:
    check_grammar(grammar)
    ends = set(tokenizer.eos_ids)
    constraint = grammars.start_matcher(grammar)
    assert allows(constraint, tokenizer.encode(good, special=False))
    assert ends <= tokens_of(constraint.compute_masks()[0])
    other = grammars.start_matcher(grammar)
    said = allows(other, tokenizer.encode(bad, special=False))
    assert not said or not ends & tokens_of(other.compute_masks()[0])


def test_a_complete_answer_allows_only_its_end(
    tokenizer: Tokenizer, grammars: GrammarCompiler
) -> None:
    constraint = grammars.start_matcher(schema(COLOUR))
    assert not set(tokenizer.eos_ids) & tokens_of(constraint.compute_masks()[0])
    constraint.add_tokens(tokenizer.encode('{"c":"red"}', special=False))
    assert tokens_of(constraint.compute_masks()[0]) == set(tokenizer.eos_ids)


def test_replayed_tokens_reach_the_same_state(
    tokenizer: Tokenizer, grammars: GrammarCompiler
) -> None:
    tokens = tokenizer.encode('{"c": "green"}', special=False)[:-2]
    stepwise, at_once = (
        grammars.start_matcher(schema(COLOUR)),
        grammars.start_matcher(schema(COLOUR)),
    )
    assert allows(stepwise, tokens)
    at_once.add_tokens(tokens)
    assert stepwise.compute_masks() == at_once.compute_masks()


def test_white_space_is_bounded(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    text = "{\n" + " " * 41 + '"c":"red"}'
    assert not allows(grammars.start_matcher(schema(COLOUR)), tokenizer.encode(text, special=False))


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
        b"x" * (MAX_GRAMMAR_BYTES + 1),
    ],
    ids=lambda grammar: repr(grammar[:40]),
)
def test_hostile_bytes_fail_their_own_answer_only(
    grammars: GrammarCompiler, grammar: bytes
) -> None:
    with pytest.raises(MolinkError):
        begin(grammars.start_matcher(grammar), 4)
    with pytest.raises(RequestError):
        check_grammar(grammar)
    assert grammars.start_matcher(schema(COLOUR)).compute_masks()


def test_an_answer_outside_its_grammar_fails(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    constraint = grammars.start_matcher(schema(COLOUR))
    constraint.add_tokens(tokenizer.encode("Hello", special=False))
    with pytest.raises(RequestError, match="does not match its grammar"):
        constraint.compute_masks()


def test_few_are_kept_compiled(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    real = matcher.compile_grammar

    def compile_grammar(tokenizer: Any, grammar: bytes) -> Any:
        compiled.append(grammar)
        return real(tokenizer, grammar)

    monkeypatch.setattr(matcher, "compile_grammar", compile_grammar)
    monkeypatch.setattr(matcher, "MAX_KEPT", 2)
    one, two, three = (build_grammar("regex", text) for text in ("a", "b", "c"))
    for grammar in (one, two, one, three, one, two):
        grammars.start_matcher(grammar).compute_masks()
    assert compiled == [one, two, three, two]
    monkeypatch.setattr(matcher, "MAX_KEPT_BYTES", len(one))
    grammars.start_matcher(three).compute_masks()
    grammars.start_matcher(two).compute_masks()
    assert compiled[4:] == [three, two]


def test_a_vocabulary_may_be_longer_than_the_tokenizer(tokenizer: Tokenizer) -> None:
    constraint = GrammarCompiler(FOLDER, VOCABULARY + 50).start_matcher(
        build_grammar("regex", "(?s:.*)")
    )
    mask = int.from_bytes(constraint.compute_masks()[0], "little")
    assert mask >> VOCABULARY == 0
    assert tokens_of(constraint.compute_masks()[0]) & set(tokenizer.special_ids) == set(
        tokenizer.eos_ids
    )


def test_a_model_without_an_end_or_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(MolinkError, match=r"tokenizer\.json"):
        GrammarCompiler(tmp_path, 10).start_matcher(build_grammar("regex", "a")).compute_masks()
    source = (FOLDER / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(source)
    with pytest.raises(MolinkError, match="no end-of-sequence token"):
        GrammarCompiler(tmp_path, 10).start_matcher(build_grammar("regex", "a")).compute_masks()


def test_after_drafts_it_is_where_it_was(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    tokens = tokenizer.encode('{"c":"red"}', special=False)
    end = tokenizer.eos_ids[0]
    ahead, stepwise = grammars.start_matcher(schema(COLOUR)), grammars.start_matcher(schema(COLOUR))
    masks = ahead.compute_masks([*tokens, end])
    for token, mask in zip([*tokens, end], masks[:-1], strict=True):
        assert stepwise.compute_masks() == [mask]
        assert token in tokens_of(mask)
        stepwise.add_tokens([token])
    wrong = tokenizer.encode("Hello", special=False)[0]
    assert ahead.compute_masks([*tokens[:2], wrong, tokens[2]]) == [*masks[:3], b"", b""]
    assert ahead.compute_masks() == masks[:1]


def test_a_slow_compilation_fails_the_request(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt finds the compiled grammar."""
    gate = threading.Event()
    real = matcher.load_grammar_tokenizer

    def load(folder: Path, size: int) -> Any:
        gate.wait(60)
        return real(folder, size)

    monkeypatch.setattr(matcher, "load_grammar_tokenizer", load)
    monkeypatch.setattr(matcher, "COMPILE_TIMEOUT_S", 0.01)
    late = grammars.start_matcher(schema(COLOUR))
    with pytest.raises(RequestError, match="was not compiled"):
        late.compute_masks()
    gate.set()
    monkeypatch.setattr(matcher, "COMPILE_TIMEOUT_S", 60)
    assert grammars.start_matcher(schema(COLOUR)).compute_masks()


def test_cancelled_compilations_do_not_start(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, compiled = threading.Event(), []

    def compile_grammar(tokenizer: Any, grammar: bytes) -> Any:
        gate.wait(60)
        compiled.append(grammar)
        raise RequestError("no")

    monkeypatch.setattr(matcher, "compile_grammar", compile_grammar)
    table = RequestTable(grammars)
    for request in range(3):
        table.admit_request(Admit(request + 1, request, SamplingParams(), 1))
        table.set_grammar(request, b"%d" % request)
    constraint = table[2].matcher
    table.release_request(1)
    gate.set()
    assert constraint is not None
    with pytest.raises(RequestError):
        constraint.compute_masks()
    assert compiled == [b"0", b"2"]


def test_forced_tokens_are_those_that_masks_leave(
    tokenizer: Tokenizer, grammars: GrammarCompiler
) -> None:
    fields = {"long_name_of_a_key": {"enum": ["x"]}, "another_one": {"type": "boolean"}}
    shape = {"type": "object", "properties": fields, "required": list(fields)}
    shape["additionalProperties"] = False
    grammar = build_grammar("json_schema", json.dumps(shape), "compact")
    constraint, stepwise = grammars.start_matcher(grammar), grammars.start_matcher(grammar)
    assert constraint.forced_tokens(100) == []
    constraint.compute_masks()
    forced = constraint.forced_tokens(100)
    assert tokenizer.decode(forced).startswith('{"long_name_of_a_key":"x","another_on')
    assert constraint.forced_tokens(3) == forced[:3]
    for token in forced:
        assert tokens_of(stepwise.compute_masks()[0]) == {token}
        stepwise.add_tokens([token])
    said = tokenizer.encode('{"long_name_of_a_key":"x","another_one":true}', special=False)
    constraint.add_tokens(said)
    constraint.compute_masks()
    assert constraint.forced_tokens(5) == list(tokenizer.eos_ids)[: len(tokenizer.eos_ids) == 1]


@pytest.mark.parametrize(
    ("layout", "text"), [("line", '{"a": 1, "c": ["x"]}'), ("compact", '{"a":1,"c":["x"]}')]
)
def test_gptq_and_awq_layouts(
    tokenizer: Tokenizer, grammars: GrammarCompiler, layout: JsonLayout, text: str
) -> None:
    shape = {"properties": {"a": {"type": "integer"}, "c": {"items": {"enum": ["x"]}}}}
    said = tokenizer.encode(text, special=False)
    for each in get_args(JsonLayout):
        grammar = build_grammar("json_schema", json.dumps(shape), each)
        assert allows(grammars.start_matcher(grammar), said) == (each in (layout, "free"))
    hinted = {**shape, "x-guidance": {"whitespace_pattern": "_*"}}
    grammar = build_grammar("json_schema", json.dumps(hinted), layout)
    assert allows(grammars.start_matcher(grammar), said)
    other = tokenizer.encode(text.replace("1", "_1"), special=False)
    assert not allows(grammars.start_matcher(grammar), other)


def test_a_good_grammar_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[bytes] = []
    real = text_grammar.compile_grammar

    def compile_grammar(tokenizer: Any, grammar: bytes) -> Any:
        compiled.append(grammar)
        return real(tokenizer, grammar)

    monkeypatch.setattr(text_grammar, "compile_grammar", compile_grammar)
    good, bad = build_grammar("regex", "good[0-9]"), b"start: nothing"
    check_grammar.cache_clear()
    for grammar in (good, bad, good, bad):
        with contextlib.suppress(RequestError):
            check_grammar(grammar)
    assert compiled == [good, bad, bad]
