"""Random schemas and random logits: each answer conforms to its schema."""

import json
import random
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.checkpoint.model_source import find_demo_model
from molink.stage.sampling.sampler import SampleRow, sample_tokens
from molink.text.grammar import build_grammar, check_grammar
from molink.text.grammar_matcher import GrammarCompiler
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import Request
from tests.support.ring_backend import RingBackend

FOLDER = find_demo_model().path
VOCABULARY = 2048
TOKENIZER = Tokenizer.open(FOLDER)
GRAMMARS = GrammarCompiler(FOLDER, VOCABULARY)
#: No answer to these schemas needs more tokens.
MOST_TOKENS = 4000
KEYS = st.sampled_from(["a", "b", "name", 'quo"te', "ключ", "x y", "🦊"])
LENGTHS = st.integers(0, 12)
#: What molink assumes for these schemas, and the validator doesn't.
NAMED_ONLY = {"unevaluatedProperties": False}


def strings() -> st.SearchStrategy[dict[str, Any]]:
    plain = LENGTHS.map(lambda most: {"type": "string", "maxLength": most})
    patterns = st.sampled_from(["^[a-c]{1,4}$", "^(x|yy)z?$", "^\\d{2}-\\d{2}$"])
    return plain | patterns.map(lambda pattern: {"type": "string", "pattern": pattern})


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    ranges = st.tuples(st.integers(-1000, 1000), st.integers(0, 5000))
    return st.one_of(
        strings(),
        ranges.map(lambda r: {"type": "integer", "minimum": r[0], "maximum": r[0] + r[1]}),
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.lists(st.sampled_from(["red", "a\nb", 5, -1.5, None, True]), min_size=1, max_size=4).map(
            lambda values: {"enum": values}
        ),
    )


def objects(
    of: st.SearchStrategy[dict[str, Any]], suffix: str = ""
) -> st.SearchStrategy[dict[str, Any]]:
    """Objects whose keys end in ``suffix``."""

    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        keys = KEYS.map(lambda key: key + suffix)
        fields = draw(st.dictionaries(keys, of, max_size=4))
        required = [name for name in fields if draw(st.booleans())]
        return {"type": "object", "properties": fields, "required": required}

    return build()


def combined(of: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects of several schemas, which have no keys in common."""
    parts = st.tuples(*(objects(of, suffix) for suffix in ("", "2", "3")))
    return parts.flatmap(
        lambda parts: st.sampled_from(
            [
                {"allOf": [*parts]},
                {**parts[0], "anyOf": [*parts[1:]]},
                {**parts[0], "allOf": [{"anyOf": [*parts[1:]]}]},
            ]
        )
    )


def wider(of: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    sizes = st.tuples(st.integers(0, 2), st.integers(0, 2))
    arrays = st.tuples(of, sizes).map(
        lambda pair: {
            "type": "array",
            "items": pair[0],
            "minItems": pair[1][0],
            "maxItems": sum(pair[1]),
        }
    )
    closed = (objects(of) | combined(of)).map(lambda schema: schema | NAMED_ONLY)
    return arrays | closed | st.lists(of, min_size=1, max_size=3).map(lambda o: {"anyOf": o})


SCHEMAS = st.recursive(leaves(), wider, max_leaves=6)


def answer(schema: dict[str, Any], seed: int, temperature: float) -> str:
    """Sample from random logits under ``schema``; returns the text."""
    grammar = build_grammar("json_schema", json.dumps(schema))
    check_grammar(grammar)
    constraint = GRAMMARS.start_matcher(grammar)
    generator = torch.Generator().manual_seed(seed)
    sampling = SamplingParams(
        temperature=temperature, seed=seed, top_k=random.Random(seed).choice((0, 40))
    )
    tokens: list[int] = []
    while len(tokens) < MOST_TOKENS:
        logits = torch.randn(1, VOCABULARY, generator=generator) * 4
        row = SampleRow(sampling, len(tokens), None, constraint.compute_masks()[0])
        (drawn,) = sample_tokens(logits, [row])
        assert drawn is not None
        if drawn.token in TOKENIZER.eos_ids:
            return TOKENIZER.decode(tokens, skip_special=False)
        tokens.append(drawn.token)
        constraint.add_tokens([drawn.token])
    raise AssertionError(f"no end: {TOKENIZER.decode(tokens)[:200]}")


def without_closing(schema: Any) -> Any:
    if isinstance(schema, list):
        return [without_closing(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: without_closing(each) for key, each in schema.items() if key not in NAMED_ONLY}


def check(schema: dict[str, Any], seed: int) -> None:
    said = answer(without_closing(schema), seed, 1.5)
    jsonschema.Draft202012Validator(schema).validate(json.loads(said))


@settings(max_examples=40)
@given(SCHEMAS, st.integers(0, 2**32))
def test_answers_conform_to_their_schemas(schema: dict[str, Any], seed: int) -> None:
    check(schema, seed)


@pytest.mark.slow
@settings(max_examples=1000)
@given(SCHEMAS, st.integers(0, 2**32))
def test_a_thousand_answers_conform_to_their_schemas(schema: dict[str, Any], seed: int) -> None:
    check(schema, seed)


def test_drafts_change_no_answer_with_a_schema() -> None:
    item = {
        "type": "object",
        "properties": {"name": {"enum": ["first one", "second one"]}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": item, "minItems": 4, "maxItems": 6}
    found = []
    for drafts, parts in ((0, 1), (5, 1), (2, 3)):
        backend = RingBackend(FOLDER, num_speculative_tokens=drafts, parts=parts)
        said = []
        for seed in range(3):
            request = Request(
                "tiny",
                TOKENIZER.encode("A list of things as JSON:", special=False),
                200,
                SamplingParams(temperature=0.8, seed=seed),
                TOKENIZER.eos_ids,
                build_grammar("json_schema", json.dumps(schema)),
            )
            said.append([told.token for told in backend.tokens(backend.submit(request))])
        found.append(said)
        counters, _ = backend.ring.scheduler.collect_stats()
        assert not drafts or counters["scheduler_draft_tokens_accepted_total"] > 20
    assert found[0] == found[1] == found[2]
