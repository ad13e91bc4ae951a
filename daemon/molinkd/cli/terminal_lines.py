"""Reads lines from the terminal of a program that does other work meanwhile.

Reads never block for long: a blocked thread would delay exit, and a read in the background would
stop the process.
"""

import os
import sys
import time

#: Maximum length of a line.
_MAX_CHARACTERS = 256

if sys.platform == "win32":
    import msvcrt

    class TypedLines:
        """Lines typed into a Windows console."""

        def __init__(self) -> None:
            self._typed = ""

        def next(self, patience: float) -> str | None:
            """Return a line completed within ``patience`` seconds, if any."""
            until = time.monotonic() + patience
            while time.monotonic() < until:
                if not msvcrt.kbhit():
                    time.sleep(0.05)
                    continue
                key = msvcrt.getwche()
                if key in "\r\n":
                    line, self._typed = self._typed, ""
                    print()
                    return line
                self._typed = (
                    self._typed[:-1] if key == "\b" else (self._typed + key)[:_MAX_CHARACTERS]
                )
            return None

else:
    import select

    class TypedLines:
        """Lines typed into a terminal."""

        def __init__(self, descriptor: int = 0) -> None:
            self._descriptor = descriptor

        def next(self, patience: float) -> str | None:
            """Return a line completed within ``patience`` seconds, if any.

            Raises:
                EOFError: end of input.
            """
            ready, _, _ = select.select([self._descriptor], [], [], patience)
            if not ready:
                return None
            if _in_background(self._descriptor):
                time.sleep(patience)  # the input belongs to the foreground program
                return None
            data = os.read(self._descriptor, 4096)
            if not data:
                raise EOFError
            return data.decode("utf-8", "replace")[:_MAX_CHARACTERS]

    def _in_background(descriptor: int) -> bool:
        """Whether a read would stop the process."""
        try:
            return os.tcgetpgrp(descriptor) != os.getpgrp()
        except OSError:
            return False  # not this process's controlling terminal
