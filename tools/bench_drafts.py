"""What drafts bring to real processes on an emulated network (Linux, root).

    python -m tools.bench_drafts "$(python -m tools.fetch_smollm2 FOLDER)" --kinds chat
    python -m tools.train_demo_model --mtp 300 --out FOLDER && python -m tools.bench_drafts FOLDER

A GGUF file is asked the prompts of :mod:`tools.simulate_drafts`, for as many tokens as the recorded
answers have; the bundled model, with or without an MTP layer, the last questions of held-out
conversations. Sides, ``off`` without drafts and ``auto``, have rigs of their own with a stage per
node (:mod:`tools.bench_rival`). Requests come one after another, each to all sides before the next,
and the order alternates. Texts should be those of the first side.
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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from molink.checkpoint.model_names import GGUF_SUFFIX
from tools.bench_rival import Side, run_molink
from tools.demo_model.train import select_conversations
from tools.simulate_drafts import load_texts
from tools.wan import RigError, unavailable

_COUNTERS = re.compile(
    r"^molink_scheduler_(draft_tokens(?:_accepted)?)_total(?:\{[^}]*\})? (\S+)$", re.M
)
#: Seconds until counters are reported.
_REPORT_S = 2.0
#: Shortest answer that counts, in tokens, and shortest one of a held-out conversation.
_MIN_TOKENS, _MIN_CHARACTERS = 8, 80
_COLUMNS = ("text", "drafts", "ms per token", "times shorter", "each text", "right", "same answers")

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of an answer, its tokens, and the seconds of each after the first."""

    text: str
    tokens: int
    token_s: float


async def _ask(session: aiohttp.ClientSession, url: str, body: Body) -> Answer:
    """Stream one answer from the chat route, or that for completions if there is a prompt."""
    clock, text, tokens = asyncio.get_running_loop().time, "", 0
    first = last = clock()
    route = "completions" if "prompt" in body else "chat/completions"
    fixed = {"stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{url}/v1/{route}", json=body | fixed) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if piece := choice.get("text") or choice.get("delta", {}).get("content"):
                    last = clock()
                    first = first if text else last
                    text += piece
    return Answer(text, tokens, (last - first) / max(1, tokens - 1))


async def run_client(url: str) -> None:
    """Entry point in a namespace: each line of stdin is a request, or empty for the metrics; each
    line of stdout the answer."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for line in sys.stdin:
            if body := json.loads(line):
                answer = await _ask(session, url, body)
                print(json.dumps([answer.text, answer.tokens, answer.token_s]), flush=True)
                continue
            async with session.get(f"{url}/metrics") as response:
                print(json.dumps(await response.text()), flush=True)


class Client:
    """Asks a side from one of its nodes, whose endpoints have the same port."""

    def __init__(self, side: Side, node: int = 0) -> None:
        command = [sys.executable, "-m", "tools.bench_drafts", "client", side.url]
        self._process = side.rig.run(node, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._name = side.name

    def ask(self, body: Body) -> Answer:
        """Ask a question, and wait for the end of its answer."""
        return Answer(*self._exchange(body))

    def read_metrics(self) -> str:
        """The endpoint's metrics."""
        return str(self._exchange({}))

    def _exchange(self, body: Body) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(body).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the requests to {self._name} failed")
        return json.loads(line)


def sum_counters(clients: Sequence[Client], pattern: re.Pattern[str]) -> dict[str, float]:
    """Sum a side's counters over its nodes, each of which reports its own stage.

    Counters are named by the groups of ``pattern``.
    """
    time.sleep(_REPORT_S)
    found: dict[str, float] = {}
    for client in clients:
        for name, value in pattern.findall(client.read_metrics()):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def collect_requests(options: argparse.Namespace) -> dict[str, list[Body]]:
    """Requests by kind of text."""
    common = {"temperature": options.temperature, "seed": 1}
    if options.model.suffix == GGUF_SUFFIX:
        kinds = {
            kind: [
                {**common, "prompt": text.prompt, "max_tokens": len(text.answer)} for text in texts
            ]
            for kind, texts in load_texts().items()
        }
    else:
        held = select_conversations("held_out", 20 * options.texts, options.seed)
        long = [talk for talk in held if len(talk[-1]["content"]) >= _MIN_CHARACTERS]
        kinds = {"chat": [{**common, "messages": talk[:-1], "max_tokens": 64} for talk in long]}
    wanted = options.kinds or list(kinds)
    return {kind: kinds[kind][options.skip :][: options.texts] for kind in wanted}


def format_row(
    name: str, mine: Sequence[Answer], base: Sequence[Answer], counted: Mapping[str, float]
) -> str:
    """A row of a Markdown table; ``base`` are the first side's answers to the same requests."""
    pairs = [pair for pair in zip(mine, base, strict=True) if pair[1].tokens >= _MIN_TOKENS]
    times = sorted(other.token_s / one.token_s for one, other in pairs)
    mean = statistics.mean(one.token_s for one, _ in pairs)
    before = statistics.mean(other.token_s for _, other in pairs)
    drafted, right = (counted.get(f"draft_tokens{end}", 0.0) for end in ("", "_accepted"))
    cells = (
        name,
        f"{1000 * mean:.1f}",
        f"{before / mean:.2f}",
        " ".join(f"{each:.2f}" for each in times),
        f"{right:.0f} of {drafted:.0f}" if drafted else "",
        f"{sum(one.text == other.text for one, other in pairs)} of {len(pairs)}",
    )
    return " | ".join(cells)


def measure_kind(
    kind: str, requests: Sequence[Body], clients: Mapping[str, Sequence[Client]], repeats: int
) -> None:
    """Ask all sides in turn, each at its first node, and print a row of each."""
    before = {name: sum_counters(nodes, _COUNTERS) for name, nodes in clients.items()}
    answers: dict[str, list[Answer]] = {name: [] for name in clients}
    for index, body in enumerate([*requests] * repeats):
        for name in list(clients)[:: -1 if index % 2 else 1]:
            answers[name].append(clients[name][0].ask(body))
    first = next(iter(answers.values()))
    for name, nodes in clients.items():
        after = sum_counters(nodes, _COUNTERS)
        counted = {key: value - before[name].get(key, 0.0) for key, value in after.items()}
        print(f"| {kind} | {format_row(name, answers[name], first, counted)} |", flush=True)


def measure_sides(options: argparse.Namespace) -> None:
    """Start all sides, and print the table."""
    requests = collect_requests(options)
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        clients = dict[str, list[Client]]()
        sides = list[Side]()
        for name in options.sides.split(","):
            settings = {"MOLINK_NUM_SPECULATIVE_TOKENS": name}
            side = Side(name, options.nodes, None)
            started = run_molink(side, options.model, settings, Path(place), pinned=False)
            sides.append(stack.enter_context(started))
            clients[name] = [Client(side, node) for node in range(side.nodes)]
        for side in sides:
            side.slow_down(options.mbps, options.delay_ms, options.queue)
        first = next(iter(requests.values()))[0]
        for nodes in clients.values():  # to warm the connections; nothing of it is drafted later
            nodes[0].ask({**first, "max_tokens": 16, "cache_salt": "warm"})
        print(f"| {' | '.join(_COLUMNS)} |")
        print(f"|---|---{'|---:' * (len(_COLUMNS) - 2)}|")
        for kind, some in requests.items():
            measure_kind(kind, some, clients, options.repeats)


def main() -> None:
    """Measure, and print a table as Markdown."""
    if sys.argv[1:2] == ["client"]:
        asyncio.run(run_client(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file, or a bundled model's folder")
    parser.add_argument("--sides", default="off,auto", help="numbers of drafts; the first compares")
    parser.add_argument("--kinds", type=lambda text: text.split(","), help="of texts: only these")
    parser.add_argument("--texts", type=int, default=8, help="of each kind")
    parser.add_argument("--skip", type=int, default=0, help="texts of each kind before these")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7, help="of the choice of conversations")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--delay-ms", type=float, default=30.0, help="one way")
    parser.add_argument("--queue", type=int, default=256 * 1024, help="bytes in a router")
    parser.add_argument("--nodes", type=int, default=3)
    options = parser.parse_args()
    options.model = options.model.resolve()
    reason = unavailable()
    if reason is not None:
        raise RigError(reason)
    measure_sides(options)


if __name__ == "__main__":
    main()
