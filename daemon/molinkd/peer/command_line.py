"""Formats commands for this PC's shell, and for PCs where molink is installed."""

import filecmp
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

#: Path of the installed command, relative to the installer, by system.
INSTALL_PATHS = {"Linux": ".venv/bin/molink", "Windows": r".venv\Scripts\molink"}


def molink_command(windows: bool = sys.platform == "win32") -> str:
    """The command that starts this molink: ``molink`` if that is on the PATH.

    Otherwise its path, quoted for POSIX shells or for PowerShell (``windows``).
    """
    script = Path(sys.executable).with_name("molink.exe" if windows else "molink")
    if not script.exists():
        return join_words([sys.executable, "-m", "molinkd"], windows)
    found = shutil.which("molink")
    try:
        # The installer puts a copy (Windows) or a link on the PATH.
        if found is not None and filecmp.cmp(found, script, shallow=False):
            return "molink"
        script = script.relative_to(Path.cwd())
    except (OSError, ValueError):
        pass  # not below the working directory
    return join_words([str(script)], windows)


def join_words(words: list[str], windows: bool = sys.platform == "win32") -> str:
    """A command line of these words; PowerShell needs ``&`` before a quoted program."""
    if not windows:
        return shlex.join(words)
    first, *others = (quote_word(word, windows) for word in words)
    return " ".join((f"& {first}" if first[0] in "'\"" else first, *others))


def quote_word(word: str, windows: bool = sys.platform == "win32") -> str:
    """A quoted word.

    Double quotes work in both Windows shells, single quotes only in PowerShell.
    """
    if not windows:
        return shlex.quote(word)
    if re.fullmatch(r"[\w.:\\/+=-]+", word, re.ASCII):
        return word
    if re.search("[$`]", word):
        return "'" + word.replace("'", "''") + "'"
    return subprocess.list2cmdline([word]) if '"' in word else f'"{word}"'


def format_command(text: str) -> str:
    """``text`` with ``molink`` replaced by the command of this installation."""
    name = molink_command()
    return text if name == "molink" else re.sub(r"\bmolink(?= [a-z])", lambda _: name, text)


def join_instructions(token: str) -> str:
    """The join command for each operating system."""
    lines = (f"{path} join {token}".rstrip() for path in INSTALL_PATHS.values())
    linux, windows = lines
    return f"  {linux}\n\nor, if it runs Windows:\n\n  {windows}"
