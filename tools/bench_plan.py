"""Whether time per token is what ``molink plan`` says: real rings over the WAN rig. Linux and root.

    python -m tools.bench_plan [--devices rtx3090,rtx3060 …] [--mbps 5,20,100] [--delay-ms 5,30]
    python -m tools.bench_plan --live FOLDER [--stages 2,3] …

Without ``--live`` the PCs are those of ``molink plan --device``: workers as processes of their own,
each in a network namespace, whose steps sleep as long as the plan says that they compute
(:mod:`tools.emulation`); rows, sockets and TCP are real. With it the whole product runs: daemons of
separate homes with the model of FOLDER, one core each, and ``molink plan --live`` is asked.

Requests come one after another. A row has the predicted time per token, the median of the measured
ones, and measured/predicted: its median, and the least and the most of all requests.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tools.emulation.activations import BUNDLED, make_recording
from tools.plan_rings import Asked, Link, Run, daemons, described
from tools.wan import RigError, unavailable

_HEADER = """\
| ring | Mbps | one way | predicted | measured | measured/predicted | requests |
|---|---|---|---|---|---|---|"""
#: Before all that is not real time.
_PRIORITY = 10
_ROW = (
    "| {ring} | {mbps:g} | {delay_ms:g} ms | {predicted_ms:.1f} ms | {measured_ms:.1f} ms "
    "| {ratio:.3f} ({least:.3f} to {most:.3f}) | {requests} |"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One ring over one kind of links; ``load`` is the PC's load average when it began."""

    ring: str
    mbps: float
    delay_ms: float
    predicted_ms: float
    measured_ms: float
    ratio: float
    least: float
    most: float
    requests: int
    load: float

    @classmethod
    def of(cls, ring: str, link: Link, runs: Sequence[Run], load: float) -> "Row":
        """All runs together."""
        ratios = [tpot / run.predicted for run in runs for tpot in run.measured]
        return cls(
            ring,
            link.mbps,
            link.delay_ms,
            1000 * median(run.predicted for run in runs),
            1000 * median(tpot for run in runs for tpot in run.measured),
            median(ratios),
            min(ratios),
            max(ratios),
            len(ratios),
            load,
        )


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", nargs="+", default=["rtx3090,rtx3060", "rtx4090,rtx3090,rtx3060"]
    )
    parser.add_argument("--model-profile", default="qwen-7b", help="as in configs")
    parser.add_argument("--live", type=Path, help="a model's folder")
    parser.add_argument("--stages", default="2,3", help="of the rings of --live")
    parser.add_argument("--mbps", type=_numbers, default=[5.0, 20.0, 100.0])
    parser.add_argument("--delay-ms", type=_numbers, default=[5.0, 30.0], help="one way")
    parser.add_argument("--runs", type=int, default=3, help="rings that are formed for each row")
    parser.add_argument("--requests", type=int, default=3, help="of each run")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("--activations", type=Path, help="a recording; made if it isn't there")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    return parser.parse_args()


def _rows(options: argparse.Namespace, recorded: Path) -> Iterator[Row]:
    asked = Asked(
        options.requests, options.prompt_tokens, options.output_tokens, options.congestion
    )
    links = [Link(mbps, delay) for delay in options.delay_ms for mbps in options.mbps]
    if options.live is not None:
        for stages in map(int, options.stages.split(",")):
            for delay in options.delay_ms:
                load = os.getloadavg()[0]
                same = [link for link in links if link.delay_ms == delay]
                runs = [daemons(options.live, stages, same, asked) for _ in range(options.runs)]
                for index, link in enumerate(same):
                    found = [run[index] for run in runs]
                    yield Row.of(f"{stages} daemons", link, found, load)
        return
    if not recorded.is_file():
        make_recording(BUNDLED, recorded)
    for names in options.devices:
        for link in links:
            load = os.getloadavg()[0]
            runs = [
                described(names.split(","), options.model_profile, link, asked, recorded, seed)
                for seed in range(options.runs)
            ]
            yield Row.of(names, link, runs, load)


def main() -> int:
    """Measure, and print a line or an object for each row; the exit code."""
    options = _arguments()
    if (reason := unavailable()) is not None:
        print(reason, file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    if not options.json:
        print(_HEADER, flush=True)
    # What else runs here must not make the ring or the relay late; children inherit it.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    with tempfile.TemporaryDirectory(prefix="molink-bench-") as base:
        try:
            for row in _rows(options, options.activations or Path(base) / "rows.bin"):
                rows.append(asdict(row))
                if not options.json:
                    print(_ROW.format(**rows[-1]), flush=True)
        except (RigError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        loads = [row["load"] for row in rows]
        print(f"\nLoad average of this PC meanwhile: {min(loads):.1f} to {max(loads):.1f}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
