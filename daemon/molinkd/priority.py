"""Low-priority background threads."""

import ctypes
import os
import sys
import threading

#: From 0 (default) to 19.
_NICE = 2
#: ``THREAD_PRIORITY_LOWEST``.
_WINDOWS_LOWEST = -2


def lower_priority() -> None:
    """Lower the priority of the calling thread and, on Linux, of threads that it starts.

    It may be irreversible, so use it only in threads that end. Does nothing where only whole
    processes have priorities.
    """
    if sys.platform == "win32":
        kernel = ctypes.windll.kernel32
        kernel.GetCurrentThread.restype = ctypes.c_void_p
        kernel.SetThreadPriority(ctypes.c_void_p(kernel.GetCurrentThread()), _WINDOWS_LOWEST)
    elif sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
