"""What drafts bring to real texts in a ring, in virtual time.

    python -m tools.simulate_drafts                      # three RTX 4090, 100 Mbps, 30 ms one way
    python -m tools.simulate_drafts rtx3060:20:15 --streams 16
    python -m tools.simulate_drafts --candidates

Requests are prompts and greedy answers of SmolLM2-135M-Instruct (``docs/results/
draft-texts.json``, eight of each kind), token by token: the scheduler drafts, and the last stage
accepts what the answer continues with. Small models go round in circles, which lookup predicts
easily, so an answer ends where eight of its tokens come a second time. The kind ``later chat`` is
``chat`` after 96 other chats. ``lookup`` is without earlier answers; ``oracle`` then sends no draft
after the last right one: the most that better block sizes, and dropping wrong rows on their way,
could bring. With ``--fixed 1,4,15`` there are also rows for 1, 4 and 15 drafts in each pass.

``--candidates`` counts how often the best, the second and the next six candidates of lookup are
right: what sibling rows of a token tree could bring.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from molink.bench.workload import TraceRow
from molink.facts.drafts import AUTO_DRAFTS
from molink.sim.known_text import KnownText
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.simulate import SimulationOutcome, simulate_scenario
from molink.sim.workload import Workload

_TEXTS = Path(__file__).parents[1] / "docs" / "results" / "draft-texts.json"
#: Chats that come before those of ``later chat``.
_EARLIER = "earlier chat"
#: Tokens that candidates match at most, and how many are counted.
_LONGEST, _CANDIDATES = 6, 8
#: Seconds between requests that come one after another; requests/s where all come at once.
_APART_S, _TOGETHER = 120.0, 1000.0


def load_texts() -> dict[str, list[KnownText]]:
    """The recorded prompts and answers by kind."""
    found: dict[str, list[KnownText]] = {}
    for each in json.loads(_TEXTS.read_text(encoding="utf-8")):
        text = KnownText(tuple(each["prompt"]), tuple(each["answer"]))
        found.setdefault(each["kind"], []).append(text)
    return found


def build_scenario(ring: str, model: str, texts: list[KnownText], streams: int) -> Scenario:
    """A ring of three stages without drafts that serves ``texts`` one after another, or as many
    ``streams`` at once."""
    device, mbps, latency = ring.split(":")
    link = LinkProfile(bandwidth_mbps=float(mbps), latency_ms=float(latency))
    sent = tuple(texts if streams == 1 else islice(cycle(texts), streams))
    rate = 1 / _APART_S if streams == 1 else _TOGETHER
    rows = tuple(
        TraceRow(float(index), len(text.prompt), len(text.answer))
        for index, text in enumerate(sent)
    )
    workload = Workload(rate, len(sent) / rate, trace_rows=rows, arrivals="trace")
    return Scenario(workload, 3, device, model, link, texts=sent, prefix_cache=True)


def format_row(
    kind: str, name: str, outcome: SimulationOutcome, without: SimulationOutcome
) -> Iterator[str]:
    """Cells of a row of the table."""
    counted = slice(-8, None) if kind == "later chat" else slice(None)
    mean, before = (statistics.mean(side.tpots[counted]) for side in (outcome, without))
    pairs = zip(without.tpots[counted], outcome.tpots[counted], strict=True)
    times = sorted(one / two for one, two in pairs)
    yield from (kind, name, f"{1000 * mean:.1f}", f"{before / mean:.2f}")
    yield " ".join(f"{each:.2f}" for each in times)
    yield f"{outcome.accepted} of {outcome.drafted}"


def rank_candidates(tokens: Sequence[int]) -> list[int]:
    """Tokens that followed earlier occurrences: by length of the match, then the latest first."""
    found: dict[int, int] = {}
    for position in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(_LONGEST, position) and (
            tokens[position - length - 1] == tokens[-length - 1]
        ):
            length += 1
        if length > found.get(tokens[position], 0):
            found[tokens[position]] = length
    return sorted(found, key=lambda token: -found[token])


def print_candidates(kind: str, texts: Sequence[KnownText]) -> None:
    """How many tokens of the answers each candidate predicts, in percent."""
    ranks, total = Counter[int](), 0
    for text in texts:
        whole = text.prompt + text.answer
        for end in range(len(text.prompt) + 1, len(whole)):
            total += 1
            candidates = rank_candidates(whole[:end])[:_CANDIDATES]
            if whole[end] in candidates:
                ranks[min(2, candidates.index(whole[end]))] += 1
    print(f"| {kind} | {' | '.join(f'{100 * ranks[rank] / total:.1f}' for rank in range(3))} |")


def _parse_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Simulate, and print a table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ring", nargs="?", default="rtx4090:100:30", help="DEVICE:MBPS:MS one way")
    parser.add_argument("--model", default="qwen-7b")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--fixed", type=_parse_numbers, default=[], help="numbers of drafts")
    parser.add_argument("--candidates", action="store_true")
    options = parser.parse_args()
    kinds = load_texts()
    if options.candidates:
        for kind, texts in kinds.items():
            print_candidates(kind, texts)
        return
    kinds["later chat"] = kinds.pop(_EARLIER) + kinds["chat"]
    print("| text | drafts | ms per token | times shorter | each text | right |")
    print("|---|---|---:|---:|---|---:|")
    for kind, texts in kinds.items():
        plain = build_scenario(options.ring, options.model, texts, options.streams)
        auto = replace(plain, num_speculative_tokens=AUTO_DRAFTS)
        without = simulate_scenario(plain)
        lookup = replace(auto, prefix_cache=False)
        oracle = replace(lookup, oracle_drafts=True)
        sides = {"auto": auto, "lookup": lookup, "oracle": oracle}
        for count in options.fixed:
            sides[str(count)] = replace(auto, num_speculative_tokens=count)
        for name, scenario in sides.items():
            cells = format_row(kind, name, simulate_scenario(scenario), without)
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
