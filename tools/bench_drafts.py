"""What drafts bring to a chat on an emulated network (Linux, root).

    python -m tools.train_demo_model --mtp 300 --out FOLDER
    python -m tools.bench_drafts FOLDER

Asks questions of held-out conversations of the bundled model, one after another, by the chat
route. Sides take turns, each on a rig of its own with a stage per node (:mod:`tools.bench_rival`):
``off``, without drafts; ``lookup``, the bundled model with default settings; ``mtp``, the same
model with an MTP layer in FOLDER. Texts should be those of the first side.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tools.bench_rival import Side, run_molink
from tools.demo_model.corpus import Conversation
from tools.demo_model.train import select_conversations
from tools.train_demo_model import FOLDER
from tools.wan import RigError, unavailable

_COUNTERS = re.compile(
    r"^molink_scheduler_(draft_tokens(?:_accepted)?|volumes)_total(?:\{[^}]*\})? (\S+)$", re.M
)
#: Shortest answer that counts, in tokens, and shortest one of a held-out conversation.
_MIN_TOKENS, _MIN_CHARACTERS = 12, 80


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of an answer, its tokens, and the seconds of each after the first."""

    text: str
    tokens: int
    token_s: float


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    clock, text, tokens = asyncio.get_running_loop().time, "", 0
    first = last = clock()
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    last = clock()
                    first = first if text else last
                    text += piece
    return Answer(text, tokens, (last - first) / max(1, tokens - 1))


async def run_client(url: str, talks: Sequence[Conversation], sampling: dict[str, Any]) -> None:
    """Entry point in a namespace: ask, and print the answers and counters as JSON."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        fixed = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        answers = [
            await _ask(session, url, {**fixed, **sampling, "messages": talk}) for talk in talks
        ]
        await asyncio.sleep(2.0)  # counters come with the next report
        async with session.get(f"{url}/metrics") as response:
            counted = dict(_COUNTERS.findall(await response.text()))
    print(json.dumps({"answers": [asdict(each) for each in answers], "counted": counted}))


def choose_talks(count: int, seed: int) -> list[Conversation]:
    """Held-out conversations up to their last question, which has a longer answer."""
    held = select_conversations("held_out", 20 * count, seed)
    return [talk[:-1] for talk in held if len(talk[-1]["content"]) >= _MIN_CHARACTERS][:count]


def measure_side(side: Side, talks: Sequence[Conversation], sampling: dict[str, Any]) -> Any:
    """Ask from the side's first node."""
    command = [sys.executable, "-m", "tools.bench_drafts", "client", side.url]
    process = side.rig.run(
        0, [*command, json.dumps(talks), json.dumps(sampling)], stdout=subprocess.PIPE
    )
    output, _ = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the requests to {side.name} failed")
    return json.loads(output)


def print_row(name: str, found: Any, base: Any) -> None:
    """A row of a Markdown table; ``base`` is the first side's."""
    kept = [at for at, one in enumerate(base["answers"]) if one["tokens"] >= _MIN_TOKENS]
    mine, other = ([side["answers"][at] for at in kept] for side in (found, base))
    times = [two["token_s"] / one["token_s"] for one, two in zip(mine, other, strict=True)]
    mean, before = (statistics.mean(one["token_s"] for one in some) for some in (mine, other))
    counted = {key: float(value) for key, value in found["counted"].items()}
    drafted, right = (counted.get(f"draft_tokens{end}", 0.0) for end in ("", "_accepted"))
    same = sum(one["text"] == two["text"] for one, two in zip(mine, other, strict=True))
    cells = (
        name,
        f"{1000 * mean:.1f}",
        f"{before / mean:.2f} ({min(times):.2f}–{max(times):.2f})",
        f"{right:.0f} of {drafted:.0f}" if drafted else "",
        f"{same} of {len(mine)}",
    )
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measure, and print a table as Markdown."""
    if sys.argv[1:2] == ["client"]:
        url, talks, sampling = sys.argv[2:5]
        asyncio.run(run_client(url, json.loads(talks), json.loads(sampling)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of tools.train_demo_model --mtp")
    parser.add_argument("--sides", default="off,lookup,mtp", help="the first is compared to")
    parser.add_argument("--talks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--delay-ms", type=float, default=30.0, help="one way")
    parser.add_argument("--queue", type=int, default=256 * 1024, help="bytes in a router")
    parser.add_argument("--nodes", type=int, default=3)
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        raise RigError(reason)
    models = {"off": FOLDER, "lookup": FOLDER, "mtp": options.folder.resolve()}
    talks = choose_talks(options.talks, options.seed)
    sampling = {"temperature": options.temperature, "seed": 1, "max_tokens": options.max_tokens}
    base: Any = None
    print("| drafts | ms per token | times shorter | right | same answers |")
    print("|---|---:|---:|---:|---:|")
    for name in options.sides.split(","):
        settings = {"MOLINK_NUM_SPECULATIVE_TOKENS": "off" if name == "off" else "auto"}
        side = Side(name, options.nodes, None)
        with (
            tempfile.TemporaryDirectory() as place,
            run_molink(side, models[name], settings, Path(place), pinned=False),
        ):
            side.slow_down(options.mbps, options.delay_ms, options.queue)
            measure_side(side, talks[:1], sampling)
            found = measure_side(side, talks, sampling)
        base = base or found
        print_row(name, found, base)


if __name__ == "__main__":
    main()
