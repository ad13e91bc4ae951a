"""What drafts by prompt lookup bring in a ring, in virtual time.

    python -m tools.simulate_drafts                      # three RTX 4090, 100 Mbps, 30 ms one way
    python -m tools.simulate_drafts --bandwidth 1000 --latency 1 --device rtx3060 --streams 1,16
    python -m tools.simulate_drafts --json > docs/results/drafts.json

Requests are the prompts and greedy answers of a real small model that ``tools.measure_lookup``
keeps (``docs/results/lookup.json``), token by token: the head's own n-grams draft them, and the
last stage accepts what the answer goes on with. Nothing is assumed of how often drafts are right.
Since small models go round in circles, which n-grams foretell easily, an answer counts only up to
where eight of its tokens come a second time (``--loops``: whole). ``always wrong`` are answers made
up so that nearly every pass has a draft, and each draft is wrong.

So many streams come at once (1: eight requests, one after another). Shown are the mean time per
output token and output tokens/s, each also against those without drafts.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from molink.facts.drafts import AUTO_DRAFTS
from molink.head.speculation.lookup import PromptLookup
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.simulate import Outcome, simulate_all
from molink.sim.texts import Text, rows_of
from molink.sim.workload import Workload

ANSWERS = Path(__file__).parents[1] / "docs" / "results" / "lookup.json"
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


def known_texts(path: Path, *, loops: bool) -> dict[str, list[Text]]:
    """The texts of each kind."""
    found: dict[str, list[Text]] = {}
    for one in json.loads(path.read_text(encoding="utf-8"))["answers"]:
        answer = one["tokens"] if loops else until_loop(one["tokens"])
        if len(answer) >= _SHORTEST:
            text = Text(tuple(one["prompt"]), tuple(answer))
            found.setdefault(one["kind"], []).append(text)
    return found


def wrong_text(seed: int, prompt: int = 200, answer: int = 128, alphabet: int = 12) -> Text:
    """Few different tokens, so that n-grams are found; what they foretell never comes."""
    rng = random.Random(seed)
    tokens = [rng.randrange(alphabet) for _ in range(prompt)]
    lookup = PromptLookup()
    while len(tokens) < prompt + answer:
        drafts = lookup.draft(tokens, 1)
        tokens.append(rng.choice([token for token in range(alphabet) if token not in drafts]))
    return Text(tuple(tokens[:prompt]), tuple(tokens[prompt:]))


def scenarios(options: argparse.Namespace) -> Iterator[tuple[str, int, int, Scenario]]:
    """Kind, streams, drafts, and what to simulate; the one without drafts first."""
    texts = known_texts(options.answers, loops=options.loops)
    texts["always wrong"] = [wrong_text(seed) for seed in range(8)]
    link = LinkProfile(bandwidth_mbps=options.bandwidth, latency_ms=options.latency)
    for kind, mine in texts.items():
        for streams in options.streams:
            count, rate = (_ALONE, 1 / _APART) if streams == 1 else (streams, _TOGETHER)
            sent = tuple(mine[index % len(mine)] for index in range(count))
            workload = Workload(rate, count / rate, rows=rows_of(sent), arrivals="trace")
            plain = Scenario(
                workload, options.stages, options.device, options.model, link, texts=sent
            )
            for drafts in options.drafts:
                yield kind, streams, drafts, replace(plain, draft_tokens=drafts)


def figures(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each kind, number of streams and of drafts."""
    planned = list(scenarios(options))
    outcomes = simulate_all([scenario for *_, scenario in planned], options.processes)
    without: Outcome | None = None
    for (kind, streams, drafts, _), outcome in zip(planned, outcomes, strict=True):
        without = outcome if drafts == 0 else without
        assert without is not None, "the first is the one without drafts"
        report, plain = outcome.report, without.report
        before, after = plain.tpot_s.mean, report.tpot_s.mean
        if report.failed or not before or not after:
            raise SystemExit(f"{kind}, {streams} streams: {report.first_error}")
        yield {
            "kind": kind,
            "streams": streams,
            "drafts": "auto" if drafts == AUTO_DRAFTS else drafts,
            "tpot ms": round(1000 * after, 1),
            "tokens/s": round(report.output_tokens_per_s, 1) if streams > 1 else None,
            "tpot x": round(before / after, 3),
            "tokens/s x": round(report.output_tokens_per_s / plain.output_tokens_per_s, 3)
            if streams > 1
            else None,
            "drafted": outcome.drafted,
            "right": outcome.accepted,
        }


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=Path, default=ANSWERS)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--device", default="rtx4090")
    parser.add_argument("--model", default="qwen-7b")
    parser.add_argument("--bandwidth", type=float, default=100.0, help="Mbps")
    parser.add_argument("--latency", type=float, default=30.0, help="ms, one way")
    parser.add_argument("--streams", type=_numbers, default=[1, 4, 16, 64])
    parser.add_argument(
        "--drafts", type=_numbers, default=[2, 4, 8, AUTO_DRAFTS], help="-1: as many as pay"
    )
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
