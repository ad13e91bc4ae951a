"""``python tools/paper.py``: the MoLink paper's Tables 2 to 5.

    python tools/paper.py --simulate [--full]   # every table, in virtual time
    python tools/paper.py --rig                 # shortened runs on real processes and sockets
    python tools/paper.py --render              # paper.md again, from the measured results

Results go to ``docs/results/``. The trace is not in this repository: give ``--trace FILE``, set
``MOLINK_TRACE``, or put it into a folder ``traces`` here or in a parent. ``--rig`` needs Linux and
root and sends recorded activations (``python -m tools.emulation.activations``).
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from molink.bench.workload import read_trace
from molink.errors import MolinkError, UsageError
from tools.emulation.activations import RECORDED
from tools.paperbench.document import render_document
from tools.paperbench.results import Results
from tools.paperbench.rig import CONGESTION, RATES, SYSTEMS, RigPlan, run_rig, write_results
from tools.paperbench.simulated import FULL, SimPlan, run_simulations
from tools.paperbench.targets import judge_targets
from tools.paperbench.variants import VARIANTS
from tools.paperbench.workload import find_trace

RESULTS = Path("docs/results")
_SYSTEMS = tuple(each.name for each in SYSTEMS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if not (options.simulate or options.rig or options.render):
        parser.print_help()
        return 2
    try:
        if options.simulate:
            _run_simulations(options)
        if options.rig:
            _run_rig(options)
        _render(options)
    except MolinkError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tools/paper.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--simulate", action="store_true", help="every table in the simulator")
    parser.add_argument("--rig", action="store_true", help="shortened runs on real sockets")
    parser.add_argument("--render", action="store_true", help="write paper.md again")
    parser.add_argument("--trace", type=Path, help="Azure's conversation trace (CSV)")
    parser.add_argument("--full", action="store_true", help="as long as the paper: 60 s + 1800 s")
    parser.add_argument("--warmup", type=float, help="seconds before requests count")
    parser.add_argument("--seconds", type=float, help="seconds in which requests count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="seeds per run of --simulate")
    parser.add_argument("--out", type=Path, default=RESULTS)
    rig = parser.add_argument_group("--rig")
    rig.add_argument("--activations", type=Path, default=RECORDED)
    rig.add_argument("--rates", type=_parse_numbers, default=RATES)
    rig.add_argument("--congestion", type=_parse_words, default=CONGESTION)
    rig.add_argument("--systems", type=_parse_words, default=_SYSTEMS, help="comma separated")
    rig.add_argument("--repeats", type=int, default=1, help="runs per row, counted together")
    return parser


def _run_simulations(options: argparse.Namespace) -> None:
    warmup, duration = _parse_times(options, FULL if options.full else (None, None))
    trace = find_trace(options.trace)
    began = time.monotonic()
    if options.seeds < 1:
        raise UsageError(f"--seeds must be at least 1, not {options.seeds}")
    plan = SimPlan(read_trace(trace), warmup, duration, options.seed, options.seeds)
    found = run_simulations(plan, _print_line)
    command = "python tools/paper.py --simulate" + _list_changes(options)
    if options.seeds > 1:
        command += f" --seeds {options.seeds}"
    path = options.out / "paper-simulated.json"
    results = Results(found)
    targets = [
        {"where": each.where, "what": each.what, "value": each.value, "bound": each.bound}
        | {"at_least": each.at_least, "met": each.met}
        for each in judge_targets(results)
    ]
    _write_results(path, {"command": command, **found, "targets": targets})
    met = sum(bool(each["met"]) for each in targets)
    _print_line(f"{path}: {met} of {len(targets)} targets met, {time.monotonic() - began:.0f} s")


def _run_rig(options: argparse.Namespace) -> None:
    systems = {variant.name: variant for variant in VARIANTS}
    if unknown := [name for name in options.systems if name not in systems]:
        raise UsageError(f"unknown system {unknown[0]!r}; available: {', '.join(systems)}")
    if options.repeats < 1:
        raise UsageError(f"--repeats must be at least 1, not {options.repeats}")
    short = RigPlan(find_trace(options.trace), options.activations)
    warmup, duration = _parse_times(options, (short.warmup, short.duration))
    plan = RigPlan(
        find_trace(options.trace),
        options.activations,
        warmup,
        duration,
        options.rates,
        options.congestion,
        tuple(systems[name] for name in options.systems),
        options.seed,
        options.repeats,
    )
    _print_line(f"{len(plan.rows)} rows on the rig, about {plan.seconds / 60:.0f} minutes in all")
    command = "python tools/paper.py --rig" + _list_changes(options)
    if plan.repeats > 1:
        command += f" --repeats {plan.repeats}"
    for name, usual in (("rates", RATES), ("congestion", CONGESTION), ("systems", _SYSTEMS)):
        if (given := getattr(options, name)) != usual:
            command += f" --{name} '{','.join(map(str, given))}'"
    done: list[dict[str, Any]] = []
    for row in run_rig(plan):
        done.append(row)
        by = ", ".join(f"{name} {value:.2f}" for name, value in row["rig_by_simulated"].items())
        where = f"{row['rate']:g} req/s, {row['congestion']}, {row['system']}"
        _print_line(f"{len(done)} of {len(plan.rows)}: {where}: by the simulation: {by}")
        write_results(done, plan, command, options.out / "paper-rig.json")


def _render(options: argparse.Namespace) -> None:
    simulated, rig = options.out / "paper-simulated.json", options.out / "paper-rig.json"
    if not simulated.is_file():
        _print_line(f"no {simulated}; make it with --simulate")
        return
    found = json.loads(simulated.read_text(encoding="utf-8"))
    results = Results(found)
    real = json.loads(rig.read_text(encoding="utf-8")) if rig.is_file() else None
    document = options.out / "paper.md"
    document.write_text(render_document(results, found["command"], real), encoding="utf-8")
    _print_line(str(document))


_Seconds = TypeVar("_Seconds", float, float | None)


def _parse_times(
    options: argparse.Namespace, usual: tuple[_Seconds, _Seconds]
) -> tuple[_Seconds, _Seconds]:
    warmup, duration = usual
    return (
        warmup if options.warmup is None else options.warmup,
        duration if options.seconds is None else options.seconds,
    )


def _list_changes(options: argparse.Namespace) -> str:
    """Options that change results."""
    given = " --full" if options.full else ""
    if options.warmup is not None:
        given += f" --warmup {options.warmup:g}"
    if options.seconds is not None:
        given += f" --seconds {options.seconds:g}"
    return given + (f" --seed {options.seed}" if options.seed else "")


def _write_results(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _parse_numbers(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split(","))


def _parse_words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _print_line(line: str) -> None:
    print(line, flush=True)
