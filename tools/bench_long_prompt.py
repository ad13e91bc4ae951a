"""Whether a long prompt stops running streams: inter-token times while it is prefilled.

    python -m tools.make_bench_model FOLDER
    python -m tools.bench_long_prompt FOLDER --json

Four streams decode; then a prompt of 4096 tokens arrives. p99 of the gaps between their tokens
while it is prefilled, by p99 before; once with chunks as molink chooses them and once, as the
baseline, with the whole prompt as one chunk. Both swarms are up all the time and take turns.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from molink.bench.report import percentile
from molink.bench.sample import Sample
from tools.serving.client import complete, make_prompt
from tools.serving.process import molink_swarm

#: Seconds for which the streams run alone first.
ALONE_S = 6.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"chunked": [], "whole": []}
    with contextlib.ExitStack() as stack:
        swarms = {
            "chunked": stack.enter_context(molink_swarm(options.folder, options.stages)),
            "whole": stack.enter_context(
                molink_swarm(options.folder, options.stages, "--chunk-tokens", "8192")
            ),
        }
        for index in range(options.rounds):
            for name, url in swarms.items():
                found[name].append(asyncio.run(_round(url, options, index)))
    result: dict[str, Any] = {"streams": options.streams, "prompt_tokens": options.prompt_tokens}
    for name, rounds in found.items():
        keys = rounds[0].keys()
        result[name] = {key: statistics.median(each[key] for each in rounds) for key in keys}
        result[name]["ratios"] = [round(each["ratio"], 2) for each in rounds]
    print(json.dumps(result, indent=2) if options.json else _table(result))


async def _round(url: str, options: argparse.Namespace, index: int) -> dict[str, float]:
    """One prompt beside the streams."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        seeds = range(index * 100, index * 100 + options.streams)
        stop = asyncio.Event()
        streams = [
            asyncio.create_task(complete(session, url, make_prompt(32, seed), 4000, stop))
            for seed in seeds
        ]
        await asyncio.sleep(ALONE_S)
        prompt = make_prompt(options.prompt_tokens, 5_000 + index)
        asked = await complete(session, url, prompt, 1)
        stop.set()
        samples = await asyncio.gather(*streams)
    begin, end = asked.sent_at, asked.first_at
    before = _gaps(samples, begin - ALONE_S / 2, begin)
    during = _gaps(samples, begin, end)
    alone, beside = percentile(before, 99), percentile(during, 99)
    return {
        "itl_p99_alone_s": alone,
        "itl_p99_beside_s": beside,
        "ratio": beside / alone,
        "prompt_ttft_s": asked.ttft,
    }


def _gaps(samples: list[Sample], begin: float, end: float) -> list[float]:
    """Gaps between tokens that overlap ``begin … end``, sorted."""
    pairs = [pair for sample in samples for pair in pairwise(sample.piece_times)]
    return sorted(later - earlier for earlier, later in pairs if later > begin and earlier < end)


def _table(result: dict[str, Any]) -> str:
    lines = []
    for name in ("chunked", "whole"):
        found = result[name]
        lines.append(
            f"{name:8} p99 between tokens: {found['itl_p99_alone_s'] * 1e3:.0f} ms alone, "
            f"{found['itl_p99_beside_s'] * 1e3:.0f} ms beside the prompt: {found['ratio']:.2f} x; "
            f"the prompt's first token after {found['prompt_ttft_s']:.1f} s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
