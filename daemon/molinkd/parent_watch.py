"""Detects the parent's exit by the end of standard input."""

import contextlib
import os
import threading
from collections.abc import Callable


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
