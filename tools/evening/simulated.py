"""Time per token by minute on a changing evening, beside fixed configurations; simulated.

    python -m tools.evening.simulated [--seeds 3] [--rate 0.15] [--results FILE.jsonl]

The product's deciders in virtual time: K, chunks, links and placement follow what is measured. The
fixed ones have one of three link policies, K of 1, 2 or 4 and chunks of 64, 256 or 2048 rows, and
are placed once, by what is known in the beginning; the best two also without the PC that will be
hot, and without the one that will be away, as if one knew. With ``--results`` each run is kept in
that file, and not done again.

A gap between two tokens of a request counts for the minute in which it ends.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

from molink.errors import InvariantError
from molink.sim.profiles import LinkProfile
from molink.sim.simulate import disable_gc
from molink.sim.swarm_plan import ModelDescription
from molink.sim.workload import Workload
from tools.evening.story import AWAY, DELAY_MS, DURATION, HOT, MBPS, MINUTE, story
from tools.evening.swarm import Choice, Evening

MODEL = "llama-2-13b"
#: Either of the two that change is as good as the other, and better than those that stay.
DEVICES = ("rtx3060", "rtx3090", "rtx3090", "rtx3060")
PROMPT, ANSWER = 512, 64
PRODUCT = Choice("follows")
#: Those that are tried without the PCs that something happens to.
_BEST = 2
_WITHOUT = ((HOT,), (AWAY,))

Row = dict[str, Any]


def fixed() -> list[Choice]:
    """Every policy with every K and chunk."""
    return [
        Choice(f"{policy}, K {count}, chunk {chunk}", policy, count, chunk, follows=False)
        for policy, count, chunk in product(
            ("fifo", "concurrent", "adaptive"), (1, 2, 4), (64, 256, 2048)
        )
    ]


def play(choice: Choice, seed: int, rate: float) -> Row:
    """One evening: sums of gaps and tokens by minute, and what became of the requests.

    Raises:
        InvariantError: a ring broke by itself, or requests were lost.
    """
    load = Workload(rate, DURATION, seed=seed, input_tokens=PROMPT, output_tokens=ANSWER)
    evening = Evening(
        ModelDescription.from_profile(MODEL),
        DEVICES,
        LinkProfile(MBPS, DELAY_MS),
        choice,
        load.plan_requests(),
        story(),
    )
    with disable_gc():
        evening.run(2 * DURATION)
    samples = evening.clients.collect_samples(0.0)
    lost = [sample.error for sample in samples if sample.error is not None]
    if evening.trouble or lost:
        raise InvariantError(f"{choice.name}: {evening.trouble or lost[0]}")
    seconds, counts = ([0.0] * int(DURATION / MINUTE), [0] * int(DURATION / MINUTE))
    for sample in samples:
        for before, at in pairwise(sample.piece_times):
            minute = min(int(at / MINUTE), len(seconds) - 1)
            seconds[minute] += at - before
            counts[minute] += 1
    return {
        "choice": asdict(choice) | {"without": list(choice.without)},
        "seed": seed,
        "rate": rate,
        "seconds": seconds,
        "counts": counts,
        "ttft_s": fmean(sample.ttft for sample in samples),
        "placed": [
            [at, [[peer, *layers] for peer, layers in layout]] for at, layout in evening.log
        ],
    }


def mean(rows: Sequence[Row]) -> float:
    """Seconds per token, of all gaps of all rows."""
    return sum(sum(row["seconds"]) for row in rows) / sum(sum(row["counts"]) for row in rows)


def by_minute(rows: Sequence[Row]) -> list[float | None]:
    """Seconds per token in each minute."""
    found: list[float | None] = []
    for minute in range(len(rows[0]["seconds"])):
        count = sum(row["counts"][minute] for row in rows)
        found.append(sum(row["seconds"][minute] for row in rows) / count if count else None)
    return found


class Runs:
    """Plays evenings, each once."""

    def __init__(self, rate: float, keep: Path | None, processes: int) -> None:
        self._rate, self._keep, self._processes = rate, keep, processes
        text = keep.read_text(encoding="utf-8") if keep is not None and keep.exists() else ""
        self._known = [json.loads(line) for line in text.splitlines()]

    def rows(self, choices: Sequence[Choice], seeds: Sequence[int]) -> dict[str, list[Row]]:
        """Those of each choice, by its name."""
        missing = [
            (choice, seed)
            for choice, seed in product(choices, seeds)
            if self._find(choice, seed) is None
        ]
        with ProcessPoolExecutor(self._processes) as pool:
            tasks = [pool.submit(play, choice, seed, self._rate) for choice, seed in missing]
            for task in as_completed(tasks):
                self._add(task.result())
        return {
            choice.name: [row for seed in seeds if (row := self._find(choice, seed)) is not None]
            for choice in choices
        }

    def _add(self, row: Row) -> None:
        self._known.append(row)
        if self._keep is not None:
            with self._keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def _find(self, choice: Choice, seed: int) -> Row | None:
        wanted = choice.name, seed, self._rate
        return next(
            (
                row
                for row in self._known
                if (row["choice"]["name"], row["seed"], row["rate"]) == wanted
            ),
            None,
        )


def best(found: dict[str, list[Row]], count: int) -> list[str]:
    """Names of those with the least time per token."""
    return sorted(found, key=lambda name: mean(found[name]))[:count]


def knowing(choices: Sequence[Choice]) -> Iterator[Choice]:
    """The same without PCs that something will happen to."""
    for choice, without in product(choices, _WITHOUT):
        values = asdict(choice)
        names = " and ".join(f"PC {index}" for index in without)
        yield Choice(**values | {"name": f"{choice.name}, without {names}", "without": without})


def lines(product_rows: Sequence[Row], fixed_rows: Sequence[Row], name: str) -> Iterator[str]:
    """The table by minute, and the whole evening."""
    yield f"| minute | follows | {name} | ratio |"
    yield "|---|---|---|---|"
    pairs = zip(by_minute(product_rows), by_minute(fixed_rows), strict=True)
    for minute, (ours, other) in enumerate(pairs):
        if ours is not None and other is not None:
            yield f"| {minute} | {1000 * ours:.1f} | {1000 * other:.1f} | {ours / other:.2f} |"
    ours, other = mean(product_rows), mean(fixed_rows)
    yield f"| all | {1000 * ours:.1f} | {1000 * other:.1f} | {ours / other:.3f} |"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.15, help="requests per second")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, help="keeps each run, as a line of JSON")
    given = parser.parse_args()
    runs = Runs(given.rate, given.results, given.processes)
    seeds = list(range(1, given.seeds + 1))
    ours = runs.rows([PRODUCT], seeds)[PRODUCT.name]
    by_name = {choice.name: choice for choice in fixed()}
    first = runs.rows(list(by_name.values()), seeds[:1])
    leaders = [by_name[name] for name in best(first, _BEST)]
    by_name |= {choice.name: choice for choice in knowing(leaders)}
    first |= runs.rows(list(knowing(leaders)), seeds[:1])
    found = runs.rows([by_name[name] for name in best(first, _BEST)], seeds)
    [name] = best(found, 1)
    print("\n".join(lines(ours, found[name], name)))
    print()
    for each in sorted(first, key=lambda each: mean(first[each])):
        print(f"seed 1: {1000 * mean(first[each]):.1f} ms per token, {each}")
    for seed, row, other in zip(seeds, ours, found[name], strict=True):
        ratio = mean([row]) / mean([other])
        print(
            f"seed {seed}: {ratio:.3f}, first token {row['ttft_s']:.2f} and {other['ttft_s']:.2f} s"
        )
    for at, layout in ours[0]["placed"]:
        print(f"minute {at / MINUTE:.1f}: {layout}")


if __name__ == "__main__":
    main()
