"""The state folder, its lock, and the run file."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from molink.errors import UsageError
from molinkd.peer.demo import acquire_demo_home
from molinkd.peer.home import Home, HomeLock, RunFile, copy_measurements, read_run_file


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path / "env"))
    assert Home.find_home().root == tmp_path / "env"
    assert Home.find_home(tmp_path / "given").root == tmp_path / "given"
    monkeypatch.delenv("MOLINK_HOME")
    assert Home.find_home().root.is_absolute()


def test_commands_are_shown_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path))
    assert Home(tmp_path).format_command("up") == "`molink up`"
    other = Home(tmp_path / "a b")
    quote = '"' if sys.platform == "win32" else "'"
    assert other.format_command("leave --dissolve") == (
        f"`molink leave --dissolve --home {quote}{other.root}{quote}`"
    )


def test_a_home_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"can't create the state folder .*--home"):
        Home(tmp_path / "file" / "home").create_folders()


def test_keys_stay_the_same(tmp_path: Path) -> None:
    home = Home(tmp_path / "home").create_folders()
    assert home.load_keys() == home.load_keys()
    if sys.platform != "win32":
        assert (home.root.stat().st_mode & 0o077) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="modes are of POSIX")
def test_a_demo_leaves_the_state_folder_private(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    made, lock = acquire_demo_home(home)
    lock.release()
    assert [one.root.stat().st_mode & 0o077 for one in (home, made)] == [0, 0]


def test_two_daemons_cannot_share_a_home(tmp_path: Path) -> None:
    home = Home(tmp_path).create_folders()
    first, second = HomeLock(home), HomeLock(home)
    first.acquire()
    with pytest.raises(UsageError, match="another molink daemon"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    second.release()


def test_a_dead_process_holds_no_lock(tmp_path: Path) -> None:
    home = Home(tmp_path).create_folders()
    code = (
        "import os, pathlib, sys\n"
        "from molinkd.peer.home import Home, HomeLock\n"
        "HomeLock(Home(pathlib.Path(sys.argv[1]))).acquire()\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    lock = HomeLock(home)
    assert lock.try_acquire()
    lock.release()


def test_a_running_daemon_is_found(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    note = RunFile.of_this_process(5467, "http://127.0.0.1:5465")
    note.save_file(path)
    assert read_run_file(path) == note


def test_a_stale_run_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert read_run_file(path) is None
    note = RunFile.of_this_process(5467, "http://127.0.0.1:5465")
    # The process id has gone to another process since.
    msgspec.structs.replace(note, started=note.started - 100).save_file(path)
    assert read_run_file(path) is None
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    msgspec.structs.replace(note, pid=ended.pid).save_file(path)
    assert read_run_file(path) is None
    path.write_text("{", encoding="utf-8")
    assert read_run_file(path) is None


def test_measurements_are_copied(tmp_path: Path) -> None:
    one, two = Home(tmp_path / "one").create_folders(), Home(tmp_path / "two")
    copy_measurements(one, two)
    assert not two.root.exists()
    one.load_keys()
    one.profiles.mkdir()
    for path in (one.device, one.profiles / "a.json", one.profiles / "b.json"):
        path.write_text(path.name, encoding="utf-8")
    copy_measurements(one, two)
    copied = [path for path in two.root.rglob("*") if path.is_file()]
    assert sorted(path.name for path in copied) == ["a.json", "b.json", "device.json"]
    assert all(path.read_text(encoding="utf-8") == path.name for path in copied)
