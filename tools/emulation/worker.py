"""``python -m tools.emulation.worker SETTINGS``: a stage process whose compute is emulated.

A driver starts it and uses its pipe as a daemon uses that of ``python -m molinkd.worker``.
"""

import asyncio
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from molink.errors import MolinkError
from molink.wire.messages.worker_pipe import LoadStage, WarmedUp, WarmUp
from molink.wire.sockets.event_loop import EventLoop
from molinkd.platform import raise_descriptor_limit
from molinkd.worker.daemon_pipe import DaemonPipe, exit_process
from molinkd.worker.engine import HandOver, StageEngine
from molinkd.worker.request_table import RequestTable
from molinkd.worker.worker import Worker
from tools.emulation.activations import Activations
from tools.emulation.executor import EmulatedExecutor
from tools.emulation.model import EmulatedStage, Emulation, read_emulation

log = logging.getLogger("tools.emulation")

#: Seconds between punctuality notes in the log.
_NOTE_S = 2.0
#: Prefix of such a note.
NOTE = "punctuality "


def load_emulated(emulation: Emulation, start: LoadStage) -> StageEngine:
    """Make the engine that replaces a loaded model."""
    if emulation.serves:  # import torch before the first request
        import molink.stage.sampling.token_history  # noqa: F401

    activations = Activations.read(Path(emulation.activations), emulation.row_bytes)
    stage = EmulatedStage(emulation, start.stage)

    def executor(_: RequestTable, hand_over: HandOver) -> EmulatedExecutor:
        made = EmulatedExecutor(stage, activations, hand_over)
        threading.Thread(target=_print_notes, args=(made,), daemon=True).start()
        return made

    return StageEngine(stage, emulation.profiles[start.stage], executor)


def _print_notes(executor: EmulatedExecutor) -> None:
    while True:
        time.sleep(_NOTE_S)
        print(NOTE + json.dumps(asdict(executor.punctuality)), file=sys.stderr, flush=True)


def run(engine: Callable[[LoadStage], StageEngine]) -> int:
    """Run a worker with stages made by ``engine``; return the exit code."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_descriptor_limit()
    pipe = DaemonPipe.from_stdio()
    try:
        start = pipe.read_first()
        if isinstance(start, WarmUp):  # a standby worker has nothing to compile
            pipe.send(WarmedUp())
            start = pipe.read_first()
        if isinstance(start, LoadStage):
            with asyncio.Runner(loop_factory=EventLoop) as runner:
                runner.run(Worker(start, pipe, engine).run())
    except MolinkError as error:
        log.error("%s: %s", type(error).__name__, error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = run(partial(load_emulated, read_emulation(Path(sys.argv[1]).read_bytes())))
    logging.shutdown()
    exit_process(code)
