"""What file systems do that isn't the same everywhere."""

import re
import sys
import time
from collections.abc import Callable
from typing import TypeVar

#: Windows refuses to replace or delete what somebody (a virus scanner, say) reads at the moment.
_FORBIDDEN = sys.platform == "win32"
_PAUSE_S = 0.05
#: Names that Windows keeps for devices, whatever follows their first dot.
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul"} | {f"{port}{n}" for port in ("com", "lpt") for n in range(10)}
)

T = TypeVar("T")


def retry_while_busy(act: Callable[[], T], seconds: float = 2.0) -> T:
    """``act()``; on Windows again for up to ``seconds`` while that is not permitted.

    Raises:
        OSError: whatever ``act`` raised last.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return act()
        except PermissionError:
            if not _FORBIDDEN or time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_S)


def make_plain_name(text: str, otherwise: str) -> str:
    """``text`` as (the first part of) a file name that any file system takes."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:64].strip("._") or otherwise
    return f"_{plain}" if plain.partition(".")[0].lower() in _DEVICES else plain


def is_plain(name: str) -> bool:
    """Whether ``name`` can be that of a file in a folder, on any file system; none is hidden."""
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None
    return plain and not name.endswith(".") and name.partition(".")[0].lower() not in _DEVICES
