"""The command ``molink``: finds the verb, runs it, and turns errors into one clear line."""

import functools
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

import molink
from molink.errors import MolinkError
from molink.plaintext import printable
from molinkd.cli import daemon_verbs, join_verbs, swarm_verbs
from molinkd.cli import drain_verbs as draining
from molinkd.cli import stop_verbs as ending
from molinkd.cli.lazy_commands import add_lazy_commands, add_lazy_groups

#: Exit code after Ctrl-C, as shells count it.
INTERRUPTED = 130

_HELP = "Pool the PCs you already own into one LLM server."


class _Commands(TyperGroup):
    """All commands; what is wrong with an option is said without the name of a Python error."""

    def invoke(self, ctx: Any) -> Any:
        """Run the one that is named; typer has the context's type from a package of its own."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # typer 0.29's, pydantic's
            raise


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The command line; groups that take long to import only if ``arguments`` name them."""
    app = typer.Typer(
        name="molink",
        cls=_Commands,
        help=_HELP,
        pretty_exceptions_enable=False,
        # Rich's markup eats what stands in brackets, and its boxes need more than 80 columns.
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True)(_root_command)
    commands: list[Callable[..., None]] = [
        daemon_verbs.up,
        daemon_verbs.join,
        daemon_verbs.demo,
        swarm_verbs.chat,
        swarm_verbs.status,
        swarm_verbs.invite,
        join_verbs.approve,
        swarm_verbs.revoke,
        swarm_verbs.un_revoke,
        draining.drain,
        draining.resume,
        draining.rebalance,
        ending.down,
        ending.leave,
        daemon_verbs.coordinator,
    ]
    for command in commands:
        app.command()(_interruptible(command))
    add_lazy_groups(app, arguments)
    add_lazy_commands(app, arguments, _interruptible)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"molink {molink.__version__}")
        raise typer.Exit


def _root_command(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of this process and exit with its code."""
    if sys.platform == "win32" and "PYTHONIOENCODING" not in os.environ:
        use_utf8((sys.stdin, sys.stdout, sys.stderr))
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def use_utf8(streams: Iterable[TextIO | None]) -> None:
    """Have files and pipes get UTF-8: a Windows code page lacks half of what we print."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(encoding="utf-8", errors="replace")


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    try:
        app = build_app([*arguments, *_completion_words(os.environ)])
        app(args=list(arguments), prog_name="molink")
    except MolinkError as error:
        print(printable(f"molink: {error}", keep="\n"), file=sys.stderr)
        return error.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _completion_words(environment: Mapping[str, str]) -> list[str]:
    """The words typed so far if a shell asks how they go on: typer's completion."""
    if "_MOLINK_COMPLETE" not in environment:
        return []
    typed = environment.get("_TYPER_COMPLETE_ARGS") or environment.get("COMP_WORDS", "")
    return typed.split()


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with Ctrl-C as an ordinary end, under the exit code that shells expect."""

    @functools.wraps(command)
    def guarded(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except KeyboardInterrupt:
            print("Stopped.", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None

    return guarded


if __name__ == "__main__":
    main()
