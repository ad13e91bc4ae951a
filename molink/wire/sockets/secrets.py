"""Files that only their owner may read: CURVE keys, API keys, the state folder.

On POSIX they have mode 0600 (folders 0700). On Windows an access list with only the current user is
set before anything is written. Files are replaced atomically.
"""

import csv
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from molink.errors import UsageError
from molink.files import retry_while_busy
from molink.wire.sockets.key_pair import KeyPair

#: Without this flag, Windows converts line ends.
_BINARY = getattr(os, "O_BINARY", 0)
#: Windows' own programs; a bare name would be searched in the current folder first.
_SYSTEM = Path(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32")
#: Characters of a seed in Z85.
_KEY_LENGTH = 40


def private_folder(path: Path) -> Path:
    """Create ``path`` and its parents for their owner only; return it."""
    if not path.is_dir():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            _restrict(path, folder=True)
        except BaseException:
            path.rmdir()  # so that the next call retries
            raise
    return path


def write_secret(path: Path, text: str) -> None:
    """Write ``text`` atomically to a file that only its owner may read, in an existing folder."""
    write_secret_bytes(path, text.encode("utf-8"))


def write_secret_bytes(path: Path, data: bytes) -> None:
    """As :func:`write_secret`, for binary data."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    retry_while_busy(lambda: draft.unlink(missing_ok=True))
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _restrict(draft)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        retry_while_busy(lambda: draft.replace(path))
    except BaseException:
        retry_while_busy(lambda: draft.unlink(missing_ok=True))
        raise


def read_secret(path: Path) -> str:
    """Read a file of :func:`write_secret`, and remove other users' access to it."""
    text = path.read_text(encoding="utf-8")
    if sys.platform != "win32" and path.stat().st_mode & 0o077:
        path.chmod(0o600)
    return text


def load_keys(path: Path) -> KeyPair:
    """Load the key pair of the secret in ``path``, or create one if there is no file.

    Raises:
        UsageError: the file is unreadable or holds no key, or a new one can't be written.
    """
    try:
        secret = read_secret(path).strip()
        if len(secret) != _KEY_LENGTH:
            raise ValueError
        return KeyPair.from_seed(secret)
    except FileNotFoundError:
        return _create_keys(path)
    except OSError as error:
        raise UsageError(
            f"{path} can't be read: {error.strerror or error}. Restore it from a copy, or move it "
            "away to get a new identity (which has to join the swarm again)."
        ) from None
    except ValueError:
        raise UsageError(
            f"{path} holds no key. Restore it from a copy, or delete it to get a new "
            "identity (which has to join the swarm again)."
        ) from None


def _create_keys(path: Path) -> KeyPair:
    keys = KeyPair.generate()
    try:
        private_folder(path.parent)
        write_secret(path, keys.seed + "\n")
    except OSError as error:
        raise UsageError(
            f"{path} can't be written: {error.strerror or error}. Is the disk full or read-only?"
        ) from None
    return keys


if sys.platform == "win32":

    def _restrict(path: Path, *, folder: bool = False) -> None:
        rights = "(OI)(CI)F" if folder else "F"
        icacls = str(_SYSTEM / "icacls.exe")
        _run([icacls, str(path), "/inheritance:r", "/grant:r", f"*{_user_sid()}:{rights}"])

else:

    def _restrict(path: Path, *, folder: bool = False) -> None:
        path.chmod(0o700 if folder else 0o600)


@cache
def _user_sid() -> str:
    """Return the current Windows user's security id, which no display language changes."""
    whoami = str(_SYSTEM / "whoami.exe")
    row = next(csv.reader([_run([whoami, "/user", "/fo", "csv", "/nh"])]))
    return row[1]


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        stdin=subprocess.DEVNULL,
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )
    if done.returncode:
        raise UsageError(
            f"can't restrict access to a secret: {' '.join(command)} ended with "
            f"{done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout
