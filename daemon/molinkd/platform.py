"""What differs between operating systems, kept in one place."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

#: Has glibc's ``malloc`` advise the kernel so.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
#: Variables that no child needs: whoever can see its environment could use them.
_SECRETS = frozenset({"MOLINK_API_KEY", "MOLINK_TOKEN"})


def child_options(*, computes: bool = False) -> dict[str, Any]:
    """``Popen`` options that keep the terminal's Ctrl-C, windows and our secrets from a child.

    It writes UTF-8 to its pipes, whatever the console has. One that ``computes`` gets its memory in
    huge pages where it can.
    """
    environment = {name: text for name, text in os.environ.items() if name not in _SECRETS}
    environment["PYTHONUTF8"] = "1"
    if computes:
        environment = huge_pages(environment)
    return {"env": environment, **_own_group()}


def huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with what makes torch and glibc ask for huge pages; others don't look at it.

    A CPU prefetches within a page: it streams weights a fifth faster from those of 2 MB.
    """
    tunables = [text for text in (environment.get("GLIBC_TUNABLES"), _HUGE_PAGES) if text]
    return {
        "THP_MEM_ALLOC_ENABLE": "1",
        **environment,
        "GLIBC_TUNABLES": ":".join(tunables),
    }


if sys.platform == "win32":
    import ctypes
    import msvcrt
    import threading

    #: ``CTRL_CLOSE_EVENT``, ``CTRL_LOGOFF_EVENT``, ``CTRL_SHUTDOWN_EVENT``.
    _CONSOLE_ENDS = (2, 5, 6)

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

    def _on_console_end(callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback``, in a thread of Windows' own, before it ends this process.

        Returns how to say that all is done; Windows waits for that about five seconds.
        """
        done = threading.Event()

        def handle(event: int) -> int:
            if event not in _CONSOLE_ENDS:
                return 0
            callback()
            done.wait()
            return 1

        routine = ctypes.WINFUNCTYPE(ctypes.c_int, ctypes.c_uint32)(handle)
        ctypes.windll.kernel32.SetConsoleCtrlHandler(routine, 1)

        def forget() -> None:
            ctypes.windll.kernel32.SetConsoleCtrlHandler(routine, 0)
            done.set()

        return forget

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

    def _on_console_end(callback: Callable[[], None]) -> Callable[[], None]:
        """A terminal that ends sends a signal."""
        return lambda: None

    def _own_group() -> dict[str, Any]:
        return {"start_new_session": True}


def on_terminate(callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` when somebody terminates this process; returns how to undo it.

    Ctrl-C isn't touched: it arrives as ``KeyboardInterrupt``. Windows' only catchable terminate is
    Ctrl-Break; the end of its console, of a session or of the system counts as one too. Windows
    then waits some seconds for the undoing.
    """
    name = "SIGBREAK" if sys.platform == "win32" else "SIGTERM"
    number = getattr(signal, name)
    previous = signal.signal(number, lambda _signal, _frame: callback())
    forget = _on_console_end(callback)

    def undo() -> None:
        signal.signal(number, previous)
        forget()

    return undo


@contextlib.contextmanager
def until_terminated() -> Iterator[asyncio.Event]:
    """Meanwhile, an event of the running loop is set when somebody terminates this process."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        loop.call_soon_threadsafe(stopped.set)

    undo = on_terminate(stop)
    try:
        yield stopped
    finally:
        undo()


def num_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)
