"""What drafts by prompt lookup bring in a ring, in virtual time.

    python -m tools.simulate_drafts                      # three RTX 4090, 100 Mbps, 30 ms one way
    python -m tools.simulate_drafts rtx3060:1000:1 --streams 1,16 --drafts 4
    python -m tools.simulate_drafts rtx4090:100:30 rtx4090:20:20 rtx4090:1000:1 rtx3060:1000:1 \\
        --json > docs/results/drafts.json

Requests are the prompts and greedy answers of a real small model that ``tools.measure_lookup``
keeps (``docs/results/lookup.json``), token by token: the head's own n-grams draft them, and the
last stage accepts what the answer goes on with. Nothing is assumed of how often drafts are right.
Since small models go round in circles, which n-grams foretell easily, an answer counts only up to
where eight of its tokens come a second time (``--loops``: whole). ``always wrong`` are answers made
up so that nearly every pass has a draft, and each draft is wrong.

So many streams come at once (1: eight requests, one after another). Shown are the mean time per
output token and output tokens/s, and how many times better than without drafts each is; ``texts``
are the least and the most of the requests. ``auto`` lets passes of drafts go ahead of the tokens
that they assume; with ``--plain`` there is also what it brings without these. With ``--foresight``
nothing is sent beyond the first wrong draft: what cancelling the rest would bring at most.

``--draft-model`` is the shape of a draft model on the first stage's device, which is asked beside
n-grams (``model``). It guesses what ``tools.measure_guesses`` has kept of a real one; where all is
always wrong, it is, and says that it is sure by 60 percent. Or, with ``--right 0.5``, each of its
guesses is right with that chance if those before are: that is assumed then, not measured.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from molink.facts.drafts import AUTO_DRAFTS
from molink.scheduler.speculation.prompt_lookup import PromptLookup
from molink.sim.known_text import KnownText, rows_of
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.simulate import SimulationOutcome, simulate_scenarios
from molink.sim.workload import Workload

ANSWERS = Path(__file__).parents[1] / "docs" / "results" / "lookup.json"
GUESSES = ANSWERS.with_name("guesses.json")
#: Percent, of guesses that are always wrong, and how many these are.
_SAID, _GUESSED = 60, 8
_WRONG = "always wrong"
#: Tokens that an answer has twice if it goes round in circles.
LOOP = 8
#: Shorter answers tell nothing of the time per token.
_SHORTEST = 8
#: Requests that come one after another where there is one stream, and seconds between them.
_ALONE, _APART = 8, 120.0
#: Requests/s where all come at once.
_TOGETHER = 1000.0


def until_loop(tokens: Sequence[int]) -> Sequence[int]:
    """An answer up to where some of its tokens come a second time."""
    seen: set[tuple[int, ...]] = set()
    for end in range(LOOP, len(tokens) + 1):
        last = tuple(tokens[end - LOOP : end])
        if last in seen:
            return tokens[: end - LOOP]
        seen.add(last)
    return tokens


def known_texts(path: Path, *, loops: bool) -> dict[str, list[KnownText]]:
    """The texts of each kind."""
    found: dict[str, list[KnownText]] = {}
    for one in json.loads(path.read_text(encoding="utf-8"))["answers"]:
        answer = one["tokens"] if loops else until_loop(one["tokens"])
        if len(answer) >= _SHORTEST:
            text = KnownText(tuple(one["prompt"]), tuple(answer))
            found.setdefault(one["kind"], []).append(text)
    return found


def with_guesses(
    texts: dict[str, list[KnownText]], path: Path, right: float
) -> dict[str, list[KnownText]]:
    """The texts with what a draft model guesses of each; by chance if it is ``right`` so often."""
    kept = [] if right else json.loads(path.read_text(encoding="utf-8"))["answers"]
    rng, found = random.Random(1), {}
    for kind, some in texts.items():
        mine = [one["guesses"] for one in kept if one["kind"] == kind]
        if not mine:
            chance = 0.0 if kind == _WRONG else right
            mine = [[_by_chance(rng, chance) for _ in text.answer] for text in some]
        found[kind] = [
            replace(text, model_drafts=tuple(_guesses(text, guesses)))
            for text, guesses in zip(some, mine, strict=True)
        ]
    return found


def _by_chance(rng: random.Random, chance: float) -> tuple[int, list[int]]:
    """How many guesses are right, and what is said of each."""
    wrong = (at for at in range(_GUESSED) if rng.random() >= chance)
    return next(wrong, _GUESSED), [round(100 * chance) or _SAID] * _GUESSED


def _guesses(
    text: KnownText, kept: Sequence[tuple[int, Sequence[int]]]
) -> Iterator[tuple[tuple[int, ...], tuple[float, ...]]]:
    """The right tokens first, then others; the chances that they were given."""
    for at, (right, chances) in enumerate(kept):
        rest = text.answer[at : at + len(chances)]
        right = min(right, len(rest))
        others = [1 + token for token in rest[right:]]
        others += [1] * (len(chances) - len(rest))
        yield (
            (*rest[:right], *others),
            tuple(max(0.01, chance / 100) for chance in chances),
        )


def wrong_text(seed: int, prompt: int = 200, answer: int = 128, alphabet: int = 12) -> KnownText:
    """Few different tokens, so that n-grams are found; what they foretell never comes."""
    rng = random.Random(seed)
    tokens = [rng.randrange(alphabet) for _ in range(prompt)]
    lookup = PromptLookup()
    while len(tokens) < prompt + answer:
        drafts = lookup.propose_drafts(tokens, 1).tokens
        tokens.append(rng.choice([token for token in range(alphabet) if token not in drafts]))
    return KnownText(tuple(tokens[:prompt]), tuple(tokens[prompt:]))


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared, and what to simulate."""

    ring: str
    kind: str
    streams: int
    drafts: int
    ahead: bool
    scenario: Scenario

    @property
    def name(self) -> str | int:
        """Of what is drafted, for the table."""
        if self.drafts != AUTO_DRAFTS:
            return self.drafts
        if self.scenario.draft_model:
            return "model"
        return "auto" if self.ahead else "plain"


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The one without drafts comes before those with them."""
    texts = known_texts(options.answers, loops=options.loops)
    texts[_WRONG] = [wrong_text(seed) for seed in range(8)]
    if options.draft_model:
        texts = with_guesses(texts, options.guesses, options.right)
    kinds = [kind for kind in texts if not options.kinds or kind in options.kinds]
    for ring, kind, streams in product(options.rings, kinds, options.streams):
        device, bandwidth, latency = ring.split(":")
        link = LinkProfile(bandwidth_mbps=float(bandwidth), latency_ms=float(latency))
        count, rate = (_ALONE, 1 / _APART) if streams == 1 else (streams, _TOGETHER)
        sent = tuple(islice(cycle(texts[kind]), count))
        workload = Workload(rate, count / rate, trace_rows=rows_of(sent), arrivals="trace")
        plain = Scenario(workload, options.stages, device, options.model, link, texts=sent)
        plain = replace(plain, oracle_drafts=options.foresight)
        for drafts in options.drafts:
            drafting = replace(plain, num_speculative_tokens=drafts)
            if drafts == AUTO_DRAFTS and options.plain:
                yield Case(
                    ring, kind, streams, drafts, False, replace(drafting, lookahead_volumes=0)
                )
            yield Case(ring, kind, streams, drafts, True, drafting)
            if drafts == AUTO_DRAFTS and options.draft_model:
                asking = replace(drafting, draft_model=options.draft_model)
                yield Case(ring, kind, streams, drafts, True, asking)


def figures(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each case."""
    planned = list(cases(options))
    outcomes = simulate_scenarios([case.scenario for case in planned], options.processes)
    without: SimulationOutcome | None = None
    for case, outcome in zip(planned, outcomes, strict=True):
        without = outcome if case.drafts == 0 else without
        assert without is not None, "the first is the one without drafts"
        report, plain = outcome.report, without.report
        before, after = plain.tpot_s.mean, report.tpot_s.mean
        if report.failed or not before or not after:
            raise SystemExit(f"{case.kind}, {case.streams} streams: {report.first_error}")
        together = case.streams > 1
        rate = report.output_tokens_per_s
        times = [one / other for one, other in zip(without.tpots, outcome.tpots, strict=True)]
        yield {
            "ring": case.ring,
            "kind": case.kind,
            "streams": case.streams,
            "drafts": case.name,
            "tpot ms": round(1000 * after, 1),
            "tpot x": round(before / after, 3),
            "texts": f"{min(times):.2f}–{max(times):.2f}",
            "tokens/s": round(rate, 1) if together else None,
            "tokens/s x": round(rate / plain.output_tokens_per_s, 3) if together else None,
            "drafted": outcome.drafted,
            "right": outcome.accepted,
        }


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "rings", nargs="*", default=["rtx4090:100:30"], help="DEVICE:MBPS:MILLISECONDS one way"
    )
    parser.add_argument("--answers", type=Path, default=ANSWERS)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--model", default="qwen-7b")
    parser.add_argument("--streams", type=_numbers, default=[1, 4, 16, 64])
    parser.add_argument(
        "--drafts", type=_numbers, default=[2, 4, 8, AUTO_DRAFTS], help="-1: as many as pay"
    )
    parser.add_argument("--plain", action="store_true", help="also auto with nothing ahead")
    parser.add_argument("--foresight", action="store_true")
    parser.add_argument("--draft-model", default="", help="a model of configs/models, or a file")
    parser.add_argument("--right", type=float, default=0.0, help="share of guesses, assumed")
    parser.add_argument("--kinds", type=lambda text: text.split(","), help="of texts: only these")
    parser.add_argument("--guesses", type=Path, default=GUESSES)
    parser.add_argument("--loops", action="store_true", help="whole answers")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.drafts = [0, *(count for count in options.drafts if count)]
    rows = list(figures(options))
    if options.json:
        print(json.dumps(rows))
        return
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join("" if value is None else str(value) for value in row.values()))


if __name__ == "__main__":
    main()
