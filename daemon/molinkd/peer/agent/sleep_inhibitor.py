"""Keeps a PC awake while it holds layers.

An idle desktop suspends after some minutes, which would take its stage down. Windows keeps the
state per thread; ``systemd-inhibit`` (Linux) and ``caffeinate`` (macOS) hold the lock while their
child process lives.
"""

import contextlib
import logging
import shutil
import subprocess
import sys
import threading

from molinkd.platform import child_options

log = logging.getLogger(__name__)

#: ``ES_CONTINUOUS`` and ``ES_SYSTEM_REQUIRED``.
_CONTINUOUS, _SYSTEM_REQUIRED = 0x8000_0000, 0x0000_0001
#: The command line that inhibits sleep while the command after it runs.
_INHIBITOR = (
    ("caffeinate", "-i")
    if sys.platform == "darwin"
    else (
        "systemd-inhibit",
        "--what=sleep:idle",
        "--who=molink",
        "--why=this PC holds layers of a model",
        "--mode=block",
    )
)


class SleepInhibitor:
    """Must be used from one thread: Windows stores the state per thread."""

    def __init__(self) -> None:
        self._needed = False
        self._inhibitor: subprocess.Popen[bytes] | None = None
        #: Reaps the inhibitor whenever it ends.
        self._reaper = threading.Thread()

    def inhibit_sleep(self, needed: bool) -> None:
        """Inhibit system sleep, or allow it. The display may turn off either way."""
        if needed != self._needed:
            self._needed = needed
            if sys.platform == "win32":
                _set_windows_sleep(needed)
            elif needed:
                self._start_inhibitor()
            else:
                self.close()

    def close(self) -> None:
        """Allow sleep."""
        self._needed = False
        if sys.platform == "win32":
            _set_windows_sleep(False)
        if self._inhibitor is not None:
            assert self._inhibitor.stdin is not None
            with contextlib.suppress(OSError):
                self._inhibitor.stdin.close()
            self._reaper.join()
            self._inhibitor = None

    def _start_inhibitor(self) -> None:
        inhibit, reader = shutil.which(_INHIBITOR[0]), shutil.which("cat")
        if inhibit is None or reader is None:
            return
        # `cat` exits when our end of the pipe closes, even if this process is killed.
        try:
            self._inhibitor = subprocess.Popen(
                [inhibit, *_INHIBITOR[1:], reader],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                **child_options(),
            )
        except OSError as error:
            log.info("can't inhibit sleep: %s", error)
            return
        self._reaper = threading.Thread(
            target=_reap_inhibitor, args=(self._inhibitor,), name="molink-inhibitor", daemon=True
        )
        self._reaper.start()


def _reap_inhibitor(inhibitor: "subprocess.Popen[bytes]") -> None:
    status = inhibitor.wait()
    if status:
        log.info("can't inhibit sleep: %s ended with status %d", _INHIBITOR[0], status)


def _set_windows_sleep(needed: bool) -> None:
    if sys.platform == "win32":
        import ctypes

        state = _CONTINUOUS | (_SYSTEM_REQUIRED if needed else 0)
        ctypes.windll.kernel32.SetThreadExecutionState(ctypes.c_uint(state))
