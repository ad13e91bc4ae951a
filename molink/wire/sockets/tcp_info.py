"""TCP connections that libzmq holds: received bytes, addresses, congestion control, cutting.

libzmq may close its descriptors at any time, and their numbers are reused. A descriptor is
therefore only borrowed during a call, and connections are changed through a duplicate that has been
verified.
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

    #: ``SO_LINGER`` with a timeout of 0: closing resets the connection.
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

    #: Bytes to discard at a time.
    _STOLEN = 1 << 16

    _ioctlsocket = ctypes.WinDLL("ws2_32").ioctlsocket
    _ioctlsocket.argtypes = (ctypes.c_size_t, ctypes.c_long, ctypes.POINTER(wintypes.ULONG))
    _ioctlsocket.restype = ctypes.c_int

    def bytes_received(descriptor: int) -> int | None:
        """Bytes received on a TCP connection so far; ``None`` if unknown."""
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
        """Received bytes that the system still holds."""
        count = wintypes.ULONG(0)
        failed = _ioctlsocket(descriptor, _FIONREAD, ctypes.byref(count))
        return 0 if failed else int(count.value)

    def _end(connection: socket.socket) -> None:
        """Discard received bytes, so that libzmq closes the connection, which it can't decipher.

        Shutting the socket down would abort the process (an assertion in libzmq's ``tcp_read``).
        """
        with contextlib.suppress(BlockingIOError):
            connection.recv(_STOLEN)

else:
    import fcntl
    import termios

    #: ``SO_LINGER`` with a timeout of 0: closing resets the connection.
    _RESET_AT_CLOSE = struct.pack("ii", 1, 0)
    if sys.platform == "darwin":
        #: ``TCP_CONNECTION_INFO``, and the offset of ``tcpi_rxbytes`` in its structure.
        _TCP_INFO, _BYTES_RECEIVED = 0x106, struct.Struct("=88xQ")
    else:
        #: Offset of ``tcpi_bytes_received`` in Linux's ``tcp_info``, since Linux 4.1.
        _TCP_INFO, _BYTES_RECEIVED = socket.TCP_INFO, struct.Struct("=128xQ")

    def bytes_received(descriptor: int) -> int | None:
        """Bytes received on a TCP connection so far; ``None`` if unknown."""
        try:
            # With an explicit family and type Python needs two fewer system calls.
            borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        except OSError:
            return None
        try:
            info = borrowed.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_RECEIVED.size)
            (count,) = _BYTES_RECEIVED.unpack(info)
        except (OSError, struct.error):
            return None
        finally:
            borrowed.detach()
        return int(count)

    def bytes_unread(descriptor: int) -> int:
        """Received bytes that the system still holds."""
        try:
            answer = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
        except OSError:
            return 0
        return int.from_bytes(answer, sys.byteorder)

    def _end(connection: socket.socket) -> None:
        """Shut the connection down; libzmq then finds it closed."""
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def duplicate_socket(descriptor: int) -> Iterator[socket.socket]:
    """Borrow a socket object for the same connection within a ``with`` block.

    Raises:
        OSError: the descriptor is not, or no longer, a socket.
    """
    if sys.platform == "win32":
        # On Windows a duplicate would make both sockets blocking, so the descriptor itself is
        # borrowed.
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        try:
            yield borrowed
        finally:
            borrowed.detach()
        return
    # ``socket.dup()`` would make both sockets blocking.
    number = socket.dup(descriptor)
    try:
        own = socket.socket(fileno=number)
    except OSError:
        socket.close(number)
        raise
    with own:
        yield own


def remote_address(descriptor: int) -> tuple[str, int] | None:
    """Return address and port of a connection's other end; ``None`` if it isn't connected."""
    try:
        with duplicate_socket(descriptor) as connection:
            host, port = connection.getpeername()[:2]
    except (OSError, TypeError, ValueError):
        return None
    return str(host), int(port)


def cut_connection(descriptor: int, other_end: tuple[str, int]) -> bool:
    """Reset the connection to ``other_end``; ``False`` if the descriptor belongs to another one.

    libzmq then closes it. On Windows this happens only after libzmq has received more data: repeat
    the call there until it returns ``False``.
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


#: Congestion controls for small messages, best first. Linux may refuse the first one without
#: privileges.
_STEADY = (b"cubic", b"reno")
#: A socket option of Linux, and an unlimited rate in bytes/s: any rate enables pacing.
_SO_MAX_PACING_RATE = 47
_NO_RATE = 2**31 - 1
#: Folder of this network namespace's settings on Linux.
_LINUX = Path("/proc/sys/net/ipv4")


def avoid_bbr(descriptor: int) -> None:
    """Replace BBR as the congestion control of the TCP connection ``descriptor``.

    Every 10 s BBR nearly stops for 200 ms to probe the round trip of an empty link, and it spreads
    bursts over several milliseconds. Both delay urgent messages. Other systems than Linux offer no
    choice and rarely use BBR.
    """
    if sys.platform != "linux":
        return
    # The connection may already be closed.
    with contextlib.suppress(OSError), duplicate_socket(descriptor) as connection:
        used = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        if not used.startswith(b"bbr"):
            return
        for name in _STEADY:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
                return


def enable_pacing(descriptor: int) -> None:
    """Enable Linux's pacing for the TCP connection ``descriptor``.

    In slow start two segments follow each acknowledged one, so half a window queues before the
    bottleneck, whose buffer may be too small. With pacing they leave evenly. Other systems offer no
    choice.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError), duplicate_socket(descriptor) as connection:
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _NO_RATE)


def has_idle_reset() -> bool:
    """Return whether idle connections restart as slowly as new ones.

    By default, Linux reduces an idle congestion window, except under BBR. Windows doesn't.
    """
    if sys.platform != "linux":
        return False
    try:
        used = (_LINUX / "tcp_congestion_control").read_text(encoding="ascii")
        forgets = (_LINUX / "tcp_slow_start_after_idle").read_text(encoding="ascii")
    except OSError:
        return False
    return forgets.strip() != "0" and not used.startswith("bbr")
