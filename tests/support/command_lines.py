"""Command lines in files that other programs run."""

from collections.abc import Sequence
from typing import Any

import typer

from molinkd.cli.main import build_app


def check_command(words: Sequence[str]) -> None:
    """Parse a command line of molink without running it.

    Raises:
        TyperException: there is no such command, or it takes no such option.
    """
    command: Any = typer.main.get_command(build_app(words))
    rest = list(words)
    while rest and hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    command.make_context(words[0], rest)
