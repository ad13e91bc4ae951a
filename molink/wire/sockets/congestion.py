"""TCP's congestion control of a single connection, where the system lets a program choose it."""

import contextlib
import socket
import sys
from pathlib import Path

from molink.wire.sockets.tcp_info import duplicate_socket

#: What suits few bytes at a time, best first. Without privileges Linux may refuse the first.
_STEADY = (b"cubic", b"reno")
#: An option of Linux's sockets, and a rate in bytes/s that is no bound: with any, it paces.
_SO_MAX_PACING_RATE = 47
_NO_RATE = 2**31 - 1
#: What Linux says of all connections of this network namespace.
_LINUX = Path("/proc/sys/net/ipv4")


def avoid_bbr(descriptor: int) -> None:
    """Let the TCP connection ``descriptor`` be controlled by something other than BBR, if it is.

    Every 10 s or so BBR sends next to nothing for 200 ms, to see what the round trip of an empty
    link is, and it spreads what comes in one piece over several milliseconds. Both delay a message
    that should arrive at once. Other systems than Linux have no such choice, and hardly any BBR.
    """
    if sys.platform != "linux":
        return
    # By the time that we hear of it, it may be no connection any more.
    with contextlib.suppress(OSError), duplicate_socket(descriptor) as connection:
        used = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        if not used.startswith(b"bbr"):
            return
        for name in _STEADY:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
                return


def enable_pacing(descriptor: int) -> None:
    """Let Linux pace what the TCP connection ``descriptor`` sends, whatever controls it.

    In slow start two segments follow on each that is acknowledged, so half a window stands in a
    queue before the link's narrowest point, which may have no room for it. Paced, they leave
    evenly. Other systems have no such choice.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError), duplicate_socket(descriptor) as connection:
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _NO_RATE)


def has_idle_reset() -> bool:
    """Whether a connection that was silent for a while begins as slowly as a new one.

    Linux lets its congestion window fall in pauses unless it is told not to, or under BBR. Windows
    doesn't by default.
    """
    if sys.platform != "linux":
        return False
    try:
        used = (_LINUX / "tcp_congestion_control").read_text(encoding="ascii")
        forgets = (_LINUX / "tcp_slow_start_after_idle").read_text(encoding="ascii")
    except OSError:
        return False
    return forgets.strip() != "0" and not used.startswith("bbr")
