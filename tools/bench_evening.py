"""A changing evening on the rig: molink as it is, beside fixed configurations. Linux and root.

    python -m tools.bench_evening [--scale 0.125] [--repeats 1] [--json FILE]

What happens is :mod:`tools.evening.story`, with all its times multiplied by ``--scale``; what
placements wait for is not, but for the configuration ``in-step``: so it shows what a whole hour
would be. Each configuration has four PCs on a rig of its own (network namespaces, links shaped):
real daemons, sockets and control plane, and stages whose compute is emulated
(:mod:`tools.evening.worker`). All run at the same time and get the same requests.

Fixed configurations have layers, ``K`` and chunks by hand; when a PC is lost, the one without
layers takes its place until it returns. A row is a part of the evening, with what the tokens that
came in it took (a time per token is that since the one before it in its stream).
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from tools.evening.requests import Answered
from tools.evening.rig import Configuration, Files, play, swarms
from tools.evening.story import DURATION, MINUTE, story
from tools.wan import RigError, unavailable

#: Before the first thing that happens, and before requests begin: processes start, in seconds.
_LEAD_S = 5.0
CONFIGURATIONS = {
    one.name: one
    for one in (
        Configuration("adaptive"),
        Configuration("in-step", in_step=True),
        # The three equal PCs; and without the one that becomes hot.
        Configuration("equal", ("0:11", "11:22", "22:32", "auto"), 3, 64),
        Configuration("cool", ("0:12", "auto", "21:32", "12:21"), 3, 64),
        # The first with other K and chunks.
        Configuration("equal-k2", ("0:11", "11:22", "22:32", "auto"), 2, 64),
        Configuration("equal-k6", ("0:11", "11:22", "22:32", "auto"), 6, 64),
        Configuration("equal-chunk256", ("0:11", "11:22", "22:32", "auto"), 3, 256),
    )
}


class Evening(msgspec.Struct, frozen=True):
    """What became of the requests of one configuration, and when its evening began."""

    begin: float
    told: Answered


#: By the name of the configuration.
Kept = dict[str, Evening]


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of one configuration's evening; times in seconds, ``ring`` and K as last seen."""

    begin: float
    per_token: float
    median: float
    p99: float
    ttft: float
    requests: int
    failed: int
    ring: str
    micro_batches: int


def slices(answered: Answered, begin: float, length: float, count: int) -> list[Slice]:
    """The evening in ``count`` parts of ``length`` seconds; later answers are in the last one."""

    def part(at: float) -> int:
        return min(count - 1, max(0, int((at - begin) / length)))

    gaps: list[list[float]] = [[] for _ in range(count)]
    firsts: list[list[float]] = [[] for _ in range(count)]
    asked, failed = [0] * count, [0] * count
    seen = [("", 0)] * count
    for sample in answered.samples:
        asked[part(sample.sent_at)] += 1
        failed[part(sample.sent_at)] += sample.error is not None
        if sample.error is None:
            firsts[part(sample.sent_at)].append(sample.ttft)
            for before, after in pairwise(sample.piece_times):
                gaps[part(after)].append(after - before)
    for look in answered.looks:
        ring = " ".join(f"{name}:{last - first}" for name, first, last in look.ring)
        seen[part(look.at)] = ring or "none", look.micro_batches
    return [
        Slice(
            index * length,
            statistics.mean(gaps[index] or [0.0]),
            statistics.median(gaps[index] or [0.0]),
            quantile(gaps[index], 0.99),
            statistics.median(firsts[index] or [0.0]),
            asked[index],
            failed[index],
            *seen[index],
        )
        for index in range(count)
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all don't exceed; 0 of none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


def whole(answered: Answered) -> dict[str, float]:
    """The evening in one: means over all tokens and requests, and how many requests failed."""
    good = [one for one in answered.samples if one.error is None]
    gaps = [gap for one in good for gap in one.itl]
    return {
        "per token, ms": 1e3 * statistics.mean(gaps),
        "median, ms": 1e3 * statistics.median(gaps),
        "p99, ms": 1e3 * quantile(gaps, 0.99),
        "longest, s": max(gaps),
        "first token, s": statistics.mean(one.ttft for one in good),
        "whole answer, s": statistics.mean(one.latency for one in good),
        "failed": len(answered.samples) - len(good),
    }


def show(
    evenings: Sequence[Mapping[str, Evening]], minutes: float, scale: float, count: int
) -> None:
    """Tables as Markdown: by parts of so many minutes, and of the whole; medians of evenings."""
    names, length = list(evenings[0]), minutes * MINUTE * scale
    parts = {
        name: [slices(one[name].told, one[name].begin, length, count) for one in evenings]
        for name in names
    }
    heads = [f"{name}: per token, ms / p99 / first token, s" for name in names]
    print(f"\n| minute | {' | '.join(heads)} | K | {names[0]}'s layers |")
    print("|---:" * (len(names) + 2) + "|---|")
    for index in range(count):
        cells = []
        for name in names:
            same = [evening[index] for evening in parts[name]]
            per_token, p99, ttft = (
                statistics.median(values)
                for values in zip(
                    *((one.per_token, one.p99, one.ttft) for one in same), strict=True
                )
            )
            failed = sum(one.failed for one in same)
            cells.append(f"{1e3 * per_token:.0f} / {1e3 * p99:.0f} / {ttft:.2f}")
            cells[-1] += f", {failed} failed" * (failed > 0)
        last = parts[names[0]][0][index]
        print(f"| {index * minutes:g} | {' | '.join(cells)} | {last.micro_batches} | {last.ring} |")
    everything = {name: [whole(one[name].told) for one in evenings] for name in names}
    figures = list(everything[names[0]][0])
    print(f"\n| | {' | '.join(figures)} |\n|---{'|---:' * len(figures)}|")
    for name, found in everything.items():
        print(f"| {name} | {' | '.join(spread([one[key] for one in found]) for key in figures)} |")
    for name in names[1:]:
        for key in ("per token, ms", "first token, s", "whole answer, s"):
            pairs = zip(everything[names[0]], everything[name], strict=True)
            print(f"{names[0]} / {name}, {key}: {spread([a[key] / b[key] for a, b in pairs])}")


def spread(values: Sequence[float]) -> str:
    """The median, and from which to which."""
    text = f"{statistics.median(values):.3g}"
    return text + (f" ({min(values):.3g}–{max(values):.3g})" if len(values) > 1 else "")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=0.125, help="of the story's times")
    parser.add_argument("--until", type=float, default=60.0, help="minute of the story to end at")
    parser.add_argument("--slice", type=float, default=2.0, help="minutes of the story in a row")
    parser.add_argument("--configurations", default="adaptive,in-step,equal,cool")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.3, help="requests a second")
    parser.add_argument("--prompt-tokens", type=int, default=160)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--files", type=Path, help="keep the model's files here: minutes less")
    parser.add_argument("--keep", type=Path, help="folder for the swarms' logs")
    parser.add_argument("--json", type=Path, help="file for all that was seen")
    parser.add_argument(
        "--again", type=Path, nargs="+", help="such files: print their tables and measure nothing"
    )
    return parser.parse_args()


def evening(
    options: argparse.Namespace, folder: Path, files: Files, seed: int
) -> Mapping[str, Evening]:
    """One evening of all configurations."""
    chosen = [CONFIGURATIONS[name] for name in options.configurations.split(",")]
    length = min(DURATION, options.until * MINUTE) * options.scale
    with swarms(chosen, folder, files, options.scale) as found:
        begin = time.perf_counter() + _LEAD_S
        order = {
            "begin": begin,
            "end": begin + length,
            "rate": options.rate,
            "prompt_tokens": options.prompt_tokens,
            "output_tokens": options.output_tokens,
            "seed": seed,
        }
        events = [event for event in story(options.scale) if event.at < length]
        print(f"[{time.strftime('%X')}] begins, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        answered = play(found, events, order)
        print(f"[{time.strftime('%X')}] is over, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        for swarm in found:
            print(swarm.configuration.name, swarm.rig.stats(), file=sys.stderr)
    return {one.name: Evening(begin, told) for one, told in zip(chosen, answered, strict=True)}


def main() -> int:
    """Measure, and print tables; the exit code."""
    options = _arguments()
    count = round(min(DURATION / MINUTE, options.until) / options.slice)
    if options.again:
        read = (path.read_bytes() for path in options.again)
        kept = [one for data in read for one in msgspec.json.decode(data, type=list[Kept])]
        show(kept, options.slice, options.scale, count)
        return 0
    if (reason := unavailable()) is not None:
        print(reason, file=sys.stderr)
        return 1
    evenings = []
    with tempfile.TemporaryDirectory(prefix="molink-evening-") as base:
        place = options.keep or Path(base)
        files = Files(options.files or Path(base))
        files.make()
        for seed in range(options.seed, options.seed + options.repeats):
            folder = place / f"evening{seed}"
            folder.mkdir(parents=True)
            try:
                evenings.append(evening(options, folder, files, seed))
            except (RigError, RuntimeError) as error:
                print(error, file=sys.stderr)
                return 1
            if options.json is not None:
                options.json.write_bytes(msgspec.json.encode(evenings))
    show(evenings, options.slice, options.scale, count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
