"""The event loop that ZeroMQ sockets run on: a selector loop on every platform."""

import asyncio
import ctypes
import functools
import signal
import socket
import sys
import threading
import time

if sys.platform == "win32":
    #: Milliseconds between two ticks of the system's clock: ``select`` wakes on them.
    _TICK_MS = 1
    #: ``ProcessPowerThrottling``, and its ``IGNORE_TIMER_RESOLUTION``.
    _POWER_THROTTLING, _IGNORE_TIMER_RESOLUTION = 4, 4

    @functools.cache
    def tick_finely() -> None:
        """Have waits of this process end within a millisecond, not 15.6; also without a window.

        Acknowledgements and chunks are timed to 5 ms. Windows 11 takes the fine ticks from a
        process whose windows nobody sees, unless it says that it needs them.
        """
        ctypes.windll.winmm.timeBeginPeriod(_TICK_MS)
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
        """A selector loop that Ctrl-C wakes, with a clock finer than 15.6 ms.

        Winsock's ``select`` is not interrupted by a signal, and only asyncio's Proactor loop has
        one written to its self-pipe; ``time.monotonic`` ticks coarsely before Python 3.13, which
        rounds the timers of acknowledgements and makes round trips look like nothing.
        """

        #: asyncio's own: the writing end of the loop's self-pipe.
        _csock: socket.socket

        def __init__(self) -> None:
            super().__init__()
            tick_finely()
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
