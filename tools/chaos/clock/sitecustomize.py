"""A wall clock that can be set: loaded by every Python process of a PC of a chaos run.

``CHAOS_CLOCK`` names a file with the seconds by which the PC's clock is wrong. The monotonic clock
is left alone, as it is when somebody sets a real clock.
"""

import os
import time
from pathlib import Path

_file = os.environ.get("CHAOS_CLOCK")
_true_time = time.time


def _offset() -> float:
    try:
        return float(Path(str(_file)).read_text(encoding="ascii") or 0)
    except (OSError, ValueError):
        return 0.0


if _file:
    time.time = lambda: _true_time() + _offset()
    time.time_ns = lambda: int(time.time() * 1e9)
