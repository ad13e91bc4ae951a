"""The command ``molink``: runs a subcommand and prints errors as one line."""

import functools
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

import molink
from molink.errors import MolinkError
from molink.plaintext import printable
from molinkd.cli.lazy_commands import add_lazy_groups, load_commands
from molinkd.cli.translation import tr, use_own_language

#: Exit code after Ctrl-C, as in shells.
INTERRUPTED = 130

#: Order of the sections in the help of a command.
PANELS = (
    "Arguments",
    "Common",
    "Model",
    "Network",
    "Device",
    "Scheduling",
    "Advanced",
    "Options",
)

#: Longest name of an option beside its meaning, in columns.
_NAME_WIDTH = 30

_HELP = "Pool the PCs you already own into one LLM server."


def _translate_help(one: Any) -> None:
    for name in ("help", "short_help"):
        if getattr(one, name, None):
            setattr(one, name, tr(getattr(one, name)))


if TYPE_CHECKING:
    _CommandBase = TyperCommand  # what the mixin below is mixed into
else:
    _CommandBase = object


class _Translated(_CommandBase):
    """A command whose help is in the user's language."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _translate_help(self)

    def get_params(self, ctx: Any) -> list[Any]:
        """All options and arguments."""
        params: list[Any] = super().get_params(ctx)
        for one in params:
            _translate_help(one)
        return params

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the line of usage."""
        pieces = self.collect_usage_pieces(ctx)
        formatter.write_usage(ctx.command_path, " ".join(pieces), prefix=tr("Usage: "))


class _Group(_Translated, TyperGroup):
    """All commands."""


class _Command(_Translated, TyperCommand):
    """A command whose help groups the options by panel, as plain text of 80 columns."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section per panel, in the order of first use."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = "Options" if param.param_type_name == "option" else "Arguments"
                panel = getattr(param, "rich_help_panel", None) or default
                sections.setdefault(panel, []).append(record)
        for panel in sorted(sections, key=PANELS.index):
            with formatter.section(tr(panel)):
                write_rows(formatter, sections[panel])


def write_rows(formatter: Any, rows: Sequence[tuple[str, str]]) -> None:
    """Write options and what they mean; wide characters have no spaces to wrap at."""
    if "".join(text for _, text in rows).isascii():
        formatter.write_dl(rows)
        return
    from molinkd.cli.plain_table import wrap_text

    indent = " " * formatter.current_indent
    first = min(_NAME_WIDTH, max(len(name) for name, _ in rows)) + 2
    margin = f"\n{indent}{'':<{first}}"
    for name, text in rows:
        begin = f"{indent}{name:<{first}}" if len(name) <= first - 2 else f"{indent}{name}{margin}"
        formatter.write(begin + margin.join(wrap_text(text, formatter.width - len(margin))) + "\n")


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Build the command line; slow imports only if ``arguments`` need them."""
    app = typer.Typer(
        name="molink",
        cls=_Group,
        help=_HELP,
        pretty_exceptions_enable=False,
        # Rich markup would interpret brackets, and its panels need more than 80 columns.
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True)(_root_command)
    for name, command, text in load_commands(arguments):
        app.command(name, cls=_Command, short_help=text)(_interruptible(command))
    add_lazy_groups(app, arguments)
    return app


def _print_version(requested: bool) -> None:
    if requested:
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
    """Run the command line of this process and exit."""
    if sys.platform == "win32" and "PYTHONIOENCODING" not in os.environ:
        use_utf8((sys.stdin, sys.stdout, sys.stderr))
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def use_utf8(streams: Iterable[TextIO | None]) -> None:
    """Write UTF-8 to files and pipes; Windows code pages lack many characters."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(encoding="utf-8", errors="replace")


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    use_own_language(arguments)
    try:
        app = build_app([*arguments, *_completion_words(os.environ)])
        code = app(args=list(arguments), prog_name="molink", standalone_mode=False)
    except MolinkError as error:
        return _print_error(str(error), error.exit_code)
    except typer.TyperException as error:  # an unknown command or option, or a malformed value
        text = error.format_message().replace(": Value error, ", ": ")  # pydantic's prefix
        context = getattr(error, "ctx", None)
        hint = (
            "" if context is None else tr(" (see `{command} --help`)", command=context.command_path)
        )
        return _print_error(f"{text.removesuffix('.')}{hint}", error.exit_code)
    except typer.Abort:
        return INTERRUPTED
    except SystemExit as end:
        code = end.code
    return code if isinstance(code, int) else int(code is not None)


def _print_error(text: str, code: int) -> int:
    print(printable(f"{tr('error')}: {text}", keep="\n"), file=sys.stderr)
    return code


def _completion_words(environment: Mapping[str, str]) -> list[str]:
    """Return the words that a shell wants completed."""
    if "_MOLINK_COMPLETE" not in environment:
        return []
    typed = environment.get("_TYPER_COMPLETE_ARGS") or environment.get("COMP_WORDS", "")
    return typed.split()


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``command`` so that Ctrl-C ends it with the exit code of shells."""

    @functools.wraps(command)
    def guarded(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except KeyboardInterrupt:
            print(tr("Stopped."), file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None

    return guarded


if __name__ == "__main__":
    main()
