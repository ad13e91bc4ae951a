"""The coordinator as a process: its folder, its log, its standard input and its end."""

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence

import zmq.asyncio

from molink.errors import MolinkError
from molink.swarm.coordinator import Coordinator
from molink.swarm.options import Options, parse_options
from molink.swarm.plain import LogFormatter, printable
from molink.swarm.state import State
from molink.wire.limits import raise_descriptor_limit
from molink.wire.loop import EventLoop
from molink.wire.secrets import load_keys

KEY_FILE = "coordinator.key"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a coordinator until its standard input ends; returns the exit code.

    One JSON line on standard output says where it listens; the log goes to standard error.
    """
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    raise_descriptor_limit()
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(serve(options))
    except MolinkError as error:
        print(f"molink: {printable(str(error))}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


async def serve(options: Options) -> None:
    """Run a coordinator in this event loop until standard input ends (see ``standalone``).

    Raises:
        MolinkError: it can't start, or can't go on.
    """
    state = State.open(options.state)
    context = zmq.asyncio.Context()
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        stack.callback(state.close)
        keys = load_keys(options.state / KEY_FILE)
        coordinator = Coordinator(context, state, keys, options)
        try:
            port = await coordinator.start()
            announcement = {"port": port, "public_key": keys.public, "swarm": coordinator.swarm.id}
            print(json.dumps(announcement), flush=True)
            await _until_the_end(coordinator, options.standalone)
        finally:
            await coordinator.close()


async def _until_the_end(coordinator: Coordinator, standalone: bool) -> None:
    ended = asyncio.Event()
    if not standalone:
        _watch_input(asyncio.get_running_loop(), ended.set)
    waits = [asyncio.ensure_future(coordinator.wait()), asyncio.ensure_future(ended.wait())]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def _watch_input(loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
    """Call ``ended`` on the loop when whoever started this process has gone."""

    def read() -> None:
        # Not sys.stdin: a thread that holds its lock makes the interpreter's exit fail.
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has closed already
            loop.call_soon_threadsafe(ended)

    threading.Thread(target=read, name="molink-stdin", daemon=True).start()
