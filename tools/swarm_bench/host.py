"""``python -m tools.swarm_bench.host EMULATION``: several daemons in one process.

It starts the daemons of each :class:`Order` on standard input, prints their events as
:class:`HostEvent`, and stops all at the end of input. Stages are emulated.
"""

import asyncio
import contextlib
import sys
import threading
import time
from functools import partial

import msgspec

from molink.errors import MolinkError
from molink.wire.sockets.event_loop import EventLoop
from molinkd.peer.agent import stage_manager as assignments
from molinkd.peer.agent.worker_supervisor import WorkerSupervisor
from molinkd.peer.daemon import Daemon
from molinkd.peer.launch import AnyDaemonEvent, Launch
from molinkd.platform import raise_descriptor_limit

_PRINTING = threading.Lock()


class Order(msgspec.Struct, frozen=True):
    """Daemons to start."""

    launches: tuple[Launch, ...]


class HostEvent(msgspec.Struct, frozen=True):
    """An event of the daemon with that home, at a monotonic time."""

    home: str
    at: float
    event: AnyDaemonEvent


def _print_event(home: str, event: AnyDaemonEvent) -> None:
    line = msgspec.json.encode(HostEvent(home, time.monotonic(), event))
    with _PRINTING:
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


async def _run_one(daemon: Daemon, home: str) -> None:
    try:
        await daemon.run()
    except MolinkError as error:
        print(f"{home}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


async def _run() -> None:
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lines.put_nowait, b"")

    threading.Thread(target=read, daemon=True).start()
    daemons: list[Daemon] = []
    async with asyncio.TaskGroup() as group:
        while line := await lines.get():
            for launch in msgspec.json.decode(line, type=Order).launches:
                daemon = Daemon(launch, partial(_print_event, launch.home))
                daemons.append(daemon)
                group.create_task(_run_one(daemon, launch.home))
        for daemon in daemons:
            daemon.stop()


def main() -> None:
    """Entry point."""
    raise_descriptor_limit()
    worker = (sys.executable, "-m", "tools.emulation.worker", sys.argv[1])
    supervisor = partial(WorkerSupervisor, command=worker)
    assignments.WorkerSupervisor = supervisor  # type: ignore[assignment, attr-defined]
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(_run())


if __name__ == "__main__":
    main()
