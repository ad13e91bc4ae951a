"""Runs a daemon as a process: event loop, signals, logs and exit."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from molink.errors import MolinkError, UsageError
from molink.plaintext import LogFormatter
from molink.wire.sockets.event_loop import EventLoop
from molinkd.peer.daemon import Daemon
from molinkd.peer.home import Home
from molinkd.peer.launch import Announce, AnyDaemonEvent, DaemonEndedEvent, Launch
from molinkd.platform import on_terminate, raise_descriptor_limit, watch_input

#: Option of a daemon that outlives the process that started it.
DETACHED = "--detached"
#: Maximum size of the launch options on standard input, in bytes.
_MAX_LAUNCH_BYTES = 1 << 20


def run_daemon(
    launch: Launch,
    announce: Announce,
    watch: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """Run until Ctrl-C, termination or a stop request; everything has ended on return.

    ``watch`` gets a thread-safe function that stops the daemon.

    Raises:
        MolinkError: The daemon can't start.
        KeyboardInterrupt: It was stopped by Ctrl-C, after a clean shutdown.
    """

    raise_descriptor_limit()

    async def run() -> None:
        daemon = Daemon(launch, announce)
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.call_soon_threadsafe(daemon.stop)

        if watch is not None:
            watch(stop)
        undo = on_terminate(stop)
        try:
            await daemon.run()
        finally:
            undo()

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(run())


@contextlib.contextmanager
def log_to_file(home: Home, level: str) -> Iterator[None]:
    """Log to the home's bounded ``daemon.log`` within the context."""
    import logging.handlers  # only a detached daemon needs it

    folder = home.create_folders().logs
    handler = logging.handlers.RotatingFileHandler(
        folder / "daemon.log", maxBytes=1 << 20, backupCount=1, encoding="utf-8"
    )
    handler.setFormatter(LogFormatter())
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()


def main() -> None:
    """Run a daemon as a child process: launch options on standard input, events on standard output.

    It stops at the end of its standard input, so it can't outlive its parent. With ``--detached``
    it keeps running and logs to its home.
    """
    detached = sys.argv[1:] == [DETACHED]
    try:
        launch = _read_launch()
        level = launch.settings.log_level
        if detached:
            with log_to_file(Home(Path(launch.home)), level):
                run_daemon(launch, _print_event)
        else:
            handler = logging.StreamHandler()
            handler.setFormatter(LogFormatter())
            logging.basicConfig(level=level.upper(), handlers=[handler])
            run_daemon(launch, _print_event, watch_input)
    except MolinkError as error:
        with contextlib.suppress(OSError):
            _print_event(DaemonEndedEvent(code=error.exit_code, text=str(error)))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _read_launch() -> Launch:
    order = sys.stdin.buffer.readline(_MAX_LAUNCH_BYTES)
    try:
        return msgspec.json.decode(order, type=Launch)
    except msgspec.MsgspecError as error:
        raise UsageError(f"standard input has no valid launch options: {error}") from None


def _print_event(event: AnyDaemonEvent) -> None:
    """Print one line of JSON.

    Raises:
        OSError: The reader is gone; later events are discarded silently.
    """
    try:
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()
    except OSError:
        # Buffered output would make the interpreter's exit fail.
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise
