"""What answers by a JSON schema cost in tokens/s, beside answers of the same length without one.

    python -m tools.bench_structured FOLDER --streams 16

A swarm of one PC serves the model (a folder, or a GGUF file). So many clients ask at once, for as
many tokens each, with a schema and without; both take turns. No answer ends before: under the
schemas none can be complete by then. ``text`` is a long list of any strings, in which hardly
anything is forced and nearly every token may come: it costs what masks cost. ``forms`` are many
objects with long keys, much of which is forced (``--any-white-space``: less of it).

The figure is all output tokens by the time from the first request to the last answer, prefill and
the grammar's check included; of the rounds' ratios, schema by none, the median and the span. Then
the same by CPU seconds of all of the swarm's processes, which others on the PC disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tools.measure_forms import FORM
from tools.serving.process import molink_swarm
from tools.serving.rounds import compare, take_turns

SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"type": "array", "items": {"type": "string"}, "minItems": 1000},
    "forms": {"type": "array", "items": FORM, "minItems": 100},
}


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    """Tokens of one answer."""
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {answer}")
    if answer["choices"][0]["finish_reason"] != "length":
        raise SystemExit("an answer ended before it was as long as asked for")
    return int(answer["usage"]["completion_tokens"])


async def rate(url: str, body: dict[str, Any], streams: int, seed: int) -> float:
    """Tokens/s of so many clients that ask at once."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        began = time.perf_counter()
        asked = (ask(session, url, {**body, "seed": seed + index}) for index in range(streams))
        tokens = await asyncio.gather(*asked)
        return sum(tokens) / (time.perf_counter() - began)


def cpu_s() -> float:
    """CPU seconds of the swarm's processes so far."""
    found = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--schema", choices=tuple(SCHEMAS), nargs="+", default=[*SCHEMAS])
    parser.add_argument("--any-white-space", action="store_true")
    parser.add_argument("--drafts", default="auto", help="as the setting num_speculative_tokens")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["MOLINK_NUM_SPECULATIVE_TOKENS"] = options.drafts
    plain: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Write something about orders and addresses."}],
        "max_tokens": options.tokens,
        "temperature": options.temperature,
    }
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(molink_swarm(options.model, 1, threads=options.threads))

        def measure(body: dict[str, Any], index: int, work: list[float]) -> float:
            before = cpu_s()
            found = asyncio.run(rate(url, body, options.streams, 1000 * index))
            work.append(options.streams * options.tokens / (cpu_s() - before))
            return found

        for name in options.schema:
            held = {
                **plain,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": name, "schema": SCHEMAS[name]},
                },
            }
            if options.any_white_space:
                held["structured_outputs"] = {"disable_any_whitespace": False}
            free = {**plain, "ignore_eos": True}
            for body in (held, free):
                measure(body, 999, [])
            ours, theirs = list[float](), list[float]()
            found = take_turns(
                lambda index, body=held, work=ours: measure(body, index, work),
                lambda index, body=free, work=theirs: measure(body, index, work),
                options.rounds,
            )
            told, by_cpu = compare(*found), compare(ours, theirs)
            told["by_cpu"] = by_cpu
            result = {"schema": name, "streams": options.streams, "tokens": options.tokens, **told}
            if options.json:
                print(json.dumps(result), flush=True)
                continue
            for unit, one in (("tokens/s", told), ("tokens/CPU s", by_cpu)):
                ratios = one["ratios"]
                print(
                    f"{name}: {one['molink']:.1f} {unit} with the schema, {one['baseline']:.1f} "
                    f"without: {one['ratio']:.3f} ({min(ratios)} to {max(ratios)})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
