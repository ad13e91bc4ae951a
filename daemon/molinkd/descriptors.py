"""How many connections a process may have: each takes a descriptor."""

import contextlib
import sys

#: Enough for any swarm. Some systems allow a thousand million, which other programs then walk over.
_WANTED_DESCRIPTORS = 1 << 16
#: What macOS means when it says infinity.
_OPEN_MAX = 10240


def raise_descriptor_limit() -> None:
    """Let this process open as many files and sockets as its user may, up to 65536.

    Many systems begin with 1024, which half-open connections of a stranger use up within the time
    that a handshake may take. Call it first thing in every process that listens. Windows has no
    such limit, and where it can't be raised it stays.
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
