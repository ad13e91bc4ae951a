"""``molink simulate``, which is imported only when it is asked for."""

from collections.abc import Callable, Sequence

import typer


def add_simulate(
    app: typer.Typer,
    arguments: Sequence[str],
    wrap: Callable[[Callable[..., None]], Callable[..., None]],
) -> None:
    """Add the real command, wrapped, if ``arguments`` name it, else its line in the help."""
    command: Callable[..., None] = _stand_in
    if "simulate" in arguments:
        from molink.cli.simulate import simulate_command

        command = simulate_command
    app.command("simulate")(wrap(command))


def _stand_in() -> None:
    """Run a trace through a ring of stages in virtual time, with the deciders of the product."""
