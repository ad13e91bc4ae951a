"""``python -m molinkd.worker``: a stage process, started by a daemon and talked to on its pipe.

A daemon may start it before there is a stage for it: as a spare, it imports and compiles what
every stage needs while others have nothing to do. So torch is imported here only after the first
message.
"""

import logging
import signal
import sys
import threading

from molink.errors import MolinkError, WireError
from molink.plaintext import LOG_FORMAT
from molink.wire.messages.worker_pipe import LoadStage, WarmedUp, WarmUp
from molinkd.descriptors import raise_descriptor_limit
from molinkd.imports import permanent_imports
from molinkd.priority import lower_priority
from molinkd.worker.daemon_pipe import DaemonPipe, exit_process

log = logging.getLogger("molinkd.worker")


def main() -> int:
    """Run one worker; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    # Ctrl-C reaches every process of a console; when a worker ends is for its daemon to say.
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
    """What the stage is to be; ``None`` if the daemon ended before it said so."""
    first = pipe.read_first()
    if not isinstance(first, WarmUp):
        return first
    thread = threading.Thread(target=_warm_up, args=(first, pipe), name="warm-up", daemon=True)
    thread.start()
    if sys.platform == "win32":
        # While a thread waits for a pipe, whoever asks what kind of file that is waits too, and
        # numpy's libraries ask it of the standard input.
        thread.join()
    start = pipe.read_first()
    if isinstance(start, WarmUp):
        raise WireError("a spare was told twice what to be ready for")
    if start is not None:
        thread.join()
    return start


def _warm_up(warm: WarmUp, pipe: DaemonPipe) -> None:
    if warm.model_dir:
        lower_priority()
    with permanent_imports():
        from molinkd.worker.startup import warm_up_worker

    try:
        warm_up_worker(warm)
    except Exception:
        log.warning("what is compiled for a stage is not ready before there is one", exc_info=True)
    pipe.send(WarmedUp())


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    exit_process(code)
