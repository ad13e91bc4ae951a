"""What differs between operating systems, kept in one place."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

#: Variables that no child needs: whoever can see its environment could use them.
_SECRETS = frozenset({"MOLINK_API_KEY", "MOLINK_TOKEN"})


def child_options() -> dict[str, Any]:
    """``Popen`` options that keep the terminal's Ctrl-C, windows and our secrets from a child.

    It writes UTF-8 to its pipes, whatever the console has.
    """
    environment = {name: text for name, text in os.environ.items() if name not in _SECRETS}
    environment["PYTHONUTF8"] = "1"
    return {"env": environment, **_own_group()}


if sys.platform == "win32":
    import msvcrt

    def lock_file(file: IO[bytes]) -> bool:
        """Take an exclusive lock for the life of ``file``; ``False`` if somebody holds it."""
        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def unlock_file(file: IO[bytes]) -> None:
        """Let go of it: Windows does so some time after the file was closed."""
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

    def _own_group() -> dict[str, Any]:
        flags = subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP
        return {"creationflags": flags}

else:
    import fcntl

    def lock_file(file: IO[bytes]) -> bool:
        """Take an exclusive lock for the life of ``file``; ``False`` if somebody holds it."""
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock_file(file: IO[bytes]) -> None:
        """Let go of it."""
        fcntl.flock(file.fileno(), fcntl.LOCK_UN)

    def _own_group() -> dict[str, Any]:
        return {"start_new_session": True}


def on_terminate(callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` when somebody terminates this process; returns how to undo it.

    Ctrl-C isn't touched: it arrives as ``KeyboardInterrupt``. Windows has no catchable terminate
    but Ctrl-Break.
    """
    name = "SIGBREAK" if sys.platform == "win32" else "SIGTERM"
    number = getattr(signal, name)
    previous = signal.signal(number, lambda _signal, _frame: callback())

    def undo() -> None:
        signal.signal(number, previous)

    return undo


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)
