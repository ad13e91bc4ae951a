"""Draw how molink's schedule is built up, step by step, for docs/how-it-works.md.

    python -m tools.draw_schedule docs/schedule

Simulates one load on three PCs (RTX 4090, Qwen-7B's shape, 100 Mbps, 15 ms a hop), first as a plain
pipeline, then with one mechanism more each time. Writes a picture of a second and a half per step,
and prints the table of the page.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from molink.sim.profiles import load_link
from molink.sim.scenario import Scenario
from molink.sim.simulate import simulate_scenario
from molink.sim.timeline import Timeline, draw_timelines
from molink.sim.workload import Workload

LOAD = Workload(rate=0.8, duration=120.0, warmup=20.0, seed=1, input_tokens=1024, output_tokens=128)
LINK = "wan-100mbps-30ms"
#: Prompt rows of a chunk where molink doesn't choose them.
CHUNK = 256
#: Seconds of virtual time in the pictures.
WINDOW = (60.5, 62.0)


def schedule_steps() -> Iterator[tuple[str, Scenario]]:
    """Scenarios by title, each with one mechanism more than the one before."""
    step = Scenario.make_baseline(LOAD, "fifo", link=load_link(LINK))
    yield "whole prompts, first come, first served", step
    step = replace(step, max_num_batched_tokens=CHUNK)
    yield "chunks of the prompt", step
    step = replace(step, policy="adaptive")
    yield "decode rows go first, by weight", step
    step = replace(step, max_num_batched_tokens=0, prefill_only_batches=True, cut_through=True)
    yield "chunks are cut and sent just in time", step
    step = replace(step, micro_batches=0)
    yield "more micro-batches than stages", step
    yield "lossless packing", replace(step, compression="lossless")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    print("| | first token, s | time per token, s (p99) |\n|---|---|---|")
    for number, (title, scenario) in enumerate(schedule_steps(), start=1):
        timeline = Timeline(*WINDOW)
        report = simulate_scenario(scenario, timeline).report
        picture = draw_timelines([(f"{number}. {title}", timeline)], scenario.stages)
        (folder / f"step-{number}.svg").write_text(picture, encoding="utf-8")
        ttft, tpot = report.ttft_s, report.tpot_s
        print(f"| {number}. {title} | {ttft.mean:.2f} | {tpot.mean:.3f} ({tpot.p99:.3f}) |")


if __name__ == "__main__":
    main()
