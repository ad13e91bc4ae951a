"""Asks before a command that others would notice, where a person can answer."""

import sys
from typing import Annotated

import typer

from molink.errors import UsageError
from molink.plaintext import printable
from molinkd.cli.translation import tr

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def is_terminal() -> bool:
    """Whether a person can be prompted."""
    return sys.stdin is not None and sys.stdin.isatty()


def confirm_action(question: str, *, yes: bool, is_final: bool = False) -> None:
    """Ask ``question`` in a terminal, unless ``yes`` answers it; the default answer is no.

    Without a terminal the command continues, as scripts expect, unless it ``is_final``, that is
    hard to undo.

    Raises:
        UsageError: only ``yes`` could answer.
        typer.Exit: the answer is no.
    """
    if yes:
        return
    if not is_terminal():
        if is_final:
            raise UsageError(tr("{question} Without a terminal, --yes says so", question=question))
        return
    if not typer.confirm(printable(question)):
        print(tr("Nothing was changed."))
        raise typer.Exit(1)
