"""The coordinator process: state folder, log, standard input, shutdown."""

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Sequence

import zmq.asyncio

from molink.errors import MolinkError
from molink.plaintext import LogFormatter, printable
from molink.wire.sockets.event_loop import EventLoop
from molink.wire.sockets.secrets import load_keys, private_folder
from molinkd.coordinator.coordinator import Coordinator
from molinkd.coordinator.options import CoordinatorOptions, parse_options
from molinkd.coordinator.restore import open_state
from molinkd.platform import raise_descriptor_limit, watch_input

KEY_FILE = "coordinator.key"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a coordinator until standard input ends; returns the exit code.

    It prints one JSON line with its addresses to standard output, and its log to standard error. A
    line on standard input is a term to raise to.
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
        print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


async def serve(options: CoordinatorOptions) -> None:
    """Run a coordinator in this event loop until standard input ends, unless ``standalone``.

    Raises:
        MolinkError: it failed to start or to continue.
    """
    keys = load_keys(private_folder(options.state) / KEY_FILE)
    state, restored = open_state(options, keys)
    context = zmq.asyncio.Context()
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        stack.callback(state.close)
        coordinator = Coordinator(context, state, keys, options)
        try:
            port = await coordinator.start()
            announcement = {
                "port": port,
                "public_key": keys.public,
                "swarm": coordinator.swarm.id,
                "term": coordinator.term,
                "addresses": coordinator.addresses,
                "restored": restored,
                "name": coordinator.swarm.name,
                "pairing_port": coordinator.pairing_port,
            }
            print(json.dumps(announcement), flush=True)
            await _wait_until_stopped(coordinator, options.standalone)
        finally:
            await coordinator.close()


async def _wait_until_stopped(coordinator: Coordinator, standalone: bool) -> None:
    ended = asyncio.Event()
    if not standalone:
        loop = asyncio.get_running_loop()

        def raise_term(line: bytes) -> None:
            loop.call_soon_threadsafe(coordinator.raise_term, int(line))

        watch_input(lambda: loop.call_soon_threadsafe(ended.set), raise_term)
    waits = [
        asyncio.ensure_future(coordinator.wait_for_failure()),
        asyncio.ensure_future(ended.wait()),
    ]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
