"""What drafts bring to real processes over an emulated network. Linux and root.

    python -m tools.bench_drafts SmolLM2-135M-Instruct.Q4_1.gguf --draft-model FOLDER
    python -m tools.bench_drafts SmolLM2-135M-Instruct.Q4_1.gguf --sides none,auto --kinds chat

Sides, each a swarm on a rig of its own as in :mod:`tools.bench_rival`: ``none``; ``plain``, up to
``--plain`` drafts in each pass and nothing ahead; ``auto``, the product as it is; ``model``, the
same with a draft model. The requests are prompts that ``tools.measure_lookup`` keeps, for as many
tokens as the answer kept there has until it goes round in circles. They come one after another, a
prompt to all sides before the next. Shown for each kind of text: the time per output token, how
many times shorter it is than that of the first side (in brackets the least and the most of the
texts), the share of drafts that were right, how long the draft model took of that time, and how
many answers are the first side's to the letter.
"""

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tools.bench_rival import Side, molink
from tools.serving.client import complete
from tools.simulate_drafts import ANSWERS, known_texts
from tools.wan import RigError, unavailable

_COUNTER = re.compile(r"^molink_(head_(?:draft|guess)\w+)_total(?:\{[^}]*\})? (\S+)$")
_COLUMNS = ("text", "drafts", "ms per token", "times shorter", "right", "guessing", "same answers")


@dataclass(frozen=True, slots=True)
class Answered:
    """One request: output tokens, seconds for each, the text, what the head has counted for it."""

    tokens: int
    tpot: float
    text: str
    counted: dict[str, float]


def settings_of(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """What of molink's settings each side has, by name."""
    return {
        "none": {"MOLINK_NUM_SPECULATIVE_TOKENS": "off"},
        "plain": {"MOLINK_NUM_SPECULATIVE_TOKENS": str(options.plain)},
        "auto": {"MOLINK_NUM_SPECULATIVE_TOKENS": "auto"},
        "model": {
            "MOLINK_NUM_SPECULATIVE_TOKENS": "auto",
            "MOLINK_DRAFT_MODEL": options.draft_model,
        },
    }


def counters(metrics: str) -> dict[str, float]:
    """What a ``/metrics`` page has counted of drafts, over all heads."""
    found = dict[str, float]()
    for match in filter(None, map(_COUNTER.match, metrics.splitlines())):
        found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def row(kind: str, name: str, mine: Sequence[Answered], others: Sequence[Answered]) -> str:
    """Of a Markdown table; ``others`` are the first side's answers to the same prompts."""
    times = [other.tpot / one.tpot for one, other in zip(mine, others, strict=True)]
    mean, before = (statistics.mean(one.tpot for one in some) for some in (mine, others))
    drafted, right, guessing = (
        sum(one.counted.get(f"head_{counter}", 0.0) for one in mine)
        for counter in ("num_speculative_tokens", "draft_tokens_accepted", "guess_seconds")
    )
    same = sum(one.text == other.text for one, other in zip(mine, others, strict=True))
    cells = (
        kind,
        name,
        f"{1000 * mean:.1f}",
        f"{before / mean:.2f} ({min(times):.2f}–{max(times):.2f})",
        f"{right / drafted:.0%}" if drafted else "",
        f"{1000 * guessing / sum(one.tokens for one in mine):.1f}" if guessing else "",
        f"{same} of {len(mine)}",
    )
    return f"| {' | '.join(cells)} |"


async def _answer(url: str, prompt: Sequence[int], tokens: int) -> dict[str, object]:
    pieces = list[str]()
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def counted() -> dict[str, float]:
            async with session.get(f"{url}/metrics") as response:
                return counters(await response.text())

        before = await counted()
        sample = await complete(session, url, list(prompt), tokens, pieces=pieces)
        await asyncio.sleep(2.0)  # counters come with the next report
        after = await counted()
    return {
        "tokens": sample.output_tokens,
        "tpot": sample.tpot,
        "text": "".join(pieces),
        "counted": {name: count - before.get(name, 0.0) for name, count in after.items()},
    }


def ask(side: Side, prompt: Sequence[int], tokens: int) -> Answered:
    """Send a request from the side's first node."""
    command = [sys.executable, "-m", "tools.bench_drafts", "client", side.url, str(tokens)]
    process = side.rig.run(0, [*command, json.dumps(prompt)], stdout=subprocess.PIPE)
    told, _ = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the request to {side.name} failed")
    return Answered(**json.loads(told))


def measure(sides: Sequence[Side], options: argparse.Namespace) -> None:
    """Ask, and print the rows of each kind of text as they come."""
    texts = known_texts(options.answers, loops=False)
    kinds = {kind: some for kind, some in texts.items() if kind in (options.kinds or texts)}
    for side in sides:
        ask(side, next(iter(texts.values()))[-1].prompt, 8)
    for side in sides:
        side.slow_down(options.mbps, options.delay_ms, options.queue)
    for kind, some in kinds.items():
        answers: dict[str, list[Answered]] = {side.name: [] for side in sides}
        for index, text in enumerate(some[options.skip : options.skip + options.texts]):
            tokens = min(len(text.answer), options.output_tokens)
            for side in sides[:: -1 if index % 2 else 1]:
                answers[side.name].append(ask(side, text.prompt, tokens))
        for name, mine in answers.items():
            print(row(kind, name, mine, answers[sides[0].name]), flush=True)


def main() -> None:
    """Measure, and print a table as Markdown."""
    if sys.argv[1:2] == ["client"]:
        url, tokens, prompt = sys.argv[2:5]
        print(json.dumps(asyncio.run(_answer(url, json.loads(prompt), int(tokens)))))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="of the answers")
    parser.add_argument("--draft-model", default="", help="of the side `model`")
    parser.add_argument("--sides", default="none,plain,auto,model", help="the first is compared to")
    parser.add_argument("--plain", type=int, default=8, help="drafts of the side `plain`")
    parser.add_argument("--answers", type=Path, default=ANSWERS)
    parser.add_argument("--kinds", type=lambda text: text.split(","), help="of texts: only these")
    parser.add_argument("--texts", type=int, default=2, help="of each kind")
    parser.add_argument("--skip", type=int, default=0, help="texts of each kind before these")
    parser.add_argument("--output-tokens", type=int, default=64, help="at most")
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--delay-ms", type=float, default=30.0, help="one way")
    parser.add_argument("--queue", type=int, default=256 * 1024, help="bytes in a router")
    parser.add_argument("--nodes", type=int, default=3)
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        raise RigError(reason)
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        settings = settings_of(options)
        sides = [
            stack.enter_context(
                molink(
                    Side(name, options.nodes, None),
                    options.model,
                    settings[name],
                    Path(place),
                    pinned=False,
                )
            )
            for name in options.sides.split(",")
        ]
        print(f"| {' | '.join(_COLUMNS)} |")
        print(f"|---|---{'|---:' * (len(_COLUMNS) - 2)}|")
        measure(sides, options)


if __name__ == "__main__":
    main()
