"""``python -m molinkd.worker``: a stage process that a daemon starts and drives through a pipe.

A daemon may start it as a standby worker, before its stage is known: it then imports and compiles
what every stage needs. Torch is therefore imported only after the first message.
"""

import logging
import signal
import sys
import threading

from molink.errors import MolinkError, WireError
from molink.plaintext import LOG_FORMAT
from molink.wire.messages.worker_pipe import LoadStage, WarmedUp, WarmUp
from molinkd.imports import permanent_imports
from molinkd.platform import raise_descriptor_limit
from molinkd.worker.daemon_pipe import DaemonPipe, exit_process

log = logging.getLogger("molinkd.worker")


def main() -> int:
    """Run one worker; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    # Ctrl-C reaches every process of a console; only the daemon decides when a worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_descriptor_limit()
    pipe = DaemonPipe.from_stdio()
    try:
        start = _await_load_stage(pipe)
        if start is not None:
            with permanent_imports():
                from molinkd.worker.startup import run_worker

            run_worker(start, pipe)
    except MolinkError as error:
        log.error("%s: %s", type(error).__name__, error)
        return error.exit_code
    return 0


def _await_load_stage(pipe: DaemonPipe) -> LoadStage | None:
    """Wait for the stage to load; ``None`` if the daemon ended first."""
    first = pipe.read_first()
    if not isinstance(first, WarmUp):
        return first
    is_needed = threading.Event()
    thread = threading.Thread(
        target=_warm_up, args=(first, pipe, is_needed), name="warm-up", daemon=True
    )
    thread.start()
    if sys.platform == "win32":
        # A thread that reads a pipe blocks any other thread that stats the same file, and numpy's
        # libraries stat standard input.
        thread.join()
    start = pipe.read_first()
    if isinstance(start, WarmUp):
        raise WireError("a standby worker was warmed up twice")
    if start is not None:
        is_needed.set()
        thread.join()
    return start


def _warm_up(warm: WarmUp, pipe: DaemonPipe, is_needed: threading.Event) -> None:
    """Prepare for a stage; once it ``is_needed``, only import."""
    with permanent_imports():
        from molinkd.worker.startup import warm_up_worker

    try:
        if not is_needed.is_set():
            warm_up_worker(warm)
    except Exception:
        log.warning("warm-up failed; kernels are compiled when the stage is loaded", exc_info=True)
    pipe.send(WarmedUp())


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    exit_process(code)
