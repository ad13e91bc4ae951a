"""Raises the limit of open file descriptors, which limits connections."""

import contextlib
import sys

#: Enough for any swarm. Some systems allow a billion, which slows programs that iterate over all.
_WANTED_DESCRIPTORS = 1 << 16
#: The actual limit when macOS reports infinity.
_OPEN_MAX = 10240


def raise_descriptor_limit() -> None:
    """Raise the limit of open files up to 65536, as far as the user may.

    Many systems default to 1024, which a stranger's half-open connections would exhaust. Call it
    first in every process that listens. Windows has no such limit.
    """
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        maximum = (
            _WANTED_DESCRIPTORS
            if hard == resource.RLIM_INFINITY
            else min(_WANTED_DESCRIPTORS, hard)
        )
        if soft == resource.RLIM_INFINITY:
            return
        for wanted in (min(maximum, _OPEN_MAX), maximum):
            if wanted > soft:
                with contextlib.suppress(OSError, ValueError):
                    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
