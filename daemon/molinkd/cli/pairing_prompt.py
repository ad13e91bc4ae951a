"""Reads pairing codes that the user types into the terminal of ``molink up``.

Reads never block for long: a blocked thread would delay exit, and a read in the background would
stop the process.
"""

import os
import sys
import threading
import time
from collections.abc import Callable

from molink.errors import MolinkError
from molink.swarm.membership.sanitize import quote_name
from molinkd.cli.translation import tr

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


#: Interval of the check for pending requests, in seconds.
_POLL_INTERVAL_S = 0.5


class PairingPrompt:
    """Reads codes in a thread while pairing requests are pending."""

    def __init__(
        self, approve: Callable[[str], str], say: Callable[[str], None], lines: TypedLines
    ) -> None:
        """``approve(code)`` returns the name of the approved PC, or raises."""
        self._approve, self._say, self._lines = approve, say, lines
        self._is_pending = threading.Event()
        self._thread: threading.Thread | None = None

    def set_pending(self, *, pending: bool) -> None:
        """Start or stop reading, as requests are ``pending`` or not."""
        if pending == self._is_pending.is_set():
            return
        if not pending:
            self._is_pending.clear()
            return
        self._is_pending.set()
        previous = self._thread
        self._thread = threading.Thread(
            target=self._read_codes, args=(previous,), name="molink-pairing", daemon=True
        )
        self._thread.start()

    def _read_codes(self, previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()  # the previous thread may still be stopping
        while self._is_pending.is_set():
            try:
                line = self._lines.next(_POLL_INTERVAL_S)
            except (EOFError, OSError):
                return
            if line is None or not line.strip():
                continue
            try:
                self._say(tr("{pc} joined.", pc=quote_name(self._approve(line.strip()))))
            except MolinkError as error:
                self._say(f"{tr('error')}: {error}")
