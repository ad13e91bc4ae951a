"""What forced tokens bring: a real model fills in forms, a simulated ring replays that.

    python -m tools.measure_forms FILE.gguf --json > docs/results/forms.json
    python -m tools.measure_forms docs/results/forms.json          # three RTX 4090, 100 Mbps, 30 ms
    python -m tools.measure_forms docs/results/forms.json --ring rtx3060:1000:1 --streams 16

The model (a GGUF file, or a folder) reads letters that order something, and fills in an order form
under its JSON schema, greedily, once for each layout of JSON: on one line, compact, and with white
space as it likes. Half of the prompts name the form's keys. Shown are the answers' tokens, how many
of them were forced, how many passes they take if those are drafts, and how many of the form's
fields are right. What is forced is asked as the last stage asks it; each such token is compared
with the mask, which has to allow no other.

Replayed are these tokens in virtual time, by the product's head and stages: without drafts, with
those of prompt lookup, and with forced ones besides. Shown is the mean time of a whole answer.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_source import NullCounter
from molink.facts.drafts import AUTO_DRAFTS, MAX_DRAFTS
from molink.sim.known_text import KnownText, rows_of
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.simulate import simulate_scenarios
from molink.sim.workload import Workload
from molink.stage.stage import Stage
from molink.text.grammar import JsonLayout, build_grammar
from molink.text.grammar_matcher import GrammarCompiler, GrammarMatcher
from molink.text.tokenizer import Tokenizer
from tools.greedy import next_logits, whole_model

FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_full_name": {"type": "string", "maxLength": 40},
        "contact_email_address": {"type": "string", "maxLength": 40},
        "shipping_address": {
            "type": "object",
            "properties": {
                "street_and_house_number": {"type": "string", "maxLength": 40},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "city_name": {"type": "string", "maxLength": 30},
                "country": {"enum": ["Germany", "France", "Netherlands", "Austria", "Belgium"]},
            },
            "required": ["street_and_house_number", "postal_code", "city_name", "country"],
            "additionalProperties": False,
        },
        "order_details": {
            "type": "object",
            "properties": {
                "article_description": {"type": "string", "maxLength": 40},
                "number_of_items": {"type": "integer", "minimum": 1, "maximum": 99},
                "payment_method": {"enum": ["credit_card", "bank_transfer", "cash_on_delivery"]},
            },
            "required": ["article_description", "number_of_items", "payment_method"],
            "additionalProperties": False,
        },
        "preferred_delivery_window": {"enum": ["morning", "afternoon", "evening"]},
        "is_a_gift": {"type": "boolean"},
    },
    "required": [
        "customer_full_name",
        "contact_email_address",
        "shipping_address",
        "order_details",
        "preferred_delivery_window",
        "is_a_gift",
    ],
    "additionalProperties": False,
}
_NAMES = ("Anna Schmidt", "Luc Moreau", "Pieter de Vries", "Eva Gruber", "Marie Dubois", "Jan Koch")
_STREETS = ("Lindenweg 12", "Rue du Port 7", "Kerkstraat 45", "Hauptplatz 3", "Dorpsstraat 88")
_CITIES = (
    ("Hamburg", "Germany"),
    ("Lyon", "France"),
    ("Utrecht", "Netherlands"),
    ("Graz", "Austria"),
    ("Ghent", "Belgium"),
)
_ARTICLES = ("desk lamps", "garden chairs", "coffee mugs", "wool blankets", "bicycle bells")
_MOST_TOKENS = 400
#: One request after another, with seconds between them.
_APART = 120.0


@dataclass(frozen=True, slots=True)
class Filled:
    """An answer: its tokens, and for each how many from it on were forced.

    ``kind`` says how it was asked; ``right`` of ``fields`` are what the letter says.
    """

    kind: str
    layout: JsonLayout
    prompt: list[int]
    tokens: list[int]
    runs: list[int]
    right: int
    fields: int

    @property
    def text(self) -> KnownText:
        """As the simulator takes it."""
        return KnownText(tuple(self.prompt), tuple(self.tokens), tuple(self.runs))


# --- letters and forms -----------------------------------------------------------------------


def letter(seed: int) -> tuple[str, dict[str, Any]]:
    """An order in words, and the form as it should be filled in."""
    rng = random.Random(seed)
    name, street, (city, country) = rng.choice(_NAMES), rng.choice(_STREETS), rng.choice(_CITIES)
    article, count, code = rng.choice(_ARTICLES), rng.randint(2, 30), rng.randint(10000, 99999)
    email = f"{name.split()[0].lower()}{rng.randint(10, 99)}@example.com"
    method = rng.choice(FORM["properties"]["order_details"]["properties"]["payment_method"]["enum"])
    window = rng.choice(FORM["properties"]["preferred_delivery_window"]["enum"])
    gift = rng.random() < 0.5
    text = (
        f"Hello, I would like to order {count} {article}. I pay by {method.replace('_', ' ')}. "
        f"Please send them to {name}, {street}, {code} {city}, {country}, and bring them in the "
        f"{window}. {'It is a gift.' if gift else 'It is for myself, not a gift.'} "
        f"You can write to me at {email}."
    )
    form = {
        "customer_full_name": name,
        "contact_email_address": email,
        "shipping_address": {
            "street_and_house_number": street,
            "postal_code": str(code),
            "city_name": city,
            "country": country,
        },
        "order_details": {
            "article_description": article,
            "number_of_items": count,
            "payment_method": method,
        },
        "preferred_delivery_window": window,
        "is_a_gift": gift,
    }
    return text, form


def leaves(form: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of each field."""
    for key, value in form.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key, value


def question(text: str, named: bool) -> str:
    """What the model is asked."""
    keys = ", ".join(path for path, _ in leaves(letter(0)[1]))
    with_keys = f" Its keys are: {keys}." if named else ""
    return f"Fill in the order form for this letter, as JSON.{with_keys}\n\n{text}"


def fill_all(path: Path, count: int, dtype: Any) -> Iterator[Filled]:
    """The model's answers; every second prompt names the keys."""
    folder, tokenizer = ModelFolder.open(path), Tokenizer.open(path)
    assert tokenizer.chat_template is not None
    grammars = GrammarCompiler(path, folder.config.vocab_size)
    stage = whole_model(folder, 1024 + _MOST_TOKENS, dtype)
    for seed, layout in product(range(count), get_args(JsonLayout)):
        text, form = letter(seed)
        named = seed % 2 == 1
        messages = [{"role": "user", "content": question(text, named)}]
        prompt = tokenizer.encode(tokenizer.chat_template.render_prompt(messages), special=False)
        constraint = grammars.start_matcher(build_grammar("json_schema", json.dumps(FORM), layout))
        tokens, runs = fill(stage, prompt, constraint, tokenizer.eos_ids)
        found = json.loads(tokenizer.decode(tokens))
        expected = dict(leaves(form))
        right = sum(expected[key] == value for key, value in leaves(found))
        kind = "keys in the prompt" if named else "letter only"
        yield Filled(kind, layout, list(prompt), tokens, runs, right, len(expected))


def fill(
    stage: Stage, prompt: Sequence[int], constraint: GrammarMatcher, ends: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Tokens of a greedy answer, and how many were forced from each on."""
    known, start, tokens, runs = list(prompt), 0, list[int](), list[int]()
    while not (tokens and tokens[-1] in ends):
        if len(tokens) > _MOST_TOKENS:
            raise SystemExit("an answer doesn't end")
        forced = constraint.forced_tokens(_MOST_TOKENS) if tokens else []
        (*masks, last) = constraint.compute_masks(forced)
        pairs = zip(masks, forced, strict=True)
        if any(int.from_bytes(mask, "little") != 1 << token for mask, token in pairs):
            raise SystemExit(f"not forced: {forced}")
        known += forced
        new = list(forced)
        runs += range(len(forced), 0, -1)
        if not (forced and forced[-1] in ends):
            logits = next_logits(stage, known, start)
            start = len(known)
            bits = torch.frombuffer(bytearray(last), dtype=torch.uint8)
            allowed = (bits[:, None] >> torch.arange(8) & 1).flatten()[: len(logits)].bool()
            chosen = int(logits.masked_fill(~allowed, -torch.inf).argmax())
            known.append(chosen)
            new.append(chosen)
            runs.append(0)
        constraint.add_tokens(new)
        tokens += new
    return tokens, runs


def passes(answer: Filled) -> int:
    """Passes after the first token, with forced tokens as drafts."""
    written, count = 1, 0
    while written < len(answer.tokens):
        written += 1 + min(answer.runs[written], MAX_DRAFTS)
        count += 1
    return count


# --- figures ---------------------------------------------------------------------------------


def figures(answers: Sequence[Filled]) -> Iterator[dict[str, Any]]:
    """A row for each kind and layout."""
    for (kind, layout), mine in grouped(answers).items():
        tokens = sum(len(one.tokens) for one in mine)
        yield {
            "kind": kind,
            "layout": layout,
            "answers": len(mine),
            "tokens": tokens,
            "forced": sum(bool(run) for one in mine for run in one.runs),
            "passes": len(mine) + sum(passes(one) for one in mine),
            "fields right": f"{sum(o.right for o in mine)} of {sum(o.fields for o in mine)}",
        }


def grouped(answers: Sequence[Filled]) -> dict[tuple[str, JsonLayout], list[Filled]]:
    """Those of the same kind and layout together."""
    found: dict[tuple[str, JsonLayout], list[Filled]] = {}
    for one in answers:
        found.setdefault((one.kind, one.layout), []).append(one)
    return found


def replay(answers: Sequence[Filled], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times of a whole answer in a ring, for each kind and layout."""
    device, bandwidth, latency = options.ring.split(":")
    link = LinkProfile(bandwidth_mbps=float(bandwidth), latency_ms=float(latency))
    rows, scenarios = [], []
    for (kind, layout), mine in grouped(answers).items():
        texts = tuple(one.text for one in mine)
        plain = tuple(replace(text, forced_runs=()) for text in texts)
        alone = options.streams == 1
        count = len(texts) if alone else options.streams
        rate = 1 / _APART if alone else 1000.0
        for sent, drafts in ((plain, 0), (plain, AUTO_DRAFTS), (texts, AUTO_DRAFTS)):
            sent = tuple(sent[index % len(sent)] for index in range(count))
            workload = Workload(rate, count / rate, trace_rows=rows_of(sent), arrivals="trace")
            scenario = Scenario(workload, options.stages, device, options.shape, link, texts=sent)
            scenarios.append(replace(scenario, num_speculative_tokens=drafts))
        rows.append({"kind": kind, "layout": layout, "streams": options.streams})
    outcomes = iter(simulate_scenarios(scenarios, 1))
    for row, named in product(rows, ("no drafts", "lookup", "forced")):
        report = next(outcomes).report
        if report.failed or report.latency_s.mean is None:
            raise SystemExit(f"{row}: {report.first_error}")
        row[f"{named} s"] = round(report.latency_s.mean, 2)
        if row["streams"] > 1:
            row[f"{named} tokens/s"] = round(report.output_tokens_per_s, 1)
        if named == "forced":
            row["x lookup"] = round(row["lookup s"] / row["forced s"], 2)
            yield row


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "path", type=Path, help="GGUF file or folder of a model, or answers of before (.json)"
    )
    parser.add_argument("--letters", type=int, default=12)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--ring", default="rtx4090:100:30", help="DEVICE:MBPS:MILLISECONDS one way")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--model", dest="shape", default="qwen-7b", help="simulated")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the answers, and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path: Path = options.path
    if path.suffix == ".json":
        kept = json.loads(path.read_text(encoding="utf-8"))
        answers = [Filled(**one) for one in kept["answers"]]
    else:
        with tempfile.TemporaryDirectory() as room:
            if path.is_file():
                path = import_gguf(path, Path(room), NullCounter(), threading.Event())
            answers = list(fill_all(path, options.letters, options.dtype))
    if options.json:
        print(json.dumps({"answers": [asdict(one) for one in answers]}))
        return
    for table in (list(figures(answers)), list(replay(answers, options))):
        print(" | ".join(table[0]))
        for row in table:
            print(" | ".join(str(value) for value in row.values()))
        print()


if __name__ == "__main__":
    main()
