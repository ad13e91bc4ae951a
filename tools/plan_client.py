"""``python -m tools.plan_client URL REQUESTS PROMPT OUTPUT``: seconds per token of each request.

Requests go one after another, once the endpoint is ready; the times are printed as a JSON list.
"""

import asyncio
import json
import sys
import time
import urllib.request

from tools.serving.client import complete_all, make_prompt

_READY_S = 300.0


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def main() -> int:
    """Ask, and print; the exit code."""
    url, (requests, prompt, output) = sys.argv[1], map(int, sys.argv[2:])
    deadline = time.monotonic() + _READY_S
    while not _ready(url):
        if time.monotonic() > deadline:
            print(f"{url} was not ready within {_READY_S:.0f} s", file=sys.stderr)
            return 1
        time.sleep(0.2)
    times = []
    for _ in range(requests):
        seed = time.time_ns()
        (sample,) = asyncio.run(complete_all(url, [make_prompt(prompt, seed)], output))
        times.append(sample.tpot)
    print(json.dumps(times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
