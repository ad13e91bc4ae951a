"""The wheel alone, outside the repository, contains the whole product."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from molinkd.cli.installation.kinds import INSTALLER_MARK
from tests.support.release_server import serve_release
from tools.release import build_wheel, copy_source, read_epoch


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command in ``folder`` and return its output, which is shown if it fails."""
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
    folder = tmp_path / "program" / ".venv"
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


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the folders of a Windows account can't be moved")
def test_it_updates_itself_and_leaves_nothing(
    scripts: Path, built_wheel: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """As installed by ``install.sh`` from a release; a swarm of one PC keeps running."""
    molink = str(scripts / "molink")
    environment |= {"MOLINK_DISCOVERY": "false", "MOLINK_API_PORT": "0", "MOLINK_HOST": "127.0.0.1"}
    environment |= {f"MOLINK_{name}_PORT": "0" for name in ("COORDINATOR", "CONTROL")}
    environment["MOLINK_WORKER_PORTS"] = "0-0"
    (scripts.parent / INSTALLER_MARK).touch()
    (tmp_path / "home" / ".local" / "bin").mkdir(parents=True)
    (tmp_path / "home" / ".local" / "bin" / "molink").symlink_to(molink)

    def swarm() -> str:
        status = run([molink, "status", "--json", "--wait", "100"], tmp_path, environment)
        return str(json.loads(status)["swarm"])

    run([molink, "up", "--model", "molink-demo", "--background"], tmp_path, environment)
    try:
        before = swarm()
        with serve_release() as server:
            source = copy_source(tmp_path / "source", read_epoch(), version="99.0.0")
            newer = build_wheel(source, tmp_path, read_epoch())
            wheel = server.publish("99.0.0", {newer.name: newer.read_bytes()})
            server.cut.add(wheel)
            update = [molink, "update", "--yes", "--from", server.url]
            with pytest.raises(AssertionError, match="does not have the hash"):
                run(update, tmp_path, environment)
            assert swarm() == before
            server.cut.clear()
            run(update, tmp_path, environment)
        assert run([molink, "--version"], tmp_path, environment) == "molink 99.0.0\n"
        assert swarm() == before
    finally:
        run([molink, "uninstall", "--yes"], tmp_path, environment)
    assert not (tmp_path / "program").exists()
    left = [path for path in (tmp_path / "home").rglob("*") if "molink" in path.name]
    assert left == []
