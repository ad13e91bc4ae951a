"""Stop one thread of a process by ``ptrace`` while its others run (Linux).

``SIGSTOP`` stops whole processes. A process with one stuck thread still answers on the network.
"""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WAIT_ALL = 0x40000000


class CannotHang(Exception):
    """The thread cannot be stopped."""


@contextlib.contextmanager
def hang_thread(thread: int) -> Iterator[None]:
    """Stop the thread with that system-wide id (the pid for the main one) meanwhile.

    Raises:
        CannotHang: there is no such thread, no permission, or this isn't Linux.
    """
    if not sys.platform.startswith("linux"):
        raise CannotHang("one thread alone can be stopped on Linux only")
    # Only the tracing thread may detach.
    over, begun = threading.Event(), threading.Event()
    errors: list[OSError] = []

    def hold() -> None:
        try:
            _call_ptrace(_SEIZE, thread)
            try:
                _call_ptrace(_INTERRUPT, thread)
                os.waitpid(thread, _WAIT_ALL)
                begun.set()
                over.wait()
            finally:
                with contextlib.suppress(OSError):  # it was killed meanwhile
                    _call_ptrace(_DETACH, thread)
        except OSError as error:
            errors.append(error)
        finally:
            begun.set()

    holder = threading.Thread(target=hold, name="chaos-hang", daemon=True)
    holder.start()
    begun.wait()
    try:
        if errors:
            raise CannotHang(f"thread {thread} can't be stopped: {errors[0]}")
        yield
    finally:
        over.set()
        holder.join()


def _call_ptrace(request: int, thread: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    call.restype = ctypes.c_long
    if call(request, thread, None, None) == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
