"""What drafts bring to real texts in a ring, in virtual time.

    python -m tools.simulate_drafts                      # three RTX 4090, 100 Mbps, 30 ms one way
    python -m tools.simulate_drafts rtx3060:20:15 --streams 16

Requests are 32 prompts and greedy answers of SmolLM2-135M-Instruct (``docs/results/
draft-texts.json``), token by token: the scheduler drafts, and the last stage accepts what the
answer continues with. Small models go round in circles, which lookup predicts easily, so an answer
ends where eight of its tokens come a second time. ``oracle`` sends no draft after the last right
one: the most that better block sizes, and dropping wrong rows on their way, could bring.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
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
    return Scenario(workload, 3, device, model, link, texts=sent)


def format_row(
    kind: str, name: str, outcome: SimulationOutcome, without: SimulationOutcome
) -> Iterator[str]:
    """Cells of a row of the table."""
    mean, before = (statistics.mean(side.tpots) for side in (outcome, without))
    times = sorted(one / two for one, two in zip(without.tpots, outcome.tpots, strict=True))
    yield from (kind, name, f"{1000 * mean:.1f}", f"{before / mean:.2f}")
    yield " ".join(f"{each:.2f}" for each in times)
    yield f"{outcome.accepted} of {outcome.drafted}"


def main() -> None:
    """Simulate, and print a table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ring", nargs="?", default="rtx4090:100:30", help="DEVICE:MBPS:MS one way")
    parser.add_argument("--model", default="qwen-7b")
    parser.add_argument("--streams", type=int, default=1)
    options = parser.parse_args()
    print("| text | drafts | ms per token | times shorter | each text | right |")
    print("|---|---|---:|---:|---|---:|")
    for kind, texts in load_texts().items():
        plain = build_scenario(options.ring, options.model, texts, options.streams)
        auto = replace(plain, num_speculative_tokens=AUTO_DRAFTS)
        without = simulate_scenario(plain)
        for name, scenario in (("auto", auto), ("oracle", replace(auto, oracle_drafts=True))):
            cells = format_row(kind, name, simulate_scenario(scenario), without)
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
