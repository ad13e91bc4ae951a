"""Update the catalogues of the command line's texts in ``daemon/molinkd/locale`` (needs Babel).

    python -m tools.translate

Run it after changing texts: it adds the new ones to each ``molink.po``, drops those that are gone,
and compiles. It names what has no translation yet.
"""

import ast
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, get_args

import typer
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

from molinkd.cli.doctor.facts import Level
from molinkd.cli.lazy_commands import COMMAND_NAMES, GROUP_HELP
from molinkd.cli.main import PANELS, build_app
from molinkd.cli.translation import LOCALE

LANGUAGES = ("de", "zh_CN")
SOURCES = LOCALE.parent / "cli"
#: Functions that translate texts, and how many of their first arguments are texts.
_CALLS = {"Finding": 1, "tr": 1, "tr_count": 2}
#: Commands whose options are translated; of the others only the line in `molink --help` is.
_COMMANDS = {
    *("up", "join", "demo", "chat", "page", "status", "invite", "approve", "revoke", "drain"),
    *("resume", "down", "leave", "top", "ps", "run", "pull", "list", "stop", "doctor"),
}
#: Texts of typer.
_OF_TYPER = (
    "Arguments",
    "Commands",
    "Install completion for the current shell.",
    "Options",
    "Show completion for the current shell, to copy it or customize the installation.",
    "Show this message and exit.",
)

_COMMENT = "# The texts of the command line. `python -m tools.translate` updates this file."

Message = str | tuple[str, str]


class _PlainCatalog(Catalog):
    """A catalogue without dates and names, so that equal texts give equal bytes."""

    @property
    def mime_headers(self) -> list[tuple[str, str]]:
        """The headers that readers of the file need."""
        return [
            ("Language", str(self.locale)),
            ("Plural-Forms", self.plural_forms),
            ("Content-Type", "text/plain; charset=utf-8"),
        ]


def main() -> None:
    """Write the catalogues."""
    missing = 0
    for language in LANGUAGES:
        catalogue = update_catalogue(language)
        folder = po_path(language).parent
        folder.mkdir(parents=True, exist_ok=True)
        with po_path(language).open("wb") as file:
            write_po(file, catalogue, width=100)
        mo_path(language).write_bytes(compile_catalogue(catalogue))
        bare = [message.id for message in catalogue if message.id and not is_whole(message)]
        missing += len(bare)
        print(
            f"{language}: {len(catalogue)} texts, {len(bare)} without translation",
            *bare,
            sep="\n  ",
        )
    sys.exit(missing > 0)


def po_path(language: str) -> Path:
    """The catalogue that people edit."""
    return LOCALE / language / "LC_MESSAGES" / "molink.po"


def mo_path(language: str) -> Path:
    """The catalogue that ``gettext`` reads."""
    return po_path(language).with_suffix(".mo")


def read_catalogue(language: str) -> Catalog:
    """The catalogue of a language; empty if there is none yet."""
    if not po_path(language).exists():
        return Catalog(locale=language)
    with po_path(language).open("rb") as file:
        return read_po(file, locale=language)


def update_catalogue(language: str) -> Catalog:
    """Return the catalogue of the current texts, with the translations that are known."""
    known = {_key(message.id): message.string for message in read_catalogue(language)}
    made = _PlainCatalog(locale=language, fuzzy=False, header_comment=_COMMENT)
    for text in sorted(collect_texts(), key=_key):
        made.add(text, known.get(_key(text), ""), flags=())
    return made


def is_whole(message: Any) -> bool:
    """Whether a message of a catalogue is translated, in all its forms."""
    forms = message.string if isinstance(message.string, tuple) else (message.string,)
    return all(forms)


def compile_catalogue(catalogue: Catalog) -> bytes:
    """The bytes of a ``.mo`` file."""
    file = BytesIO()
    write_mo(file, catalogue)
    return file.getvalue()


def collect_texts() -> set[Message]:
    """All texts: those of calls, of the help, and names that are shown."""
    called = {text for path in SOURCES.rglob("*.py") for text in _called_texts(path)}
    return called | set(_help_texts()) | set(PANELS) | set(get_args(Level)) | set(_OF_TYPER)


def _help_texts() -> Iterator[str]:
    """The help of commands and their options, and of groups."""
    root: Any = typer.main.get_command(build_app(COMMAND_NAMES))
    yield root.help
    yield from GROUP_HELP
    for name, command in root.commands.items():
        yield from filter(None, (command.short_help,))
        if name in _COMMANDS:
            yield command.help
            yield from (one.help for one in command.params if getattr(one, "help", None))
    yield from (one.help for one in root.params if one.help)


def _called_texts(path: Path) -> Iterator[Message]:
    """What a module translates, and the names of doctor's checks."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        count = _CALLS.get(getattr(node.func, "id", ""), 0) if isinstance(node, ast.Call) else 0
        arguments = node.args[:count] if isinstance(node, ast.Call) else []
        texts = [str(one.value) for one in arguments if isinstance(one, ast.Constant)]
        if len(texts) == 1:
            yield texts[0]
        elif texts:
            yield texts[0], texts[1]


def _key(message: Message) -> tuple[str, ...]:
    return message if isinstance(message, tuple) else (message,)


if __name__ == "__main__":
    main()
