"""``molink uninstall``: what it deletes, on folders of the tests' own."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from molink.errors import UsageError
from molinkd.cli.installation import kinds, uninstall
from molinkd.cli.installation.kinds import Installation, find_installation
from molinkd.cli.main import run
from molinkd.peer.home import Home

Folders = dict[str, Path]


def delete_now(folder: Path, names: Sequence[str]) -> None:
    """Delete with the command that also works on Windows."""
    subprocess.run(uninstall.deletion_command(folder, names), check=True)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """The folders of a molink installation in a user's account; nothing runs."""
    made = {name: tmp_path / name / "molink" for name in ("state", "config", "cache", "program")}
    for path in made.values():
        path.mkdir(parents=True)
    (made["state"] / "peer.key").touch()
    (made["program"] / ".venv").mkdir()
    for name in ("state", "config", "cache"):
        found = made[name]
        monkeypatch.setattr(
            uninstall.platformdirs, f"user_{name}_path", lambda *_, path=found: path
        )
    service = SimpleNamespace(uninstall_service=lambda: False)
    monkeypatch.setattr(uninstall, "system_service", lambda: service)
    monkeypatch.setattr(uninstall, "remove_from_path", lambda _: None)
    monkeypatch.setattr(
        uninstall, "find_installation", lambda: Installation("release", made["program"])
    )
    monkeypatch.setattr(uninstall, "_delete_parts", delete_now)
    monkeypatch.setenv("MOLINK_HOME", str(made["state"]))
    return made


def test_nothing_is_left(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["uninstall", "--yes"]) == 0
    assert [name for name, path in folders.items() if path.exists()] == []
    assert str(folders["state"]) in capsys.readouterr().out


def test_state_may_stay(folders: Folders) -> None:
    assert run(["uninstall", "--yes", "--keep-state"]) == 0
    assert not folders.pop("program").exists()
    assert all(path.exists() for path in folders.values())


def test_without_a_terminal_it_needs_an_option(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["uninstall"]) == 2
    said = capsys.readouterr().err
    assert "--yes" in said
    assert all(str(path) in said for path in folders.values())
    assert all(path.exists() for path in folders.values())


def test_a_swarm_is_left_before_its_keys_go(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Path] = []
    monkeypatch.setattr(uninstall, "read_membership", lambda _: object())
    monkeypatch.setattr(uninstall, "leave", lambda *, home, **_: left.append(home))
    assert run(["uninstall", "--yes", "--keep-state"]) == 0
    assert left == []
    (folders["program"] / ".venv").mkdir(parents=True)
    assert run(["uninstall", "--yes"]) == 0
    assert left == [folders["state"]]


def test_a_founder_with_others_keeps_everything(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(**_: object) -> None:
        raise UsageError("this PC created the swarm")

    monkeypatch.setattr(uninstall, "read_membership", lambda _: object())
    monkeypatch.setattr(uninstall, "leave", leave)
    assert run(["uninstall", "--yes"]) == 2
    assert all(path.exists() for path in folders.values())


def test_folders_of_other_things_are_never_deleted(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.png").touch()
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "state" / "molink" / "person")
    for home in (photos, folders["state"]):
        assert run(["uninstall", "--yes", "--home", str(home)]) == 2
    assert (photos / "cat.png").exists()
    assert all(path.exists() for path in folders.values())


def test_only_what_the_installer_made_is_deleted(folders: Folders) -> None:
    """A git clone whose environment contains a wheel looks like a release."""
    work = folders["program"] / "work.py"
    work.touch()
    assert run(["uninstall", "--yes"]) == 0
    assert [*folders["program"].iterdir()] == [work]


def test_a_home_is_recognized_by_any_name(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    person = folders["state"] / "person"
    person.mkdir()
    monkeypatch.setattr(Path, "home", lambda: person)
    assert run(["uninstall", "--yes", "--home", str(person / "..")]) == 2
    assert person.exists()


def test_nested_folders_are_named_once(folders: Folders) -> None:
    inner = folders["config"] / "state"
    inner.mkdir()
    (inner / "peer.key").touch()
    found = uninstall.list_state([Home(inner)], Installation("release", folders["program"]))
    assert found == sorted([folders["config"], folders["cache"]])


def test_the_environment_tells_who_manages_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "find_source_folder", lambda: None)
    assert find_installation(tmp_path) == Installation("pip", tmp_path)
    for mark, kind in (
        ("pipx_metadata.json", "pipx"),
        ("uv-receipt.toml", "uv"),
        (kinds.INSTALLER_MARK, "release"),
    ):
        (tmp_path / mark).touch()
        folder = tmp_path.parent if kind == "release" else tmp_path
        found = find_installation(tmp_path)
        assert (found.kind, found.folder) == (kind, folder)
    keg = tmp_path / "Cellar" / "molink" / "1.0" / "libexec"
    assert find_installation(keg) == Installation("brew", keg)
    monkeypatch.setattr(kinds, "find_source_folder", lambda: tmp_path)
    assert find_installation(tmp_path) == Installation("clone", tmp_path)


def test_a_clone_has_its_project_beside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds.molink, "__file__", str(tmp_path / "molink" / "__init__.py"))
    assert kinds.find_source_folder() is None
    (tmp_path / "pyproject.toml").touch()
    assert kinds.find_source_folder() == tmp_path.resolve()


def test_whoever_manages_the_program_removes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    asked: list[list[str]] = []

    def fake_run(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=len(asked) - 1)

    monkeypatch.setattr(uninstall.subprocess, "run", fake_run)
    monkeypatch.setattr(uninstall, "remove_from_path", lambda _: None)
    uninstall.remove_program(Installation("uv", tmp_path))
    assert asked == [["uv", "tool", "uninstall", "molink"]]
    with pytest.raises(Exception, match="`pipx uninstall molink` failed"):
        uninstall.remove_program(Installation("pipx", tmp_path))
    own = [sys.executable, "-m", "pip", "uninstall", "--yes", "molink"]
    assert uninstall.removal_command(Installation("pip", tmp_path)) == own


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has a copy, not a link")
def test_only_its_own_link_leaves_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program" / "molink"
    program.parent.mkdir()
    program.touch()
    link = tmp_path / ".local" / "bin" / "molink"
    link.parent.mkdir(parents=True)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    link.symlink_to(program)
    uninstall.remove_from_path(tmp_path / "another")
    assert link.is_symlink()
    uninstall.remove_from_path(program.parent)
    assert not link.is_symlink()
    link.touch()
    uninstall.remove_from_path(tmp_path)
    assert link.exists()
