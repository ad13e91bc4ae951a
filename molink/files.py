"""Differences between file systems."""

import re
import sys
import time
from collections.abc import Callable
from typing import TypeVar

#: Windows refuses to replace or delete a file while another process, such as a virus scanner, reads
#: it.
_IS_WINDOWS = sys.platform == "win32"
_PAUSE_S = 0.05
#: Names that Windows reserves for devices, with any extension.
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul"} | {f"{port}{n}" for port in ("com", "lpt") for n in range(10)}
)

T = TypeVar("T")


def retry_while_busy(act: Callable[[], T], seconds: float = 2.0) -> T:
    """Call ``act``; on Windows repeat it for up to ``seconds`` while permission is denied.

    Raises:
        OSError: the last error of ``act``.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return act()
        except PermissionError:
            if not _IS_WINDOWS or time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_S)


def make_plain_name(text: str, otherwise: str) -> str:
    """``text`` as (the start of) a file name that is valid on any file system."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:64].strip("._") or otherwise
    return f"_{plain}" if plain.partition(".")[0].lower() in _DEVICES else plain


def is_plain(name: str) -> bool:
    """Whether ``name`` is a valid, visible file name on any file system."""
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None
    return plain and not name.endswith(".") and name.partition(".")[0].lower() not in _DEVICES
