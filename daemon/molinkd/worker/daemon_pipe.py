"""The worker's end of the pipe to its daemon."""

import asyncio
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO, NoReturn

import msgspec

from molink.errors import WireError
from molink.wire.messages.base import Message
from molink.wire.messages.worker_pipe import LoadStage, ToWorker, WarmUp, read_pipe, write_pipe


class DaemonPipe:
    """Reads commands from stdin in its own thread and writes reports to stdout.

    The end of the pipe ends the process at once, even during a CUDA kernel or a load of weights: no
    worker outlives its daemon.
    """

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader = reader
        self._writer = writer
        self._lock = threading.Lock()
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

    @classmethod
    def from_stdio(cls) -> "DaemonPipe":
        """Take over stdin and stdout; other output goes to stderr from now on."""
        reader, writer = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return cls(reader, writer)

    def read_first(self) -> WarmUp | LoadStage | None:
        """Block for the first message; ``None`` at the end of the pipe.

        Raises:
            WireError: unexpected message.
        """
        message = read_pipe(self._reader, self._decoder)
        if message is not None and not isinstance(message, WarmUp | LoadStage):
            raise WireError(f"a {type(message).__name__} came on the pipe before a LoadStage")
        return message

    def send(self, message: Message) -> None:
        """Report to the daemon; thread-safe."""
        with self._lock:
            write_pipe(self._writer, message)

    def start_listening(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[ToWorker], None]
    ) -> None:
        """Call ``handle`` on ``loop`` for every message; exit at the end of the pipe."""

        def read() -> None:
            code = 0
            try:
                while (message := read_pipe(self._reader, self._decoder)) is not None:
                    loop.call_soon_threadsafe(handle, message)
            except (WireError, RuntimeError) as error:  # RuntimeError: the loop has closed
                print(f"molink worker: pipe: {error}", file=sys.stderr, flush=True)
                code = 1
            exit_process(code)

        threading.Thread(target=read, name="daemon-pipe", daemon=True).start()


def exit_process(code: int) -> NoReturn:
    """End the process at once, regardless of its threads.

    The pipe's thread may be in the middle of a read, which an ordinary exit waits for or aborts on;
    on Windows ``os._exit`` still runs the exit code of every DLL, CUDA's included.
    """
    if sys.platform == "win32":
        ctypes.windll.kernel32.TerminateProcess(ctypes.c_void_p(-1), code)
    os._exit(code)
