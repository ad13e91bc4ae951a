"""Noticing that whoever started this process has gone: its standard input ends."""

import contextlib
import os
import threading
from collections.abc import Callable


def watch_input(ended: Callable[[], object]) -> None:
    """Call ``ended`` from a thread of its own at the end of standard input.

    That the event loop has closed by then (``RuntimeError``) is no error.
    """

    def read() -> None:
        # Not sys.stdin: a thread that holds its lock makes the interpreter's exit fail.
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):
            ended()

    threading.Thread(target=read, name="molink-input", daemon=True).start()
