"""What answers that are held to a schema cost where they are sampled, and what the schema forces.

Logits are random, the vocabulary is a model's::

    python -m tools.measure_grammar FOLDER --streams 16

Answers are drawn under a schema of two names, a text, a number, a choice and a list. A step's
sampling is timed without the grammar and with it: the masks, the drawing under them, and what is
forced after it. Times are of this thread's work (other programs don't count); the masks of a step
are found while nothing waits for them.

With ``--hostile`` only grammars that explode are checked, within molink's limits and within the
library's own.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import molink.text.grammar
import molink.text.grammar_matcher
from molink.checkpoint.config import ModelConfig
from molink.errors import RequestError
from molink.facts.drafts import MAX_DRAFTS
from molink.stage.sampling.sampler import SampleRow, sample_tokens
from molink.text.grammar import GrammarKind, build_grammar, check_grammar
from molink.text.grammar_matcher import GrammarCompiler, GrammarMatcher
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.data_plane import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 80},
        "summary": {"type": "string"},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "rating": {"enum": ["poor", "fair", "good", "excellent"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
    },
    "required": ["title", "summary", "year", "rating", "tags"],
    "additionalProperties": False,
}
#: What a model would say under it.
ANSWER = {
    "title": "The Old Man and the Sea",
    "summary": "An ageing fisherman goes far out alone, hooks a marlin and fights it for days.",
    "year": 1952,
    "rating": "excellent",
    "tags": ["novella", "fishing", "endurance"],
}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a model's folder; only its tokenizer is read")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hostile", action="store_true")
    options = parser.parse_args()
    if options.hostile:
        check_hostile()
        return
    torch.set_num_threads(1)
    molink.text.grammar_matcher.COMPILE_TIMEOUT_S = 60.0
    tokenizer = Tokenizer.open(options.folder)
    vocabulary = ModelConfig.load_folder(options.folder).vocab_size
    grammar = build_grammar("json_schema", json.dumps(SCHEMA), "line")
    print(f"vocabulary: {vocabulary}; streams: {options.streams}")
    timed("check of the schema at the endpoint", lambda: check_grammar(grammar))
    grammars = GrammarCompiler(options.folder, vocabulary)
    timed("first grammar, the vocabulary included", lambda: ready(grammars.start_matcher(grammar)))
    other = build_grammar("json_schema", json.dumps({**SCHEMA, "description": "another"}), "line")
    timed("another grammar", lambda: ready(grammars.start_matcher(other)))
    timed("the same one again", lambda: ready(grammars.start_matcher(grammar)))
    streams = [Stream(grammars, grammar, seed) for seed in range(options.streams)]
    plain, masks, drawing, forced = [], [], [], []
    for step in range(options.steps):
        logits = torch.randn(len(streams), vocabulary) * 3
        free = [SampleRow(each.sampling, step) for each in streams]
        began = time.thread_time()
        sample_tokens(logits, free)
        plain.append(time.thread_time() - began)
        began = time.thread_time()
        allowed = [each.constraint.compute_masks()[0] for each in streams]
        masks.append(time.thread_time() - began)
        rows = [
            SampleRow(each.sampling, step, None, a)
            for each, a in zip(streams, allowed, strict=True)
        ]
        began = time.thread_time()
        drawn = sample_tokens(logits, rows)
        drawing.append(time.thread_time() - began)
        after = 0.0
        for index, token in enumerate(drawn):
            assert token is not None
            if token.token in tokenizer.eos_ids:
                streams[index] = Stream(grammars, grammar, streams[index].sampling.seed + 1000)
                continue
            began = time.thread_time()
            streams[index].constraint.add_tokens([token.token])
            streams[index].constraint.forced_tokens(MAX_DRAFTS)
            after += time.thread_time() - began
        forced.append(after)
    show("sampling without a grammar", plain)
    show("masks", masks)
    show("sampling with them", drawing)
    show("what is forced", forced)
    said = tokenizer.encode(json.dumps(ANSWER), special=False)
    for layout in ("line", "free"):
        held = grammars.start_matcher(build_grammar("json_schema", json.dumps(SCHEMA), layout))
        only = [
            int.from_bytes(mask, "little").bit_count() == 1 for mask in held.compute_masks(said)
        ]
        print(
            f"{layout}: of an example's {len(only)} tokens {sum(only)} are forced, its end included"
        )


def hostile() -> Iterator[tuple[GrammarKind, str]]:
    """Grammars that explode, somewhere."""
    yield "regex", "((((((a{100}){100}){100}){100}){100}){100})"
    yield "regex", "(a{1,1000}){1,1000}"
    yield "regex", "(a?){5000}a{5000}"
    yield "regex", "(.*a){20}.{30}b.{40}"
    yield "grammar", "start: x{1,500}\nx: y y y\ny: /a*/ | /b?a?/ | /.?/"
    yield "grammar", 'start: b+\nb: ("a" | "a" b)*'
    yield "grammar", "start: " + " | ".join(f'"x{number}"' for number in range(9000))
    keys = {f"key{number}": {"type": "string"} for number in range(3000)}
    yield "json_schema", json.dumps({"type": "object", "properties": keys})
    yield "json_schema", json.dumps({"properties": keys, "required": list(keys)})
    yield "json_schema", json.dumps({"enum": [f"value{number}" for number in range(9000)]})
    wide = [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(10)]} for i in range(10)]
    yield "json_schema", json.dumps({"allOf": wide})


def check_hostile() -> None:
    """Print how long each takes to be taken or refused."""
    limits = molink.text.grammar
    own = limits.LEXER_FUEL, limits.MAX_ITEMS, limits.MAX_STATES
    for kind, source in hostile():
        text, found = build_grammar(kind, source), []
        for bounds in (own, (1_000_000, 50_000, 250_000)):
            limits.LEXER_FUEL, limits.MAX_ITEMS, limits.MAX_STATES = bounds
            check_grammar.cache_clear()
            began, said = time.perf_counter(), "taken"
            try:
                check_grammar(text)
            except RequestError as error:
                said = f"refused: {error}"[:60]
            found.append(f"{1000 * (time.perf_counter() - began):.0f} ms ({said})")
        print(f"{source[:44]!r}: {found[0]}; within the library's limits {found[1]}")


class Stream:
    """An answer under way."""

    def __init__(self, grammars: GrammarCompiler, grammar: bytes, seed: int) -> None:
        self.constraint = grammars.start_matcher(grammar)
        ready(self.constraint)
        self.sampling = SamplingParams(temperature=0.7, seed=seed)


def ready(constraint: GrammarMatcher) -> None:
    """Wait until it is compiled."""
    constraint.compute_masks()


def timed(what: str, work: Callable[[], None]) -> None:
    """Print how long ``work`` takes."""
    began = time.perf_counter()
    work()
    print(f"{what}: {1000 * (time.perf_counter() - began):.2f} ms")


def show(what: str, seconds: Sequence[float]) -> None:
    """Print the median and the greatest of steps."""
    median, most = (1000 * value for value in (statistics.median(seconds), max(seconds)))
    print(f"{what}: {median:.2f} ms a step, at most {most:.2f}")


if __name__ == "__main__":
    main()
