"""The event loop for ZeroMQ sockets: a selector loop on all platforms."""

import asyncio
import ctypes
import functools
import signal
import socket
import sys
import threading
import time

if sys.platform == "win32":
    #: Milliseconds between updates of the system clock, which bound the precision of ``select``.
    _RESOLUTION_MS = 1
    #: ``ProcessPowerThrottling``, and its ``IGNORE_TIMER_RESOLUTION``.
    _POWER_THROTTLING, _IGNORE_TIMER_RESOLUTION = 4, 4

    @functools.cache
    def set_timer_resolution() -> None:
        """Set Windows' timer resolution to 1 ms instead of 15.6 ms.

        Acknowledgements and chunks are timed to 5 ms. Windows 11 resets the resolution of processes
        without visible windows unless they opt out.
        """
        ctypes.windll.winmm.timeBeginPeriod(_RESOLUTION_MS)
        kernel = ctypes.windll.kernel32
        kernel.GetCurrentProcess.restype = ctypes.c_void_p
        never = (ctypes.c_ulong * 3)(1, _IGNORE_TIMER_RESOLUTION, 0)
        kernel.SetProcessInformation(
            ctypes.c_void_p(kernel.GetCurrentProcess()),
            _POWER_THROTTLING,
            ctypes.byref(never),
            ctypes.sizeof(never),
        )

    class EventLoop(asyncio.SelectorEventLoop):
        """A selector loop with Ctrl-C support and a clock finer than 15.6 ms.

        A signal doesn't interrupt Winsock's ``select``, and only asyncio's Proactor loop writes
        signals to its self-pipe. Before Python 3.13 ``time.monotonic`` has a coarse resolution,
        which distorts acknowledgement timers and round trips.
        """

        #: Set by asyncio: the writing end of the self-pipe.
        _csock: socket.socket

        def __init__(self) -> None:
            super().__init__()
            set_timer_resolution()
            self._clock_resolution = time.get_clock_info("perf_counter").resolution
            self._wakes = threading.current_thread() is threading.main_thread()
            if self._wakes:
                signal.set_wakeup_fd(self._csock.fileno(), warn_on_full_buffer=False)

        def time(self) -> float:
            """Seconds of the performance counter."""
            return time.perf_counter()

        def close(self) -> None:
            """Close the loop."""
            if self._wakes and not self.is_closed():
                signal.set_wakeup_fd(-1)
            super().close()

else:
    EventLoop = asyncio.SelectorEventLoop
