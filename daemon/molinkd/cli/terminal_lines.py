"""Lines that a person types into the terminal of a program that does other things meanwhile.

Nothing waits for a key without end: a thread that is stuck in a read would hold up the end of the
process, and a read in the background stops it.
"""

import os
import sys
import time

#: Characters of a line; what is longer is cut.
_MAX_CHARACTERS = 256

if sys.platform == "win32":
    import msvcrt

    class TypedLines:
        """The lines of a console."""

        def __init__(self) -> None:
            self._typed = ""

        def next(self, patience: float) -> str | None:
            """The line that is finished within so many seconds, if one is."""
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
        """The lines of a terminal."""

        def __init__(self, descriptor: int = 0) -> None:
            self._descriptor = descriptor

        def next(self, patience: float) -> str | None:
            """The line that is finished within so many seconds, if one is.

            Raises:
                EOFError: there will be no more.
            """
            ready, _, _ = select.select([self._descriptor], [], [], patience)
            if not ready:
                return None
            if _in_background(self._descriptor):
                time.sleep(patience)  # the line is for the program in the foreground
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
            return False  # not the terminal that this process belongs to
