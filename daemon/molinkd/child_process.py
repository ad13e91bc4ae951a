"""A child process with pipes, served by threads and stopped without leftovers.

The child exits when its standard input closes, so it cannot outlive this process. Threads do the
blocking reads (asyncio can't on Windows with a selector loop) and post results to the event loop.
"""

import asyncio
import contextlib
import logging
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, BinaryIO, cast

from molink.plaintext import printable
from molinkd.platform import child_options

log = logging.getLogger(__name__)

#: Size in bytes at which a log file is rotated; one old file is kept.
MAX_LOG_BYTES = 1 << 20
#: Last log lines kept for error messages.
MAX_TAIL_LINES = 12
#: Exit codes from this value on are Windows NTSTATUS codes.
FIRST_WINDOWS_CODE = 0x8000_0000

#: Reads one message from the child's standard output; ``None`` at end of file.
Reader = Callable[[BinaryIO], object | None]


class ChildProcess:
    """One child process. Callbacks run on the event loop that called :meth:`start`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        reader: Reader,
        on_message: Callable[[object], None],
        on_exit: Callable[[int], None],
        log_file: Path,
        computes: bool = False,
    ) -> None:
        self.name = name
        self._computes = computes
        self._command = list(command)
        self._reader = reader
        self._on_message = on_message
        self._on_exit = on_exit
        self._log_file = log_file
        self._tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        self._writes: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._exited = asyncio.Event()

    def start(self) -> None:
        """Start the process and its reader threads.

        Raises:
            OSError: The process can't be started.
        """
        self._loop = asyncio.get_running_loop()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **child_options(computes=self._computes),
        )
        errors = self._start_thread(self._pump_log, "log")
        self._start_thread(self._pump_writes, "writes")
        self._start_thread(self._pump_messages, "messages", errors)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not exited yet."""
        return not self._exited.is_set()

    @property
    def tail(self) -> str:
        """The last lines of the child's log."""
        return "\n".join(self._tail)

    def set_name(self, name: str, log_file: Path) -> None:
        """Change the name and the log file, when the process takes over another task."""
        self.name, self._log_file = name, log_file

    def send(self, data: bytes) -> None:
        """Queue bytes for the child's standard input; dropped if it has exited."""
        self._writes.put(data)

    def close_input(self) -> None:
        """Close the child's standard input after the queued writes, which makes it exit."""
        self._writes.put(None)

    async def stop(self, grace_s: float = 5.0, *, kill: bool = False) -> None:
        """Stop the process: close its input, terminate after ``grace_s``, then kill.

        ``kill`` skips straight to the last step.
        """
        self.close_input()
        if kill:
            with contextlib.suppress(OSError):
                self._process.kill()
        for end in (self._process.terminate, self._process.kill):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), grace_s)
                break
            log.warning("%s (pid %d) did not exit in %.0f s", self.name, self.pid, grace_s)
            with contextlib.suppress(OSError):
                end()
        await self._exited.wait()

    def _start_thread(
        self, work: Callable[..., None], what: str, *args: object
    ) -> threading.Thread:
        thread = threading.Thread(target=work, args=args, name=f"{self.name}-{what}", daemon=True)
        thread.start()
        return thread

    def _call_on_loop(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    def _pump_messages(self, errors: threading.Thread) -> None:
        stream = cast(BinaryIO, self._process.stdout)
        try:
            while (message := self._reader(stream)) is not None:
                self._call_on_loop(self._on_message, message)
        except Exception as error:
            log.warning("%s: invalid output: %s", self.name, error)
            with contextlib.suppress(OSError):
                self._process.kill()
        code = self._process.wait()
        self.close_input()
        errors.join(timeout=5.0)
        stream.close()
        self._call_on_loop(self._on_exited, code)

    def _on_exited(self, code: int) -> None:
        self._exited.set()
        self._on_exit(code)

    def _pump_writes(self) -> None:
        stream = cast(BinaryIO, self._process.stdin)
        with contextlib.suppress(OSError):
            while (data := self._writes.get()) is not None:
                stream.write(data)
                stream.flush()
        with contextlib.suppress(OSError):
            stream.close()

    def _pump_log(self) -> None:
        stream = cast(IO[bytes], self._process.stderr)
        path = self._log_file
        file = BoundedLog(path)
        for line in iter(lambda: stream.readline(16384), b""):
            if path != self._log_file:
                file.close()
                path = self._log_file
                file = BoundedLog(path)
            text = printable(line.decode("utf-8", "replace").rstrip(), keep="\t")
            self._tail.append(text)
            file.write_line(f"{text}\n".encode())
        file.close()
        stream.close()


def exit_text(code: int) -> str:
    """An exit code in words; Windows NTSTATUS codes in hexadecimal."""
    if code < 0:
        return f"was terminated by signal {-code}"
    return f"exited with code {f'0x{code:08X}' if code >= FIRST_WINDOWS_CODE else code}"


class BoundedLog:
    """A log file that is rotated to ``….1`` at ``limit`` bytes."""

    def __init__(self, path: Path, limit: int = MAX_LOG_BYTES) -> None:
        self._path = path
        self._limit = limit
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def write_line(self, line: bytes) -> None:
        """Append a line; dropped if the disk is full."""
        try:
            if self._file.tell() + len(line) > self._limit:
                self._file.close()
                with contextlib.suppress(OSError):  # open elsewhere (Windows)
                    self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file = self._path.open("ab")
            self._file.write(line)
            self._file.flush()
        except (OSError, ValueError) as error:  # ValueError: reopening failed before
            log.warning("can't write %s: %s", self._path, error)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
