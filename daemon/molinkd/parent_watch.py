"""Noticing that whoever started this process has gone: its standard input ends."""

import contextlib
import os
import threading
from collections.abc import Callable


def watch_input(
    ended: Callable[[], object], on_line: Callable[[bytes], object] = lambda _: None
) -> None:
    """Call ``ended`` from a thread of its own at the end of standard input.

    ``on_line`` gets each line before that. That the event loop has closed by then
    (``RuntimeError``) is no error.
    """

    def read() -> None:
        # Not sys.stdin: a thread that holds its lock makes the interpreter's exit fail.
        rest = b""
        with contextlib.suppress(OSError, RuntimeError):
            while data := os.read(0, 4096):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    on_line(line)
        with contextlib.suppress(RuntimeError):
            ended()

    threading.Thread(target=read, name="molink-input", daemon=True).start()
