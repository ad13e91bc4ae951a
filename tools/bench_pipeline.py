"""Two stages of one thread each, against the same engine in one process with one thread.

    python -m tools.make_bench_model FOLDER
    python -m tools.bench_pipeline FOLDER --json

Aggregate decode rate of 8 concurrent streams: from the last stream's first token to the first
stream's end. Both swarms are up all the time and take turns.
"""

import argparse
import contextlib
import json
from pathlib import Path

from tools.serving.client import complete_round, decode_rate
from tools.serving.process import molink_swarm
from tools.serving.rounds import compare, take_turns


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        split = stack.enter_context(molink_swarm(options.folder, options.stages))
        whole = stack.enter_context(molink_swarm(options.folder, 1))

        def measure(url: str, index: int) -> float:
            sizes = (options.streams, options.input_tokens, options.output_tokens)
            return decode_rate(complete_round(url, index, *sizes))

        for url in (split, whole):
            measure(url, 10_000)
        found = take_turns(
            lambda index: measure(split, index), lambda index: measure(whole, index), options.rounds
        )
    result = {"stages": options.stages, "streams": options.streams, **compare(*found)}
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"{options.streams} streams: {result['molink']:.1f} tokens/s on {options.stages} "
            f"stages, {result['baseline']:.1f} on one: {result['ratio']:.2f} x"
        )


if __name__ == "__main__":
    main()
