"""What the prefix cache saves: time to first token with a shared prompt, second request by first.

    python -m tools.make_bench_model FOLDER
    python -m tools.bench_prefix FOLDER --json

Each round has a new shared prompt of 1000 tokens; both requests end it with 8 tokens of their own.
"""

import argparse
import asyncio
import json
from pathlib import Path

from tools.serving.client import complete_all, make_prompt
from tools.serving.process import molink_swarm
from tools.serving.rounds import compare


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shared-tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with molink_swarm(options.folder, 1) as url:

        def ttft(shared: str, seed: int) -> float:
            prompt = shared + make_prompt(8, seed)
            return asyncio.run(complete_all(url, [prompt], 2))[0].ttft

        ttft(make_prompt(options.shared_tokens, 10_000), 0)
        first, second = [], []
        for index in range(options.rounds):
            shared = make_prompt(options.shared_tokens, index)
            first.append(ttft(shared, 2 * index))
            second.append(ttft(shared, 2 * index + 1))
    found = compare(second, first)
    result = {
        "shared_tokens": options.shared_tokens,
        "first_ttft_s": found["baseline"],
        "second_ttft_s": found["molink"],
        "ratio": found["ratio"],
        "ratios": found["ratios"],
    }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"first {result['first_ttft_s'] * 1e3:.0f} ms, second "
            f"{result['second_ttft_s'] * 1e3:.0f} ms: {result['ratio']:.3f} x"
        )


if __name__ == "__main__":
    main()
