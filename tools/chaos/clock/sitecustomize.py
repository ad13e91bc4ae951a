"""An adjustable wall clock for every Python process of a PC.

``CHAOS_CLOCK`` names a file with the clock's offset in seconds. The monotonic clock stays right.
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
