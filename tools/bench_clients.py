"""Four concurrent clients of the endpoint, against llama.cpp's server, one thread each.

    python -m tools.make_bench_model FOLDER
    python -m tools.bench_clients FOLDER --llama-server PATH/TO/llama-server --json

Both servers are up all the time and take turns; the figure is all output tokens by the time from
the first request to the last answer, prefill included.
"""

import argparse
import contextlib
import json
from pathlib import Path

from tools.serving.client import aggregate_rate, complete_round
from tools.serving.process import llama_server, molink_swarm
from tools.serving.rounds import compare, take_turns


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's program")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = next(options.folder.glob("*.gguf"))
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(molink_swarm(options.folder, 1))
        theirs = stack.enter_context(llama_server(options.llama_server, model, options.clients))

        def measure(url: str, index: int) -> float:
            sizes = (options.clients, options.input_tokens, options.output_tokens)
            return aggregate_rate(complete_round(url, index, *sizes))

        for url in (ours, theirs):
            measure(url, 10_000)
        found = take_turns(
            lambda index: measure(ours, index), lambda index: measure(theirs, index), options.rounds
        )
    result = {"clients": options.clients, "threads": 1, **compare(*found)}
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"{options.clients} clients: {result['molink']:.1f} tokens/s, llama-server "
            f"{result['baseline']:.1f}: {result['ratio']:.2f} x"
        )


if __name__ == "__main__":
    main()
