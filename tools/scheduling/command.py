"""Sub-commands of ``tools.scheduling``, and ``--all``."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.scheduling import order
from tools.scheduling.preemption import measure_preemption
from tools.scheduling.processes import measure_processes
from tools.scheduling.report import render_report
from tools.scheduling.requests import SIZES

RESULTS = Path(__file__).parents[2] / "docs" / "results"

FIGURES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "short-behind-long": order.short_behind_long,
    "slo": order.measure_slo,
    "ratios": order.measure_ratios,
    "preemption": measure_preemption,
    "processes": measure_processes,
}
_POLICIES = ("fcfs", "mlfq", "fixed-priority", "skip-join-mlfq", "gittins", "srpt")
#: FastServe's device and model.
_FASTSERVE = {"device": "a100-40gb", "model": "opt-13b"}
#: Defaults that differ from :func:`_make_parser`'s, by figure.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "preemption": _FASTSERVE | {"ratios": [0.0], "seconds": 60.0},
    "processes": {"policies": ["fcfs", "mlfq", "fixed-priority", "skip-join-mlfq", "gittins"]},
    "slo": {
        "policies": ["fcfs", "skip-join-mlfq", "gittins", "gittins:proactive-swap", "srpt"],
        "swap_gb": 32.0,
    },
}
_SLO = ("slo", "--kinds")
_CACHED_SHARE = ("--routers", "e2", "--policies", "cached-share")
_E2_AND_ORACLE = ("--routers", "e2,oracle")
#: Arguments of :mod:`tools.routing`; all add rows to one file.
_ROUTING: tuple[tuple[str, ...], ...] = (
    ("latency", "--workloads", "tools"),
    ("latency", "--workloads", "tools", "--rate", "3", "--routers", "e2"),
    ("latency", "--workloads", "tools", "--rate", "12", "--routers", "e2,oracle,round-robin"),
    ("latency", "--workloads", "tools", "--rate", "18", "--routers", "e2,round-robin"),
    ("latency", "--workloads", "tools", "--requests", "6000", "--seeds", "1,2", *_E2_AND_ORACLE),
    ("latency", "--workloads", "tools", *_CACHED_SHARE),
    ("latency", "--workloads", "tools", "--rate", "18", *_CACHED_SHARE),
    ("speed",),
)
#: Figures that run last and alone.
_ALONE = ("processes", "report")
#: Figures that need Mooncake's trace.
_OF_CONVERSATIONS: tuple[tuple[str, ...], ...] = (
    ("latency", "--workloads", "alone", "--routers", "e2,least-loaded"),
    ("latency", "--workloads", "conversation"),
    ("latency", "--workloads", "conversation", *_CACHED_SHARE),
)


def list_commands(azure: Path | None, mooncake: Path | None, out: Path) -> list[tuple[str, ...]]:
    """Module and arguments of every figure; those of traces only where these are given."""

    def file(name: str) -> tuple[str, str]:
        return "--out", str(out / f"{name}.json")

    here = "tools.scheduling"
    trace = ("--trace", str(azure)) if azure is not None else ()
    found: list[tuple[str, ...]] = [
        (here, "short-behind-long", *file("scheduling-short-behind-long")),
        *((here, *_SLO, kind, *file(f"scheduling-slo-{kind}")) for kind in SIZES),
    ]
    if trace:
        found.append((here, *_SLO, "trace", *trace, *file("scheduling-slo-trace")))
    found += [
        (here, "ratios", "--seconds", "20", *file("scheduling-ratios")),
        (here, "preemption", *file("scheduling-preemption")),
        (here, "processes", *file("scheduling-processes")),
    ]
    found += [("tools.routing", *arguments, *file("routing")) for arguments in _ROUTING]
    if mooncake is not None:
        found += [
            ("tools.routing", *arguments, "--trace", str(mooncake), *file("routing"))
            for arguments in _OF_CONVERSATIONS
        ]
    return [*found, (here, "report", "--out", str(out))]


def _run_all(options: argparse.Namespace) -> None:
    """Run every figure by its own command."""
    for name, path, what in (
        ("--trace", options.trace, "figures of Azure's conversations (CSV)"),
        ("--conversations", options.conversations, "figures of Mooncake's conversations (JSONL)"),
    ):
        if path is None:
            print(f"skipped without {name} FILE: {what}", flush=True)
    made = list_commands(options.trace, options.conversations, options.out)
    chosen = [command for command in made if command[1] not in options.without]
    # Figures of one file run in order; files run in parallel.
    groups: dict[str, list[Sequence[str]]] = {}
    for command in chosen:
        if command[1] not in _ALONE:
            groups.setdefault(command[-1], []).append(command)
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in [pool.submit(_run, group) for group in groups.values()]:
            done.result()
    _run([command for command in chosen if command[1] in _ALONE])


def _run(made: Sequence[Sequence[str]]) -> None:
    """Run each command as a process."""
    for module, *arguments in made:
        text = f"python -m {module} {' '.join(arguments)}"
        print(f"\n{text}", flush=True)
        if subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode:
            raise SystemExit(f"failed: {text}")


def _parse_numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _parse_seeds(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parse_words(text: str) -> list[str]:
    return text.split(",")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.scheduling")
    parser.add_argument("--all", action="store_true", help="all figures, routing included")
    parser.add_argument("--trace", type=Path, help="Azure's conversation trace, for --all")
    parser.add_argument("--conversations", type=Path, help="Mooncake's, for --all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder, for --all")
    parser.add_argument("--jobs", type=int, default=1, help="figures that --all runs in parallel")
    quiet = "figures that --all skips, such as processes, which need a quiet machine"
    parser.add_argument("--without", type=_parse_words, default=[], help=quiet)
    figures = parser.add_subparsers()
    for name, figure in FIGURES.items():
        sub = figures.add_parser(name, help=(figure.__doc__ or "").splitlines()[0])
        sub.add_argument(
            "--policies",
            type=_parse_words,
            default=list(_POLICIES),
            help="POLICY[:PREEMPTION_MODE],…",
        )
        sub.add_argument("--orders", type=_parse_words, default=["skip-join-mlfq", "gittins"])
        sub.add_argument("--out", type=Path, default=RESULTS / f"scheduling-{name}.json")
        sub.add_argument("--seconds", type=float, default=40.0, help="of arrivals")
        sub.add_argument("--seed", type=int, default=1)
        sub.add_argument("--seeds", type=_parse_seeds, default=[1, 2, 3])
        sub.add_argument("--stages", type=int, default=1)
        sub.add_argument("--device", default="rtx4090")
        sub.add_argument("--model", default="qwen-7b")
        sub.add_argument("--kinds", type=_parse_words, default=list(SIZES))
        sub.add_argument("--trace", type=Path, help="Azure's conversations, CSV")
        sub.add_argument("--load", type=float, default=1.5, help="relative to capacity")
        sub.add_argument("--loads", type=_parse_numbers, default=[1.2, 3.0])
        sub.add_argument("--ratios", type=_parse_numbers, default=[1, 2, 4, 8, 16])
        sub.add_argument("--requests", type=int, default=32)
        sub.add_argument("--swap-gb", type=float, default=144.0, help="host memory of a stage")
        sub.set_defaults(
            figure=figure, figure_name=name, **{"seeds": [1, 2, 3]} | _DEFAULTS.get(name, {})
        )
    report = figures.add_parser("report", help="write scheduling.md")
    report.add_argument("--out", type=Path, default=RESULTS, help="folder")
    report.set_defaults(figure_name="report")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if options.all:
        return _run_all(options)
    if not hasattr(options, "figure_name"):
        parser.error("name a figure, or --all")
    if options.figure_name == "report":
        text = render_report(options.out)
        (options.out / "scheduling.md").write_text(text, encoding="utf-8")
        return None
    began = time.process_time()
    result = options.figure(options)
    for row in (*result["rows"], *result.get("against", ())):
        print(
            " | ".join(
                f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()
            )
        )
    print(f"{time.process_time() - began:.0f} s of CPU time")
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return None
