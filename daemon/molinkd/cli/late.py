"""Commands, and a group of them, that are imported only when they are asked for."""

from collections.abc import Callable, Sequence
from importlib import import_module

import typer

Command = Callable[..., None]

#: Name, module and function of each, and its line in the help.
_LATE = (
    (
        "plan",
        "molinkd.cli.plan:plan",
        "Placement, micro-batches and predicted times of a ring, without starting anything.",
    ),
    (
        "simulate",
        "molinkd.cli.simulate:simulate_command",
        "Run a trace through a ring of stages in virtual time, with the deciders of the product.",
    ),
)

_BENCH = "Measure a server, or this PC."


def add_late(
    app: typer.Typer, arguments: Sequence[str], wrap: Callable[[Command], Command]
) -> None:
    """Add the real commands, wrapped, if ``arguments`` name them, else their lines in the help."""
    for name, where, text in _LATE:
        app.command(name, help=text)(wrap(_load(where) if name in arguments else _stand_in))


def add_bench(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Add the real group if ``arguments`` name it, else its line in the help."""
    if "bench" in arguments:
        from molinkd.cli.bench_serve import bench_app

        app.add_typer(bench_app, name="bench")
        return
    stand_in = typer.Typer(help=_BENCH)
    stand_in.callback()(_stand_in)
    app.add_typer(stand_in, name="bench")


def _load(where: str) -> Command:
    module, function = where.split(":")
    command: Command = getattr(import_module(module), function)
    return command


def _stand_in() -> None:
    """Only its line in the help is needed."""
