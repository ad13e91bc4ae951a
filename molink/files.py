"""Differences between file systems, and names that are safe on all of them."""

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

#: Windows refuses to replace or delete a file while another process, such as a virus scanner, reads
#: it.
_IS_WINDOWS = sys.platform == "win32"
_PAUSE_S = 0.05
#: Names that Windows reserves for devices, with any extension.
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$"}
    | {f"{port}{n}" for port in ("com", "lpt") for n in "0123456789\u00b9\u00b2\u00b3"}
)
#: Characters that Windows forbids in names; ``:`` begins an alternate stream, ``\\`` a folder.
_FORBIDDEN = frozenset('<>:"|?*\\')
#: Maximum length of a name in bytes, and of a relative path.
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 1024
#: Prefix of a Windows path that is used without normalization; a network share continues with
#: ``UNC\``.
_VERBATIM = "\\\\?\\"

T = TypeVar("T")


def retry_while_busy(act: Callable[[], T], seconds: float = 2.0) -> T:
    """Call ``act``; on Windows, retry for up to ``seconds`` while permission is denied.

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


@contextmanager
def write_folder_aside(target: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes ``target`` on success and is deleted on failure.

    Raises:
        OSError: a folder can't be created, renamed or replaced.
    """
    draft = target.with_name(f".{target.name}.part")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        retry_while_busy(lambda: draft.rename(target))
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def make_plain_name(text: str, otherwise: str) -> str:
    """Turn ``text`` into (the start of) a file name that is valid on any file system."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:64].strip("._") or otherwise
    return f"_{plain}" if _is_device(plain) else plain


def is_plain(name: str) -> bool:
    """Whether ``name`` is a valid, visible file name on any file system."""
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None
    return plain and not name.endswith(".") and not _is_device(name)


def find_path_fault(path: str) -> str:
    """Explain why ``path`` is not a relative path inside a folder; empty if it is one.

    ``/`` separates the parts of ``path``. Windows' rules apply on all systems, so that a path means
    the same on every PC.
    """
    if len(path.encode("utf-8", "surrogatepass")) > _MAX_PATH_BYTES:
        return f"has more than {_MAX_PATH_BYTES} bytes"
    return next(filter(None, map(_find_name_fault, path.split("/"))), "")


def _find_name_fault(name: str) -> str:
    if name == "..":
        return "leads out of its folder"
    if name in ("", "."):
        return "is absolute or has an empty part"
    if not name.isprintable():
        return "has control characters"
    if found := _FORBIDDEN.intersection(name):
        return f"has a {min(found)}, which has a meaning of its own on Windows"
    if name.endswith((".", " ")):
        return "ends with a dot or a space"
    if _is_device(name):
        return "names a device of Windows"
    if len(name.encode("utf-8")) > _MAX_NAME_BYTES:
        return f"has a part of more than {_MAX_NAME_BYTES} bytes"
    return ""


def _is_device(name: str) -> bool:
    return name.partition(".")[0].rstrip(" ").lower() in _DEVICES


def resolve_inside(folder: Path, path: Path) -> Path:
    """Resolve links in the parents of ``path`` and check that the result is below ``folder``.

    The last part is not resolved: if it is a link, replacing or deleting it affects the link, not
    its target. This is defence in depth for every path that is written or deleted and has a part
    from the network.

    Raises:
        OSError: the result is outside of ``folder``.
    """
    home, found = _resolve_links(folder), _resolve_links(path.parent) / path.name
    if found == home or not found.is_relative_to(home) or path.name == "..":
        raise OSError(f"{found} is outside of {home}: molink neither writes nor deletes it")
    return found


def _resolve_links(path: Path) -> Path:
    """Return ``path`` without links.

    On Windows, ``Path.resolve`` adds a prefix if another thread creates the folder meanwhile; it is
    removed.
    """
    found = str(path.resolve())
    if found.startswith(_VERBATIM) and not str(path).startswith(_VERBATIM):
        found = re.sub(r"^UNC\\", r"\\\\", found.removeprefix(_VERBATIM))
    return Path(found)
