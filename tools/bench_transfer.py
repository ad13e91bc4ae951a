"""What a transfer of model files costs a ring that decodes. Needs Linux and root.

    python -m tools.bench_transfer [--kind copy,prefetch,stage] [--mbps 20,100] [--seeds 3] [--json]

Three emulated stages decode for a few streams over the WAN rig (:mod:`tools.wan`,
:mod:`tools.emulation`), each in a namespace of its own. A PC that has the files is that of the
first stage; whoever fetches them is the PC of the second one (``copy``), or a fourth one that joins
(``prefetch``: while the ring serves; ``stage``: as if somebody waited for it, at full speed). The
transfer is on and off by turns in one run, and each time with it is compared with that before it:
the ratio is of the times per token. ``±`` is the standard error of the mean over all such pairs.
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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, median, stdev
from typing import Any

import msgspec

from molink.bench.planned_requests import PlannedRequest
from molink.wire.sockets.key_pair import KeyPair
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
_ROW = (
    "{kind:9} {mbps:4.0f} Mbps: {ratio:.3f} ± {error:.3f} (median {median:.3f}, {least:.3f} to "
    "{most:.3f}) of {ms_per_token_alone:.1f} ms, at {transfer_mbps:.1f} Mbps"
)
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


@dataclass(frozen=True, slots=True)
class Phase:
    """A time with a transfer of that kind, or without one (empty)."""

    kind: str
    began: float
    ended: float
    nbytes: int = 0

    def per_token(self, times: Sequence[float]) -> float:
        """Seconds, once the change to it is over."""
        tokens = bisect(times, self.ended) - bisect(times, self.began + EDGE_S)
        return (self.ended - self.began - EDGE_S) / max(1, tokens)


def measure(
    folder: Path, activations: Path, mbps: float, seed: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One run: of each kind, how each time with it compares with that before it."""
    nodes = [Node(f"pc{n}", mbps, mbps, options.delay_ms, options.queue) for n in range(STAGES + 1)]
    with Rig(nodes, congestion=options.congestion, seed=seed) as rig:
        keys = KeyPair.generate()
        config = {"folder": str(folder), "address": rig.address(0), "fetcher": keys.public}
        source = _start(rig, 0, "source", config)
        wanted = {**_hear(source), "secret": keys.secret, "address": rig.address(0)}
        fetchers = {
            kind: _start(rig, 1 if kind == "copy" else STAGES, "fetch", wanted)
            for kind in options.kind.split(",")
        }
        phases, told = _run(rig, fetchers, activations, seed, options)
        for process in (*fetchers.values(), source):
            _tell(process, "")
            process.wait()
    if told["errors"] or told["trouble"]:
        raise RigError(f"{told['errors']} {told['trouble']}")
    times = [told["began"] + each for each in told["times"]]
    return [
        {
            "kind": on.kind,
            "mbps": mbps,
            "seed": seed,
            "ratio": on.per_token(times) / off.per_token(times),
            "ms_per_token_alone": 1000 * off.per_token(times),
            "transfer_mbps": 8e-6 * on.nbytes / (on.ended - on.began),
        }
        for off, on in pairwise(phases)
        if on.kind
    ]


def _run(
    rig: Rig,
    fetchers: dict[str, "subprocess.Popen[str]"],
    activations: Path,
    seed: int,
    options: argparse.Namespace,
) -> tuple[list[Phase], dict[str, Any]]:
    hosts = [Host(rig.address(n), tuple(enter(rig.namespace(n)))) for n in range(STAGES)]
    until = WARMUP_S + 2 * options.turns * len(fetchers) * options.phase + 5
    plan = tuple(PlannedRequest(index, 0.1 * index, 64, 30_000) for index in range(options.streams))
    emulation = Emulation(activations=str(activations.resolve()), model=options.model)
    settings = RingSettings("adaptive", True, "none", 0)
    spec = Spec(emulation, settings, tuple(hosts), plan, until, seed)
    order, phases = Random(seed), []
    with tempfile.TemporaryDirectory(prefix="molink-bench-") as work:
        asked = Path(work) / "spec.json"
        asked.write_bytes(msgspec.json.encode(spec))
        driver = _start(rig, 0, "drive", {"spec": str(asked)})
        _hear(driver)
        time.sleep(WARMUP_S)
        for _ in range(options.turns):
            for kind in order.sample(sorted(fetchers), len(fetchers)):
                phases += [_phase("", None, options.phase)]
                phases += [_phase(kind, fetchers[kind], options.phase)]
        told = _hear(driver)
        driver.wait()
    return phases, told


def _phase(kind: str, fetcher: "subprocess.Popen[str] | None", seconds: float) -> Phase:
    began = time.monotonic()
    if fetcher is not None:
        _tell(fetcher, kind)
    time.sleep(seconds)
    ended, nbytes = time.monotonic(), 0
    if fetcher is not None:
        _tell(fetcher, "off")
        said = _hear(fetcher)
        if "error" in said:
            raise RigError(said["error"])
        nbytes = said["bytes"]
    return Phase(kind, began, ended, nbytes)


def summary(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the pairs of one row have in common."""
    ratios = sorted(one["ratio"] for one in pairs)
    spread = stdev(ratios) if len(ratios) > 1 else 0.0
    return {
        "kind": pairs[0]["kind"],
        "mbps": pairs[0]["mbps"],
        "ratio": round(mean(ratios), 3),
        "error": round(spread / len(ratios) ** 0.5, 3),
        "median": round(median(ratios), 3),
        "least": round(ratios[0], 3),
        "most": round(ratios[-1], 3),
        "ms_per_token_alone": round(median(one["ms_per_token_alone"] for one in pairs), 2),
        "transfer_mbps": round(mean(one["transfer_mbps"] for one in pairs), 2),
        "pairs": [round(ratio, 3) for ratio in ratios],
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
    parser.add_argument("--phase", type=float, default=5.0, help="seconds of a phase")
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
            seeds = range(options.first_seed, options.first_seed + options.seeds)
            pairs = [
                pair for seed in seeds for pair in measure(folder, recorded, mbps, seed, options)
            ]
            for kind in options.kind.split(","):
                rows.append(summary([pair for pair in pairs if pair["kind"] == kind]))
                if not options.json:
                    print(_ROW.format(**rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
