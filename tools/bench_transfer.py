"""What a transfer of model files costs a ring that decodes. Needs Linux and root.

    python -m tools.bench_transfer [--kind copy,prefetch,stage] [--mbps 20,100] [--seeds 3] [--json]

Three emulated stages decode for a few streams over the WAN rig (:mod:`tools.wan`,
:mod:`tools.emulation`), each in a namespace of its own. A PC that has the files is that of the
first stage; whoever fetches them is the PC of the second one (``copy``), or a fourth one that joins
(``prefetch``: while the ring serves; ``stage``: as if somebody waited for it, at full speed). The
transfer is on and off by turns in one run, so that both have the same moments. The ratio is the
time per token with it beside that without it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from molink.bench.planned import PlannedRequest
from molink.wire.sockets.curve import KeyPair
from tools.emulation.activations import BUNDLED, make_recording
from tools.emulation.drive import Spec
from tools.emulation.model import Emulation
from tools.emulation.ring import Host, RingSettings
from tools.transfer_ends import write_model
from tools.wan import Node, Rig, RigError, unavailable
from tools.wan.namespaces import enter

ROOT = Path(__file__).resolve().parents[1]
STAGES = 3
KINDS = ("copy", "prefetch", "stage")
#: What of a phase is not counted: the change from one to the other, in seconds.
EDGE_S = 1.0
#: Of TCP's and the streams' beginning, in seconds.
WARMUP_S = 6.0


def _start(rig: Rig, node: int, role: str, config: dict[str, Any]) -> "subprocess.Popen[str]":
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = rig.run(
        node,
        [sys.executable, "-m", "tools.transfer_ends", role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    _tell(process, json.dumps(config))
    return process


def _tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _hear(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RigError("a process of the measurement failed: see above")
    said: dict[str, Any] = json.loads(line)
    return said


def measure(
    folder: Path, activations: Path, kind: str, mbps: float, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One run: phases with and without the transfer."""
    nodes = [Node(f"pc{n}", mbps, mbps, options.delay_ms, options.queue) for n in range(STAGES + 1)]
    with Rig(nodes, congestion=options.congestion, seed=seed) as rig:
        keys = KeyPair.generate()
        source = _start(
            rig,
            0,
            "source",
            {"folder": str(folder), "address": rig.address(0), "fetcher": keys.public},
        )
        found = _hear(source)
        fetcher = _start(
            rig,
            1 if kind == "copy" else STAGES,
            "fetch",
            {**found, "kind": kind, "secret": keys.secret, "address": rig.address(0)},
        )
        phases, told = _run(rig, fetcher, activations, seed, options)
        for process in (fetcher, source):
            _tell(process, "")
            process.wait()
    return _result(kind, mbps, seed, phases, told)


def _run(
    rig: Rig,
    fetcher: "subprocess.Popen[str]",
    activations: Path,
    seed: int,
    options: argparse.Namespace,
) -> tuple[list[tuple[bool, float, float, int]], dict[str, Any]]:
    hosts = [Host(rig.address(n), tuple(enter(rig.namespace(n)))) for n in range(STAGES)]
    until = WARMUP_S + 2 * options.turns * options.phase + 2
    plan = tuple(PlannedRequest(index, 0.1 * index, 64, 30_000) for index in range(options.streams))
    emulation = Emulation(activations=str(activations.resolve()), model=options.model)
    settings = RingSettings("adaptive", True, "none", 0)
    spec = Spec(emulation, settings, tuple(hosts), plan, until, seed)
    phases = []
    with tempfile.TemporaryDirectory(prefix="molink-bench-") as work:
        asked = Path(work) / "spec.json"
        asked.write_bytes(msgspec.json.encode(spec))
        driver = _start(rig, 0, "drive", {"spec": str(asked)})
        _hear(driver)
        time.sleep(WARMUP_S)
        for turn in range(2 * options.turns):
            on = bool((turn + seed) % 2)
            began = time.monotonic()
            if on:
                _tell(fetcher, "on")
            time.sleep(options.phase)
            ended = time.monotonic()
            nbytes = 0
            if on:
                _tell(fetcher, "off")
                said = _hear(fetcher)
                if "error" in said:
                    raise RigError(said["error"])
                nbytes = said["bytes"]
            phases.append((on, began, ended, nbytes))
        told = _hear(driver)
        driver.wait()
    return phases, told


def _result(
    kind: str,
    mbps: float,
    seed: int,
    phases: Sequence[tuple[bool, float, float, int]],
    told: dict[str, Any],
) -> dict[str, Any]:
    if told["errors"] or told["trouble"]:
        raise RigError(f"{told['errors']} {told['trouble']}")
    times = [told["began"] + each for each in told["times"]]
    seconds, tokens = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    fetched = 0.0
    for on, began, ended, nbytes in phases:
        seconds[on] += ended - began - EDGE_S
        tokens[on] += bisect(times, ended) - bisect(times, began + EDGE_S)
        fetched += nbytes
    per_token = {on: seconds[on] / max(1, tokens[on]) for on in (True, False)}
    spent = sum(ended - began for on, began, ended, _ in phases if on)
    return {
        "kind": kind,
        "mbps": mbps,
        "seed": seed,
        "ratio": round(per_token[True] / per_token[False], 4),
        "ms_per_token_alone": round(1000 * per_token[False], 2),
        "transfer_mbps": round(8e-6 * fetched / spent, 2),
    }


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the seeds of one row have in common."""
    ratios = [one["ratio"] for one in results]
    return {
        "kind": results[0]["kind"],
        "mbps": results[0]["mbps"],
        "ratio": round(mean(ratios), 3),
        "least": min(ratios),
        "most": max(ratios),
        "ms_per_token_alone": round(mean(one["ms_per_token_alone"] for one in results), 2),
        "transfer_mbps": round(median(one["transfer_mbps"] for one in results), 2),
        "runs": list(results),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", default=",".join(KINDS))
    parser.add_argument("--mbps", default="20,100")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--turns", type=int, default=2, help="phases with, and as many without")
    parser.add_argument("--phase", type=float, default=8.0, help="seconds of a phase")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--delay-ms", type=float, default=15.0, help="one way")
    parser.add_argument("--queue", type=int, default=256 * 1024, help="bytes in a router")
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("--model", default="qwen-7b", help="whose rows travel, as in configs")
    parser.add_argument("--activations", type=Path, help="a recording; made if it isn't there")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    return parser.parse_args()


def main() -> int:
    """Measure, and print a line or an object for each row; the exit code."""
    options = _arguments()
    if (reason := unavailable()) is not None:
        print(reason, file=sys.stderr)
        return 1
    rows = []
    with tempfile.TemporaryDirectory(prefix="molink-bench-") as base:
        folder, recorded = Path(base) / "model", options.activations or Path(base) / "rows.bin"
        write_model(folder)
        if not recorded.is_file():
            make_recording(BUNDLED, recorded)
        os.setpriority(os.PRIO_PROCESS, 0, -10)
        for mbps in map(float, options.mbps.split(",")):
            for kind in options.kind.split(","):
                seeds = range(options.first_seed, options.first_seed + options.seeds)
                runs = [measure(folder, recorded, kind, mbps, seed, options) for seed in seeds]
                rows.append(summary(runs))
                if not options.json:
                    row = rows[-1]
                    print(
                        "{kind:9} {mbps:4.0f} Mbps: {ratio:.3f} ({least:.3f} to {most:.3f}) of "
                        "{ms_per_token_alone:.1f} ms, at {transfer_mbps:.1f} Mbps".format(**row),
                        flush=True,
                    )
    if options.json:
        print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
