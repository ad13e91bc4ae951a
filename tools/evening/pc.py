"""``python -m tools.evening.pc PC``: the daemon of a PC of the evening, on its node of the rig.

The daemon, its coordinator and its sockets are the product's. Its stages are those of
:mod:`tools.evening.worker`, and its device is what ``PC`` (a file with a :class:`SimPc`) says.
Events are printed as lines of JSON.
"""

import asyncio
import sys
import threading
from functools import partial
from pathlib import Path

import msgspec

from molink.errors import MolinkError
from molink.facts.device import Device
from molink.wire.sockets.event_loop import EventLoop
from molinkd.descriptors import raise_descriptor_limit
from molinkd.peer import daemon as daemons
from molinkd.peer.agent import stage_manager as assignments
from molinkd.peer.agent.device_probe import MeasuredDevice
from molinkd.peer.agent.worker_supervisor import WorkerSupervisor
from molinkd.peer.election import coordinator_process as coordinator_child
from molinkd.peer.election.coordinator_process import CoordinatorProcess
from molinkd.peer.launch import AnyDaemonEvent, Launch

_PRINTING = threading.Lock()


class Pc(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: ``computer`` is the file of what its stages compute with.

    What a placement waits for takes ``waits`` times as long as it does for users.
    """

    launch: Launch
    device: Device
    computer: str
    waits: float = 1.0


def _say(event: AnyDaemonEvent) -> None:
    with _PRINTING:
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()


def main() -> int:
    """Run it until it is killed; the exit code."""
    pc = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Pc)

    async def measure(*_: object) -> MeasuredDevice:
        return MeasuredDevice(pc.device, bf16=True)

    raise_descriptor_limit()
    worker = (sys.executable, "-m", "tools.evening.worker", pc.computer)
    assignments.WorkerSupervisor = partial(WorkerSupervisor, command=worker)  # type: ignore[assignment, misc]
    daemons.measure_device = measure  # type: ignore[assignment]
    if pc.waits != 1.0:
        command = (sys.executable, "-m", "tools.evening.hurry", str(pc.waits))
        made = partial(CoordinatorProcess, command=command)
        coordinator_child.CoordinatorProcess = made  # type: ignore[assignment, misc]
    try:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(daemons.Daemon(pc.launch, _say).run())
    except MolinkError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
