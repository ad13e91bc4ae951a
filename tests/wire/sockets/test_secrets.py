import errno
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, Never

import pytest

from molink.errors import UsageError
from molink.wire.sockets import secrets
from molink.wire.sockets.key_pair import KeyPair

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@posix
def test_secret_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    folder = secrets.private_folder(tmp_path / "a" / "b")
    secrets.write_secret(folder / "key", "one")
    secrets.write_secret(folder / "key", "two")
    assert secrets.read_secret(folder / "key") == "two"
    assert mode(folder / "key") == 0o600
    assert mode(folder) == 0o700
    assert [entry.name for entry in folder.iterdir()] == ["key"]


@posix
def test_reading_a_secret_removes_other_access(tmp_path: Path) -> None:
    path = tmp_path / "key"
    secrets.write_secret(path, "x")
    path.chmod(0o644)
    secrets.read_secret(path)
    assert mode(path) == 0o600


def test_folder_open_to_others_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_path: Path, *, folder: bool = False) -> Never:
        raise UsageError("not restricted")

    with monkeypatch.context() as broken:
        broken.setattr(secrets, "_restrict", fails)
        with pytest.raises(UsageError, match="not restricted"):
            secrets.private_folder(tmp_path / "state")
    assert not (tmp_path / "state").exists()
    assert secrets.private_folder(tmp_path / "state").is_dir()


@pytest.mark.skipif(sys.platform != "win32", reason="programs of Windows'")
def test_windows_programs_have_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs in the current folder are ignored, and the user is looked up once."""
    run, commands = subprocess.run, []

    def note(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", note)
    secrets._user_sid.cache_clear()
    secrets.write_secret(tmp_path / "one", "1")
    secrets.write_secret(tmp_path / "two", "2")
    assert [Path(program).name for program, *_ in commands] == ["whoami.exe", *["icacls.exe"] * 2]
    assert {Path(program).parent.name.lower() for program, *_ in commands} == {"system32"}


def test_keys_are_created_once(tmp_path: Path) -> None:
    path = tmp_path / "state" / "peer.key"
    keys = secrets.load_keys(path)
    assert secrets.load_keys(path) == keys
    assert not any(one in repr(keys) for one in (keys.secret, keys.seed))
    assert KeyPair.from_seed(keys.seed) == keys


@pytest.mark.parametrize("text", ["", "short", "\N{SNOWMAN}" * 40, '"' * 40, "#" * 40])
def test_a_file_without_a_key_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peer.key"
    secrets.write_secret(path, text)
    with pytest.raises(UsageError, match=r"peer\.key holds no key"):
        secrets.load_keys(path)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    secrets.write_secret(path, "old")

    def full(_descriptor: int) -> Never:
        raise OSError(28, "no space left")

    monkeypatch.setattr(secrets.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        secrets.write_secret(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


def test_the_windows_user_is_named_by_its_security_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_run", lambda command: '"pc\\me","S-1-5-21-7-1001"\n')
    assert secrets._user_sid.__wrapped__() == "S-1-5-21-7-1001"


def test_a_refusal_of_the_system_tool_is_shown() -> None:
    with pytest.raises(UsageError, match="ended with 3: no"):
        secrets._run([sys.executable, "-c", "import sys; print('no'); sys.exit(3)"])


def test_a_key_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "peer.key"
    folder.mkdir(mode=0o755)
    with pytest.raises(UsageError, match=r"peer\.key can't be read"):
        secrets.load_keys(folder)
    if sys.platform != "win32":
        assert folder.stat().st_mode & 0o777 == 0o755


def test_keys_that_can_not_be_written_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(secrets, "write_secret", full)
        with pytest.raises(UsageError, match="No space left on device"):
            secrets.load_keys(tmp_path / "home" / "peer.key")
    assert secrets.load_keys(tmp_path / "home" / "peer.key").public
