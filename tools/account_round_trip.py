"""Where the time of a token goes on an emulated network (Linux, root).

    python -m tools.account_round_trip "$(python -m tools.fetch_smollm2 FOLDER)"

One stream without drafts, in a ring of daemons with a stage per node (:mod:`tools.bench_rival`).
The time per token as the client sees it is split into the configured delays, what the emulation
adds to these (idle round trips of small datagrams), the wire (rows by the rate), the stages'
steps, and the rest: event loops, threads, encryption, kernel, scheduler. The CPU time of the three
workers outside steps may exceed the rest, since it includes work that no token waits for, such as
reports and signs of life. Steps are wall time: on a PC that does other work, these rows tell
nothing.
"""

import argparse
import re
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tools.bench_drafts import Client, sum_counters
from tools.bench_rival import Side, run_molink
from tools.simulate_drafts import load_texts
from tools.wan import RigError, unavailable
from tools.wan.check import run_probe

_COUNTER = re.compile(
    r"^molink_(stage_compute_seconds|stage_steps|link_packed_bytes)_total\{[^}]*\} (\S+)$", re.M
)
#: Seconds of a probe.
_PROBE_S = 2.0


@dataclass(slots=True)
class Usage:
    """CPU seconds and context switches of processes."""

    user_s: float = 0.0
    system_s: float = 0.0
    switches: int = 0

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(
            self.user_s - other.user_s,
            self.system_s - other.system_s,
            self.switches - other.switches,
        )


def read_usage(side: Side) -> Usage:
    """CPU use of the workers of all nodes."""
    found = Usage()
    for index in range(side.nodes):
        listed = subprocess.check_output(["ip", "netns", "pids", side.rig.namespace(index)])
        for process in map(psutil.Process, map(int, listed.split())):
            if "molinkd.worker" in process.cmdline():
                times = process.cpu_times()
                found.user_s += times.user
                found.system_s += times.system
                found.switches += process.num_ctx_switches().voluntary
    return found


def measure_rows(side: Side, options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """The parts of a token's time in milliseconds, from the whole to the smallest."""
    clients = [Client(side, node) for node in range(side.nodes)]
    client = clients[0]
    prompts = [text.prompt for text in load_texts()["chat"]][: options.texts]
    body = {"temperature": 0, "max_tokens": options.tokens, "ignore_eos": True}
    for prompt in prompts:  # so that they are cached
        client.ask({**body, "prompt": prompt, "max_tokens": 2})
    before, used = sum_counters(clients, _COUNTER), read_usage(side)
    answers = [client.ask({**body, "prompt": prompt}) for prompt in prompts]
    spent = read_usage(side) - used
    after = sum_counters(clients, _COUNTER)
    count = {name: value - before[name] for name, value in after.items()}
    tokens = sum(answer.tokens for answer in answers)
    total = 1000 * statistics.mean(answer.token_s for answer in answers)
    yield "token, as the client sees it", total
    delays = side.nodes * options.delay_ms
    hops = [
        run_probe(side.rig, "ping", _PROBE_S, index, (index + 1) % side.nodes)["p50"] / 2
        for index in range(side.nodes)
    ]
    wire = count["link_packed_bytes"] / tokens * 8 / (1000 * options.mbps)
    steps = 1000 * count["stage_compute_seconds"] / tokens
    yield f"{side.nodes} delays", delays
    yield "emulation", sum(hops) - delays
    yield "wire", wire
    yield f"{side.nodes} steps", steps
    yield "rest", total - sum(hops) - wire - steps
    yield "CPU outside steps, user", 1000 * spent.user_s / tokens - steps
    yield "CPU outside steps, system", 1000 * spent.system_s / tokens
    yield "waits of threads (number)", spent.switches / tokens
    yield "steps (number)", count["stage_steps"] / tokens


def main() -> None:
    """Measure, and print a table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file, or a folder")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--delay-ms", type=float, default=30.0, help="one way")
    parser.add_argument("--queue", type=int, default=256 * 1024, help="bytes in a router")
    parser.add_argument("--nodes", type=int, default=3)
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        raise RigError(reason)
    side = Side("molink", options.nodes, None)
    with (
        tempfile.TemporaryDirectory() as place,
        run_molink(side, options.model.resolve(), {}, Path(place), pinned=False),
    ):
        side.slow_down(options.mbps, options.delay_ms, options.queue)
        print("| | ms |\n|---|---:|")
        for name, value in measure_rows(side, options):
            print(f"| {name} | {value:.2f} |", flush=True)


if __name__ == "__main__":
    main()
