"""The wheel alone, away from the repository, is the whole product."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command to its end in ``folder``; what it prints, shown if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose home is empty and that knows nothing of this checkout."""
    home = tmp_path / "home"
    home.mkdir()
    dropped = ("PYTHON", "MOLINK_", "XDG_", "VIRTUAL_ENV", "COVERAGE")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    homes = ("HOME", "USERPROFILE", "APPDATA", "LOCALAPPDATA")
    return kept | {key: str(home) for key in homes} | {"PYTHONUTF8": "1"}


@pytest.fixture
def scripts(built_wheel: Path, tmp_path: Path) -> Path:
    """The scripts folder of a venv with the wheel; the dependencies are those of this one."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / ("python.exe" if os.name == "nt" else "python")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run([*pip, "install", "--no-deps", "--no-index", str(built_wheel)], tmp_path, dict(os.environ))
    # A folder named in a .pth file is searched, but its own .pth files, such as the one of an
    # editable molink, are not read.
    (installed,) = folder.rglob("molink/__init__.py")
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (installed.parent.parent / "dependencies.pth").write_text(
        "\n".join(sorted(dependencies)), encoding="utf-8"
    )
    return scripts


def test_the_demo_answers_from_the_wheel(
    scripts: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    where = "import molink; print(molink.__file__)"
    origin = Path(run([str(scripts / "python"), "-c", where], empty, environment).strip())
    assert origin.is_relative_to(tmp_path)
    answer = run([str(scripts / "molink"), "demo", "--ask", "What is molink?"], empty, environment)
    assert "molink" in answer.lower()
    assert "http" not in answer
    assert list(empty.iterdir()) == []
