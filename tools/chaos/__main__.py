"""Inject faults into a swarm of real processes under load, and print a report.

    .venv/bin/python -m tools.chaos --seconds 300 --seed 1
    .venv/bin/python -m tools.chaos --kinds kill-worker,freeze-leader --faults 4
    .venv/bin/python -m tools.chaos --list

It starts PCs on loopback, each with its own home and ports. Streams are greedy in f32, and each
text must equal the text of the same question before any fault. The exit code is 1 if a request was
lost or changed, a process aborted, or something was left behind.
"""

import argparse
import asyncio
import itertools
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.chaos.drill import Result, Verdict, run_drill
from tools.chaos.faults import KINDS, plan_faults
from tools.chaos.report import render_report
from tools.chaos.streams import Load
from tools.chaos.swarm import Swarm


def main() -> int:
    """Run a drill; the exit code."""
    options = _parse_options()
    if options.list:
        print("\n".join(KINDS))
        return 0
    # Clean up on SIGTERM too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        _compute_beside(options.busy),
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
    ):
        root = options.keep or Path(folder)
        verdict = asyncio.run(run(root, options))
        if not verdict.good and not options.keep:
            print(f"logs of the PCs: {save_logs(root)}", file=sys.stderr)
    print(render_report(verdict))
    return 0 if verdict.good else 1


def save_logs(root: Path) -> Path:
    """Copy the logs of all PCs to a folder that stays."""
    kept = Path(tempfile.mkdtemp(prefix="chaos-logs-"))
    for log in root.glob("pc*/**/*.log*"):
        target = kept / log.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, target)
    return kept


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--list", action="store_true", help="print the kinds of faults")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=300.0, help="last start of a fault")
    parser.add_argument("--faults", type=int, default=1000, help="most faults")
    parser.add_argument("--shortest", type=float, default=1.0, help="shortest fault, in seconds")
    parser.add_argument("--longest", type=float, default=30.0)
    parser.add_argument("--rest", type=float, default=0.0, help="between faults, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pcs", type=int, default=4)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--device", default="cpu", help="of all stages: cpu or cuda:N")
    parser.add_argument("--busy", type=int, default=0, help="other computing processes")
    parser.add_argument("--keep", type=Path, help="folder for the homes, which stays")
    options = parser.parse_args()
    unknown = set(options.kinds) - KINDS.keys()
    if unknown:
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}; --list shows them")
    return options


async def run(root: Path, options: argparse.Namespace) -> Verdict:
    """Run the drill that ``options`` describe."""
    network = any(KINDS[kind].network for kind in options.kinds)
    rng = random.Random(options.seed)
    faults = plan_faults(options.kinds, rng, options.shortest, options.longest)
    async with (
        Swarm(
            root, options.pcs, seed=options.seed, network=network, device=options.device
        ) as swarm,
        Load(swarm, options.streams, options.tokens) as load,
    ):
        until = time.monotonic() + options.seconds
        chosen = itertools.islice(faults, options.faults)
        timely = itertools.takewhile(lambda _: time.monotonic() < until, chosen)
        verdict = await run_drill(
            swarm, load, timely, options.seed, tell=_print_fault, rest_s=options.rest
        )
    verdict.troubles += swarm.left_behind
    return verdict


@contextmanager
def _compute_beside(count: int) -> Iterator[None]:
    """Run ``count`` processes that compute, as on a busy PC."""
    command = [sys.executable, "-c", "while True: pass"]
    # A scheduler that shares CPUs among sessions must count each one.
    started = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _print_fault(result: Result) -> None:
    """Report a finished fault on standard error."""
    if result.skipped:
        text = f"skipped: {result.target}"
    elif result.recovered is None:
        text = f"{result.target}: NOT ALL STREAMS CONTINUED"
    else:
        text = f"{result.target}: {max(result.pauses, default=0.0):.1f} s at most"
    print(f"{result.fault.kind} for {result.fault.seconds:.1f} s: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
