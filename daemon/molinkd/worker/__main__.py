"""``python -m molinkd.worker``: a stage process, started by a daemon and talked to on its pipe."""

import asyncio
import logging
import signal

import torch

from molink.errors import MolinkError
from molink.wire.sockets.loop import EventLoop
from molinkd.descriptors import raise_descriptor_limit
from molinkd.worker.daemon_pipe import DaemonPipe, leave
from molinkd.worker.worker import Worker

log = logging.getLogger("molinkd.worker")


def main() -> int:
    """Run one worker; returns the exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Ctrl-C reaches every process of a console; when a worker ends is for its daemon to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_descriptor_limit()
    pipe = DaemonPipe.on_stdio()
    try:
        start = pipe.read_start()
        if start.threads:
            torch.set_num_threads(start.threads)
        # On Windows a ZeroMQ socket needs a selector loop; the same one everywhere.
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(Worker(start, pipe).run())
    except MolinkError as error:
        log.error("%s: %s", type(error).__name__, error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    leave(code)
