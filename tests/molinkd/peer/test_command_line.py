"""Commands as typed on this PC, or pasted on another one."""

import shutil
import sys
from pathlib import Path

import pytest

from molinkd.peer.command_line import format_command, join_words, molink_command, quote_word

WINDOWS = sys.platform == "win32"
SCRIPT = "molink.exe" if WINDOWS else "molink"


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The programs of a virtual environment; none is on the PATH."""
    folder = tmp_path / "a b" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    (folder / SCRIPT).write_text("#!python of a b\n", encoding="utf-8")
    (folder / SCRIPT).chmod(0o755)
    return folder


def test_molink_is_called_by_path_unless_on_the_path(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = join_words([str(venv / SCRIPT)])
    assert molink_command() == full
    assert full[0] in "'&", "it is quoted"
    monkeypatch.chdir(venv.parent)
    assert molink_command() == str(Path("bin", SCRIPT))
    assert format_command("molink up  # or: molink join; see molink's state").startswith(
        f"{molink_command()} up  # or: {molink_command()} join; see molink's"
    )
    there = tmp_path / "path"
    there.mkdir()
    shutil.copy(venv / SCRIPT, there)
    assert molink_command() == "molink"
    (there / SCRIPT).write_text("another molink\n", encoding="utf-8")
    assert molink_command() == str(Path("bin", SCRIPT))


def test_without_a_script_python_runs_it(venv: Path) -> None:
    (venv / SCRIPT).unlink()
    assert molink_command() == join_words([str(venv / "python"), "-m", "molinkd"])


def test_quoting() -> None:
    assert join_words(["/a b/molink", "x"], windows=False) == "'/a b/molink' x"
    assert join_words([r"C:\venv\molink.exe", "x"], windows=True) == r"C:\venv\molink.exe x"
    # PowerShell takes a quoted word as a string unless `&` precedes it.
    assert join_words([r"C:\a b\molink.exe", "x"], windows=True) == r'& "C:\a b\molink.exe" x'
    assert quote_word(r"C:\Users\$x's", windows=True) == r"'C:\Users\$x''s'"
    assert quote_word(r"C:\Users\ä", windows=True) == '"C:\\Users\\ä"'
