"""Differences between operating systems."""

import contextlib
import locale
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

#: Makes glibc's ``malloc`` request huge pages.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
#: Secrets that child processes don't need in their environment.
_SECRETS = frozenset({"MOLINK_API_KEY", "MOLINK_RENDEZVOUS", "MOLINK_TOKEN"})


def child_options(*, computes: bool = False) -> dict[str, Any]:
    """``Popen`` options that keep Ctrl-C, console windows and our secrets from a child.

    Pipes use UTF-8 regardless of the console. With ``computes`` memory uses huge pages where
    possible.
    """
    environment = {name: text for name, text in os.environ.items() if name not in _SECRETS}
    environment["PYTHONUTF8"] = "1"
    if computes:
        environment = huge_pages(environment)
    return {"env": environment, **_own_group()}


def huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with huge pages enabled for torch and glibc.

    CPUs prefetch within a page: weights stream a fifth faster from 2 MB pages.
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
        """Lock ``file`` while it is open; ``False`` if another process holds the lock."""
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

    def user_language() -> str:
        """The language of this user's Windows, such as ``de_DE``; empty if it is unknown."""
        return locale.windows_locale.get(ctypes.windll.kernel32.GetUserDefaultUILanguage(), "")

    def _own_group() -> dict[str, Any]:
        flags = subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP
        return {"creationflags": flags}

else:
    import fcntl

    def lock_file(file: IO[bytes]) -> bool:
        """Lock ``file`` while it is open; ``False`` if another process holds the lock."""
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock_file(file: IO[bytes]) -> None:
        """Let go of it."""
        fcntl.flock(file.fileno(), fcntl.LOCK_UN)

    def _on_console_end(callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def user_language() -> str:
        """Unknown but for the environment's variables."""
        return ""

    def _own_group() -> dict[str, Any]:
        return {"start_new_session": True}


def on_terminate(callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` when this process is terminated; returns a function that undoes it.

    Ctrl-C still raises ``KeyboardInterrupt``. On Windows, Ctrl-Break and the end of the console,
    session or system count as termination; Windows then waits some seconds for the undo.
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
def until_terminated() -> "Iterator[asyncio.Event]":
    """A context whose event is set when this process is terminated."""
    import asyncio

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


def watch_input(
    ended: Callable[[], object], on_line: Callable[[bytes], object] = lambda _: None
) -> None:
    """Call ``on_line`` for each line of standard input, and ``ended`` at its end, in a thread.

    A closed event loop (``RuntimeError``) is ignored.
    """

    def read() -> None:
        # Not sys.stdin: a thread holding its lock makes the interpreter's exit fail.
        rest = b""
        with contextlib.suppress(OSError, RuntimeError):
            while data := os.read(0, 4096):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    on_line(line)
        with contextlib.suppress(RuntimeError):
            ended()

    threading.Thread(target=read, name="molink-input", daemon=True).start()


#: Enough for any swarm. Some systems allow a billion, which slows programs that iterate over all.
_WANTED_DESCRIPTORS = 1 << 16
#: The actual limit when macOS reports infinity.
_OPEN_MAX = 10240


def raise_descriptor_limit() -> None:
    """Raise the limit of open files up to 65536, if permitted.

    Many systems default to 1024, which a stranger's half-open connections would exhaust. Call it
    first in every process that listens. Windows has no such limit.
    """
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        maximum = (
            _WANTED_DESCRIPTORS
            if hard == resource.RLIM_INFINITY
            else min(_WANTED_DESCRIPTORS, hard)
        )
        if soft == resource.RLIM_INFINITY:
            return
        for wanted in (min(maximum, _OPEN_MAX), maximum):
            if wanted > soft:
                with contextlib.suppress(OSError, ValueError):
                    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
