"""Work that is to give way to everything else on the PC."""

import ctypes
import os
import sys
import threading

#: Between 0, which is usual, and 19.
_NICE = 2
#: ``THREAD_PRIORITY_LOWEST``.
_WINDOWS_LOWEST = -2


def lower_priority() -> None:
    """Have the calling thread (on Linux those that it starts too) run when others leave time.

    Not every user may undo it, so it is for a thread that ends, and not for the main one. Where a
    system has priorities of whole processes only, nothing is changed.
    """
    if sys.platform == "win32":
        kernel = ctypes.windll.kernel32
        kernel.GetCurrentThread.restype = ctypes.c_void_p
        kernel.SetThreadPriority(ctypes.c_void_p(kernel.GetCurrentThread()), _WINDOWS_LOWEST)
    elif sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
