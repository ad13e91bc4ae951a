"""Commands that are imported only when they are asked for."""

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


def add_late(
    app: typer.Typer, arguments: Sequence[str], wrap: Callable[[Command], Command]
) -> None:
    """Add the real commands, wrapped, if ``arguments`` name them, else their lines in the help."""
    for name, where, text in _LATE:
        app.command(name, help=text)(wrap(_load(where) if name in arguments else _stand_in))


def _load(where: str) -> Command:
    module, function = where.split(":")
    command: Command = getattr(import_module(module), function)
    return command


def _stand_in() -> None:
    """Only its line in the help is needed."""
