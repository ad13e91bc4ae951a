"""What the system knows of a TCP connection that libzmq holds, and how to end it.

A descriptor that libzmq has told us of is libzmq's to close, at any time, and its number is then
used again. So it is borrowed for the moment of a call only, and what is done to a connection is
done to a duplicate that was seen to be the right one.
"""

import contextlib
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform == "win32":
    import ctypes
    from ctypes import wintypes

    #: ``SO_LINGER`` for no time at all.
    _RESET_AT_CLOSE = struct.pack("HH", 1, 0)

    _SIO_TCP_INFO = 0xD8000027

    class _TcpInfo(ctypes.Structure):
        """``TCP_INFO_v0``, since Windows 10 1703."""

        _fields_ = (
            ("state", ctypes.c_int),
            ("mss", wintypes.ULONG),
            ("connection_time_ms", ctypes.c_uint64),
            ("timestamps_enabled", wintypes.BOOLEAN),
            ("rtt_us", wintypes.ULONG),
            ("min_rtt_us", wintypes.ULONG),
            ("bytes_in_flight", wintypes.ULONG),
            ("cwnd", wintypes.ULONG),
            ("snd_wnd", wintypes.ULONG),
            ("rcv_wnd", wintypes.ULONG),
            ("rcv_buf", wintypes.ULONG),
            ("bytes_out", ctypes.c_uint64),
            ("bytes_in", ctypes.c_uint64),
            ("bytes_reordered", wintypes.ULONG),
            ("bytes_retransmitted", wintypes.ULONG),
            ("fast_retransmits", wintypes.ULONG),
            ("duplicate_acks_in", wintypes.ULONG),
            ("timeout_episodes", wintypes.ULONG),
            ("syn_retransmits", ctypes.c_ubyte),
        )

    _ioctl = ctypes.WinDLL("ws2_32", use_last_error=True).WSAIoctl
    _ioctl.argtypes = (
        ctypes.c_size_t,
        wintypes.DWORD,
        ctypes.c_void_p,
        wintypes.DWORD,
        ctypes.c_void_p,
        wintypes.DWORD,
        ctypes.POINTER(wintypes.DWORD),
        ctypes.c_void_p,
        ctypes.c_void_p,
    )
    _ioctl.restype = ctypes.c_int

    _FIONREAD = 0x4004667F

    #: Bytes that are taken away from a connection at a time.
    _STOLEN = 1 << 16

    _ioctlsocket = ctypes.WinDLL("ws2_32").ioctlsocket
    _ioctlsocket.argtypes = (ctypes.c_size_t, ctypes.c_long, ctypes.POINTER(wintypes.ULONG))
    _ioctlsocket.restype = ctypes.c_int

    def bytes_received(descriptor: int) -> int | None:
        """Bytes that came on a TCP connection so far; ``None`` if the system doesn't say."""
        version, info, size = wintypes.DWORD(0), _TcpInfo(), wintypes.DWORD(0)
        failed = _ioctl(
            descriptor,
            _SIO_TCP_INFO,
            ctypes.byref(version),
            ctypes.sizeof(version),
            ctypes.byref(info),
            ctypes.sizeof(info),
            ctypes.byref(size),
            None,
            None,
        )
        return None if failed else int(info.bytes_in)

    def bytes_unread(descriptor: int) -> int:
        """How many of them are still with the system."""
        count = wintypes.ULONG(0)
        failed = _ioctlsocket(descriptor, _FIONREAD, ctypes.byref(count))
        return 0 if failed else int(count.value)

    def _end(connection: socket.socket) -> None:
        """Take away what waits to be read: libzmq ends what it can't decipher any more.

        If a socket is shut down under it, it ends the process (an assertion in its ``tcp_read``).
        """
        with contextlib.suppress(BlockingIOError):
            connection.recv(_STOLEN)

else:
    import fcntl
    import termios

    #: ``SO_LINGER`` for no time at all.
    _RESET_AT_CLOSE = struct.pack("ii", 1, 0)
    #: Where ``tcpi_bytes_received`` lies in Linux' ``tcp_info``, since Linux 4.1.
    _BYTES_RECEIVED = struct.Struct("=128xQ")

    def bytes_received(descriptor: int) -> int | None:
        """Bytes that came on a TCP connection so far; ``None`` if the system doesn't say."""
        try:
            # Family and type are given so that Python doesn't ask the system for them.
            borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        except OSError:
            return None
        try:
            info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
            (count,) = _BYTES_RECEIVED.unpack(info)
        except (OSError, struct.error):
            return None
        finally:
            borrowed.detach()
        return int(count)

    def bytes_unread(descriptor: int) -> int:
        """How many of them are still with the system."""
        try:
            answer = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
        except OSError:
            return 0
        return int.from_bytes(answer, sys.byteorder)

    def _end(connection: socket.socket) -> None:
        """Shut it down: libzmq then finds it ended."""
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def duplicate_socket(descriptor: int) -> Iterator[socket.socket]:
    """A socket of one's own for the same connection, for the time of a ``with`` block.

    Raises:
        OSError: the descriptor is no socket, or no more.
    """
    if sys.platform == "win32":
        # A duplicate would make both blocking there; so the descriptor itself is borrowed.
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        try:
            yield borrowed
        finally:
            borrowed.detach()
        return
    # A socket's own dup() would make both blocking.
    number = socket.dup(descriptor)
    try:
        own = socket.socket(fileno=number)
    except OSError:
        socket.close(number)
        raise
    with own:
        yield own


def remote_address(descriptor: int) -> tuple[str, int] | None:
    """Address and port of a connection's other end; ``None`` if it is none (any more)."""
    try:
        with duplicate_socket(descriptor) as connection:
            host, port = connection.getpeername()[:2]
    except (OSError, TypeError, ValueError):
        return None
    return str(host), int(port)


def cut_connection(descriptor: int, other_end: tuple[str, int]) -> bool:
    """End the connection to ``other_end``; ``False`` if the descriptor isn't that one's any more.

    libzmq then closes it, which resets it: nothing more of it is kept. On Windows it does so only
    once more has come on it, and not at the first try: there call this until it says ``False``.
    """
    try:
        with duplicate_socket(descriptor) as connection:
            if connection.getpeername()[:2] != other_end:
                return False
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            _end(connection)
    except OSError:
        return False
    return True


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
