"""Reads pairing codes that the user types into the terminal of ``molink up``."""

import threading
from collections.abc import Callable

from molink.errors import MolinkError
from molinkd.cli.terminal_lines import TypedLines

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
                self._say(f"{self._approve(line.strip())} joined.")
            except MolinkError as error:
                self._say(f"molink: {error}")
