"""molink compared with llama.cpp's RPC on the same emulated network (Linux, root).

    python -m tools.make_bench_model FOLDER
    python -m tools.bench_rival FOLDER --llama PATH/TO/llama.cpp/bin [--mbps 5,20,100] [--repeats 2]
        [--delay-ms 15,50,100] [--loss 0,0.005] [--out docs/results/links.json]
    python -m tools.bench_rival --render

Each side has its own rig (:mod:`tools.wan`) with one namespace and one compute thread per node:
molink's daemons with default settings; molink with a plain link policy (``plain``), or also with
whole prompts in order of arrival (``fifo``); llama.cpp's server on the first node with RPC servers
on the others and the same weights as f16 GGUF. All start once over a fast network, which then takes
each rate, delay and loss in turn; a short request before each lets all sides notice. Each side's
first node sends the same requests at the same times; sides take turns, and the order alternates
between repeats. No side sees a prompt twice.

``--out`` records each link's cell as soon as it is measured, and ``--render`` makes the document's
table from that. llama.cpp may answer fewer loads and shorter ones: its whole answers are computed
from its first tokens and its time per token.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp
import msgspec
import psutil

from molink.bench.report import Sample
from molink.facts.layer_range import format_layers
from tools.serving.client import make_prompt, send_completion
from tools.serving.document import replace_table
from tools.serving.link_table import (
    FIGURES,
    Cell,
    Figures,
    Link,
    format_rows,
    format_table,
    order_links,
    read_cells,
    record_cell,
)
from tools.serving.process import ENDPOINT, INVITE, OPENED, START_S, wait_for
from tools.wan import Node, Rig, RigError, unavailable

#: Ports of llama.cpp's RPC servers and of its server.
_RPC_PORT, _HTTP_PORT = 50052, 8080
#: Link features off.
PLAIN = {
    "MOLINK_LINK_POLICY": "concurrent",
    "MOLINK_CUT_THROUGH": "false",
    "MOLINK_COMPRESSION": "none",
    "MOLINK_PREFILL_ONLY_BATCHES": "false",
    "MOLINK_KEEP_WARM": "false",
}
#: Also whole prompts in order of arrival.
FIFO = {**PLAIN, "MOLINK_LINK_POLICY": "fifo", "MOLINK_MAX_NUM_BATCHED_TOKENS": "4096"}
LLAMA = "llama.cpp RPC"
RESULTS, DOCUMENT = Path("docs/results/links.json"), Path("docs/performance.md")
#: More requests than a load has: prompts of loads with other seeds differ.
_MAX_REQUESTS = 10_000
#: Prompt and answer of the requests before each link's loads, in tokens.
_WARM_PROMPT, _WARM_OUTPUT = 32, 3


def sides_of_molink(nodes: int) -> dict[str, dict[str, str]]:
    """Settings of molink's sides by name."""
    as_many_as_stages = {"MOLINK_MICRO_BATCHES": str(nodes)}
    return {"molink": {}, "plain": PLAIN | as_many_as_stages, "fifo": FIFO | as_many_as_stages}


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson requests: ``rate`` per second, mean sizes in tokens."""

    requests: int
    rate: float
    prompt_tokens: int
    output_tokens: int
    seed: int


class Side:
    """One system on its own rig."""

    def __init__(self, name: str, nodes: int, cores: float | None) -> None:
        self.name, self.nodes = name, nodes
        self.rig = Rig([Node(f"pc{index}") for index in range(nodes)], cores=cores)
        self.url = ""
        self._logs: list[Path] = []

    def run(
        self, index: int, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """Start a program on a node, with its output in ``log``."""
        with log.open("wb") as output:
            return self.rig.run(
                index,
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )

    def slow_down(self, mbps: float, delay_ms: float, queue: int, loss: float = 0.0) -> None:
        """Give every node this connection; ``queue`` in bytes, ``loss`` as a share of packets."""
        for index in range(self.nodes):
            self.rig.change(
                index,
                up_mbps=mbps,
                down_mbps=mbps,
                delay_ms=delay_ms,
                queue_bytes=queue,
                loss=loss,
            )

    def measure(self, load: Load) -> list[Sample]:
        """Send a load from the first node and return its samples."""
        command = [sys.executable, "-m", "tools.bench_rival", "client", self.url]
        process = self.rig.run(
            0, [*command, json.dumps(asdict(load))], stdout=subprocess.PIPE, cwd=_ROOT
        )
        output, _ = process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"the requests to {self.name} failed")
        return msgspec.json.decode(output, type=list[Sample])


_ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def run_molink(
    side: Side, model: Path, environment: Mapping[str, str], folder: Path, *, pinned: bool
) -> Iterator[Side]:
    """Run a swarm with a stage per node; ``pinned`` splits layers evenly by hand."""
    name, nodes = side.name, side.nodes
    layers = _like_shares(model, nodes) if pinned else ["auto"] * nodes
    with side.rig:
        first = ["up", "--model", str(model), "--min-stages", str(nodes)]
        token = ""
        for index in range(nodes):
            home, log = folder / f"{name} {index}", folder / f"{name} {index}.log"
            verb = first if index == 0 else ["join", token]
            common = ["--threads", "1", "--device", "cpu", "--stage", layers[index]]
            command = [sys.executable, "-m", "molinkd", *verb, *common]
            # A random model repeats itself, so drafts would be right too often.
            own = {"MOLINK_NUM_SPECULATIVE_TOKENS": "off", **environment}
            own |= {"MOLINK_HOME": str(home), "MOLINK_REPLICATE_MODELS": "false"}
            own |= {"MOLINK_STANDBY_WORKER": "false"}
            process = side.run(index, command, log, own)
            if index == 0:
                wait_for(log, OPENED, process)
                invited = folder / f"{name} invite.log"
                side.run(0, INVITE, invited, own).wait(START_S)
                token = invited.read_text(encoding="utf-8").strip()
                side.url = f"http://127.0.0.1:{wait_for(log, ENDPOINT, process)}"
        _wait_ready(side, f"{side.url}/readyz", folder)
        _wait_for_stages(side, nodes, folder / f"{name} 0")
        yield side


def _like_shares(model: Path, nodes: int) -> list[str]:
    """Even layers per node for ``--stage``."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    cuts = [config["num_hidden_layers"] * index // nodes for index in range(nodes + 1)]
    return [format_layers(layers) for layers in itertools.pairwise(cuts)]


@contextlib.contextmanager
def run_llama(side: Side, binaries: Path, model: Path, slots: int, folder: Path) -> Iterator[Side]:
    """Run llama.cpp's server with layers on all nodes."""
    nodes = side.nodes
    with side.rig:
        server = next(binaries.glob("*rpc-server"))
        where = []
        for index in range(1, nodes):
            command = [str(server), "-H", side.rig.address(index)]
            side.run(index, [*command, "-p", str(_RPC_PORT), "-t", "1"], folder / f"rpc{index}", {})
            where.append(f"{side.rig.address(index)}:{_RPC_PORT}")
        time.sleep(2.0)
        command = [str(binaries / "llama-server"), "-m", str(model), "--rpc", ",".join(where)]
        # Offloaded layers go to the RPC servers; the first node keeps its share.
        split = ",".join(["1"] * (nodes - 1))
        layers = str(round(24 * (nodes - 1) / nodes))
        command += ["-ngl", layers, "-ts", split, "-t", "1", "-tb", "1", "-np", str(slots)]
        command += ["-c", str(2048 * slots), "--port", str(_HTTP_PORT), "--no-webui"]
        # No prompt comes twice: copying caches of old ones over the network would only delay.
        command += ["--cache-ram", "0"]
        side.run(0, command, folder / "llama-server", {})
        side.url = f"http://127.0.0.1:{_HTTP_PORT}"
        _wait_ready(side, f"{side.url}/health", folder)
        yield side


def _wait_ready(side: Side, url: str, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        asked = side.rig.run(
            0,
            ["curl", "-s", "-o", os.devnull, "-w", "%{http_code}", "-m", "5", url],
            stdout=subprocess.PIPE,
        )
        if asked.communicate()[0] == b"200":
            return
        time.sleep(0.5)
    said = [
        f"{log.name}:\n{log.read_text(encoding='utf-8', errors='replace')[-2000:]}"
        for log in sorted(folder.glob(f"{side.name}*.log"))
    ]
    raise RuntimeError("\n".join([f"{side.name} was not ready within {START_S:.0f} s", *said]))


def _wait_for_stages(side: Side, stages: int, home: Path) -> None:
    """Wait until the serving ring has ``stages`` stages."""
    deadline = time.monotonic() + START_S
    command = [sys.executable, "-m", "molinkd", "status", "--json", "--home", str(home)]
    while time.monotonic() < deadline:
        asked = side.rig.run(0, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        output = asked.communicate()[0]
        rings = json.loads(output)["pipelines"] if asked.returncode == 0 else []
        if any(ring["ready"] and len(ring["stages"]) == stages for ring in rings):
            return
        time.sleep(1.0)
    raise RuntimeError(f"{side.name} has no ring of {stages} stages within {START_S:.0f} s")


async def send_load(url: str, load: Load) -> list[Sample]:
    """Send all requests of a load on time."""
    chance = random.Random(load.seed)
    times = [0.0]
    while len(times) < load.requests:
        times.append(times[-1] + chance.expovariate(load.rate))
    prompts = [
        make_prompt(
            chance.randint(load.prompt_tokens // 4, 2 * load.prompt_tokens),
            _MAX_REQUESTS * load.seed + index,
        )
        for index in range(load.requests)
    ]

    async def one(session: aiohttp.ClientSession, at: float, prompt: str) -> Sample:
        await asyncio.sleep(at)
        return await send_completion(session, url, prompt, load.output_tokens)

    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        asked = (one(session, at, prompt) for at, prompt in zip(times, prompts, strict=True))
        return list(await asyncio.gather(*asked))


def compute_figures(samples: Sequence[Sample], output_tokens: int) -> Figures:
    """Means of first token, time per token and whole answer, and the worst gap.

    The whole answer is one of ``output_tokens``, if the samples are shorter.
    """
    return (
        statistics.mean(one.ttft for one in samples),
        statistics.mean(one.tpot or 0.0 for one in samples),
        max((gap for one in samples for gap in one.itl), default=0.0),
        statistics.mean(one.ttft + (output_tokens - 1) * (one.tpot or 0.0) for one in samples),
    )


def run_client(url: str, load: str) -> None:
    """Entry point in a namespace: send a load and print its samples."""
    samples = asyncio.run(send_load(url, Load(**json.loads(load))))
    print(msgspec.json.encode(samples).decode())


def measure_link(
    sides: Sequence[Side], link: Link, options: argparse.Namespace, seeds: Iterator[int]
) -> dict[str, list[Figures]]:
    """Measure all sides over one kind of link."""
    found: dict[str, list[Figures]] = {side.name: [] for side in sides}
    for side in sides:
        side.slow_down(link.mbps, link.delay_ms, options.queue, link.loss)
        side.measure(Load(1, 1.0, _WARM_PROMPT, _WARM_OUTPUT, next(seeds)))
    for repeat in range(options.repeats):
        load = Load(
            options.requests,
            options.rate,
            options.prompt_tokens,
            options.output_tokens,
            next(seeds),
        )
        for side in sides[:: -1 if repeat % 2 else 1]:
            own = load
            if side.name == LLAMA:
                if repeat >= (options.llama_repeats or options.repeats):
                    continue
                own = replace(load, output_tokens=options.llama_tokens or load.output_tokens)
            figures = compute_figures(side.measure(own), options.output_tokens)
            found[side.name].append(figures)
    return found


def read_other_cpu() -> float:
    """CPU seconds that programs have used beside this one and those that it has started."""
    spent = psutil.cpu_times()
    others = spent.user + spent.nice + spent.system + spent.irq + spent.softirq
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            own = process.cpu_times()
            others -= own.user + own.system + own.children_user + own.children_system
    return others


def start_sides(
    options: argparse.Namespace, folder: Path, stack: contextlib.ExitStack
) -> list[Side]:
    """Start all wanted sides; they end with ``stack``."""
    wanted = options.sides.split(",")
    new_side = functools.partial(Side, nodes=options.nodes, cores=options.cores)
    sides = [
        stack.enter_context(
            run_molink(new_side(name), options.folder, settings, folder, pinned=options.pinned)
        )
        for name, settings in sides_of_molink(options.nodes).items()
        if name in wanted
    ]
    if options.llama is not None and "llama" in wanted:
        gguf = next(options.folder.glob("*.gguf"))
        slots = min(options.requests, 8)
        beside = run_llama(new_side(LLAMA), options.llama, gguf, slots, folder)
        sides.append(stack.enter_context(beside))
    return sides


def measure_links(options: argparse.Namespace) -> None:
    """Measure all sides over all kinds of links, and print the rows as they come."""
    reason = unavailable()
    if reason is not None:
        raise RigError(reason)
    command = "python -m tools.bench_rival " + " ".join(_name_paths(sys.argv[1:]))
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        sides = start_sides(options, Path(place), stack)
        print(f"| | | {' | '.join(f'{one}, s' for one in FIGURES)} |")
        print("|---|---|---:|---:|---:|---:|")
        seeds = itertools.count(options.seed)
        for link in order_links(options.mbps, options.delay_ms, options.loss):
            started, others = time.monotonic(), read_other_cpu()
            found = measure_link(sides, link, options, seeds)
            other_cores = (read_other_cpu() - others) / (time.monotonic() - started)
            cell = Cell(link, found, round(other_cores, 2), command)
            for row in format_rows(cell):
                print(row, flush=True)
            if options.out is not None:
                record_cell(options.out, cell)


def _name_paths(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments as a document shows them, without paths of this PC."""
    for before, argument in itertools.pairwise(["", *arguments]):
        if before == "--out":
            yield argument
        else:
            is_path = Path(argument).is_absolute()
            yield {"--llama": "BIN"}.get(before, "FOLDER") if is_path else argument


def _parse_numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="of tools.make_bench_model")
    add("--llama", type=Path, help="folder of llama-server and rpc-server")
    add("--mbps", type=_parse_numbers, default=[5.0, 20.0, 100.0])
    add("--delay-ms", type=_parse_numbers, default=[30.0], help="one way")
    add("--loss", type=_parse_numbers, default=[0.0], help="shares of packets, 0 to 1")
    add("--queue", type=int, default=256 * 1024, help="bytes per router queue")
    add("--nodes", type=int, default=3)
    add("--cores", type=float, help="CPU cores per node")
    add("--pinned", action="store_true", help="split layers evenly by hand")
    add("--requests", type=int, default=10)
    add("--rate", type=float, default=0.2, help="requests a second")
    add("--prompt-tokens", type=int, default=200)
    add("--output-tokens", type=int, default=32)
    add("--repeats", type=int, default=2, help="loads, each of its own seed")
    add("--llama-repeats", type=int, help="loads of llama.cpp, if fewer")
    add("--llama-tokens", type=int, help="length of its answers, if shorter")
    add("--seed", type=int, default=0, help="of the first load")
    add("--sides", default="molink,plain,llama", help="sides to measure")
    add("--out", type=Path, help="results file; cells of other links in it are kept")
    add("--render", action="store_true", help=f"make the table of {DOCUMENT} from {RESULTS}")
    return parser


def main() -> None:
    """Measure, and print a table as Markdown."""
    if sys.argv[1:2] == ["client"]:
        run_client(*sys.argv[2:4])
        return
    parser = _make_parser()
    options = parser.parse_args()
    if options.folder is not None:
        measure_links(options)
    elif not options.render:
        parser.error("a model's folder or --render is required")
    if options.render:
        replace_table(DOCUMENT, "links", format_table(read_cells(options.out or RESULTS)))


if __name__ == "__main__":
    main()
