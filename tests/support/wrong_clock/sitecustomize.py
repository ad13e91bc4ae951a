"""Python in a process whose wall clock jumps: by the seconds that stand in ``WALL_CLOCK_OFFSET``.

That variable names a file, which a test writes. It works for all processes that one starts, if this
folder is in their ``PYTHONPATH``. Monotonic clocks stay.
"""

import os
import time

_real = time.time
_file = os.environ["WALL_CLOCK_OFFSET"]


def _wrong() -> float:
    with open(_file, encoding="ascii") as offset:  # noqa: PTH123  pathlib would take long to import
        return _real() + float(offset.read() or 0)


time.time = _wrong
