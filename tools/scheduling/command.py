"""The sub-commands, and all of them as one."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools import routing
from tools.scheduling import order
from tools.scheduling.preemption import preemption
from tools.scheduling.processes import processes
from tools.scheduling.requests import SIZES

RESULTS = Path(__file__).parents[2] / "docs" / "results"

FIGURES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "short-behind-long": order.short_behind_long,
    "slo": order.slo,
    "ratios": order.ratios,
    "preemption": preemption,
    "processes": processes,
}
_POLICIES = ("fcfs", "mlfq", "fixed-priority", "skip-join-mlfq", "srpt")
#: Where FastServe measured, as far as it says.
_FASTSERVE = {"device": "a100-40gb", "model": "opt-13b"}
#: What differs from :func:`_parser`'s common defaults, by figure.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "preemption": _FASTSERVE | {"ratios": [0.0], "seconds": 60.0},
    "processes": {"policies": ["fcfs", "mlfq", "fixed-priority", "skip-join-mlfq"]},
}
_SLO = ("slo", "--policies", "fcfs,skip-join-mlfq", "--kinds")
_AT_HOME = ("--device", "rtx4090", "--model", "qwen-7b", "--ratios", "0.5,1,4,16")


def commands(azure: Path | None, mooncake: Path | None, out: Path) -> list[tuple[str, ...]]:
    """All figures of whose turn it is, module and arguments; those of traces where these are."""

    def file(name: str) -> tuple[str, str]:
        return "--out", str(out / f"{name}.json")

    here = "tools.scheduling"
    found: list[tuple[str, ...]] = [
        (here, "short-behind-long", *file("scheduling-short-behind-long")),
        *((here, *_SLO, kind, *file(f"scheduling-slo-{kind}")) for kind in SIZES),
    ]
    if azure is not None:
        trace = ("trace", "--trace", str(azure))
        found.append((here, *_SLO, *trace, *file("scheduling-slo-trace")))
    found += [
        (here, "ratios", "--seconds", "20", *file("scheduling-ratios")),
        (here, "preemption", *file("scheduling-preemption")),
        (
            *(here, "preemption", *_AT_HOME, "--loads", "3", "--seconds", "12"),
            *file("scheduling-preemption-rtx4090"),
        ),
        (here, "processes", *file("scheduling-processes")),
    ]
    if mooncake is not None:
        found.append(("tools.routing", "--all", "--trace", str(mooncake), *file("routing")))
    else:
        found.append(("tools.routing", "latency", "--workloads", "tools", *file("routing")))
        found.append(("tools.routing", "speed", *file("routing")))
    return found


def _everything(options: argparse.Namespace) -> None:
    """One figure after the other, each under the command that makes it alone."""
    for name, path, what in (
        ("--trace", options.trace, "slo --kinds trace (Azure's conversations, CSV)"),
        ("--conversations", options.conversations, "routing of conversations (Mooncake's, JSONL)"),
    ):
        if path is None:
            print(f"left out for want of {name} FILE: {what}", flush=True)
    for module, *arguments in commands(options.trace, options.conversations, options.out):
        print(f"\npython -m {module} {' '.join(arguments)}", flush=True)
        (routing.main if module == "tools.routing" else main)(arguments)


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _seeds(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _words(text: str) -> list[str]:
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.scheduling")
    parser.add_argument("--all", action="store_true", help="every figure, of routing too")
    parser.add_argument("--trace", type=Path, help="Azure's conversation trace, for --all")
    parser.add_argument("--conversations", type=Path, help="Mooncake's, for --all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder, for --all")
    figures = parser.add_subparsers()
    for name, figure in FIGURES.items():
        sub = figures.add_parser(name, help=(figure.__doc__ or "").splitlines()[0])
        sub.add_argument("--policies", type=_words, default=list(_POLICIES))
        sub.add_argument("--orders", type=_words, default=["skip-join-mlfq"])
        sub.add_argument("--out", type=Path, default=RESULTS / f"scheduling-{name}.json")
        sub.add_argument("--seconds", type=float, default=40.0, help="of arrivals")
        sub.add_argument("--seed", type=int, default=1)
        sub.add_argument("--seeds", type=_seeds, default=[1, 2, 3])
        sub.add_argument("--stages", type=int, default=1)
        sub.add_argument("--device", default="rtx4090")
        sub.add_argument("--model", default="qwen-7b")
        sub.add_argument("--kinds", type=_words, default=list(SIZES))
        sub.add_argument("--trace", type=Path)
        sub.add_argument("--load", type=float, default=1.5, help="by what could be served")
        sub.add_argument("--loads", type=_numbers, default=[1.2, 3.0])
        sub.add_argument("--ratios", type=_numbers, default=[1, 2, 4, 8, 16])
        sub.add_argument("--requests", type=int, default=32)
        sub.add_argument("--swap-gb", type=float, default=144.0, help="host memory of a stage")
        sub.set_defaults(
            figure=figure, figure_name=name, **{"seeds": [1, 2, 3]} | _DEFAULTS.get(name, {})
        )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.all:
        return _everything(options)
    if not hasattr(options, "figure"):
        parser.error("name a figure, or --all")
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
