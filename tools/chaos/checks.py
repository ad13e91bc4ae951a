"""Invariants of a swarm after its faults."""

import asyncio
import re
import time
from collections.abc import Iterator, Sequence

import aiohttp

from molinkd.child_process import exit_text
from molinkd.peer.agent.worker_supervisor import MAX_STANDBYS
from tools.chaos.pc import Pc
from tools.chaos.swarm import Swarm
from tools.chaos.usage import Usage, measure_usage_by_role

#: Time for daemons to finish requests and for schedulers to free blocks.
QUIET_S = 20.0
#: Time for a better placement to load and for old workers to exit.
SETTLE_S = 90.0
_LOOK_S = 0.2
#: Gauges of a PC's workers and of its ready standby workers.
WORKERS, SPARES = "molink_workers", "molink_standby_workers"
#: Gauges that are 0 without requests.
IDLE = (
    "molink_scheduler_blocks_used",
    "molink_scheduler_blocks_releasing",
    "molink_scheduler_running",
    "molink_scheduler_waiting",
    "molink_daemon_requests_active",
)
#: Log lines of a process that crashed in native code. 9 and 15 are SIGKILL and SIGTERM.
_ABORT = re.compile(
    r"Assertion failed|Fatal Python error|corruption|free\(\): invalid|0xC000[0-9A-F]{4}"
    r"|(?:terminated by signal |exited with -)(?!9\b|15\b)\d+"
)


async def fetch_gauges(url: str) -> dict[str, float]:
    """Fetch ``/metrics``: the largest value of each name over its labels."""
    limit = aiohttp.ClientTimeout(total=10)
    found: dict[str, float] = {}
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.get(f"{url}/metrics") as answer,
    ):
        for line in (await answer.text()).splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = max(found.get(name, float("-inf")), float(value))
    return found


async def find_busy_gauges(swarm: Swarm) -> list[str]:
    """Find idle gauges that stay above 0, or that no PC reports."""
    deadline = time.monotonic() + QUIET_S
    while True:
        shown = {pc.name: await fetch_gauges(pc.url) for pc in swarm.pcs if pc.running}
        known = {name for figures in shown.values() for name in figures}
        left = [f"no PC reports {name}" for name in IDLE if name not in known]
        for pc, figures in shown.items():
            left += [f"{pc}: {name} = {figures[name]:g}" for name in IDLE if figures.get(name)]
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(_LOOK_S)


def find_stray_processes(swarm: Swarm) -> list[str]:
    """Find second coordinators and workers without a daemon."""
    found = []
    for pc in swarm.pcs:
        processes = pc.processes()
        roles = [pc.role(process) for process in processes]
        if not pc.running:
            found += [f"{pc.name}: {p} runs without its daemon" for p in processes]
        if roles.count("coordinator") > 1:
            found.append(f"{pc.name} has {roles.count('coordinator')} coordinators")
    return found


def find_aborts(pc: Pc) -> Iterator[str]:
    """Find processes of a PC that crashed, by exit codes and logs."""
    for code in pc.strange_exits:
        yield f"{pc.name}: its daemon {exit_text(code)}"
    for log in (pc.home / "terminal.log", *sorted((pc.home / "logs").glob("*.log*"))):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if _ABORT.search(line):
                yield f"{pc.name}: {log.name}: {line.strip()}"


async def wait_for_standby_workers(pcs: Sequence[Pc], timeout: float) -> None:
    """Wait until each PC has a worker and all standby workers, so that memory is steady."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        shown = [await fetch_gauges(pc.url) for pc in pcs]
        if all((one.get(WORKERS), one.get(SPARES)) == (1, MAX_STANDBYS) for one in shown):
            return
        await asyncio.sleep(_LOOK_S)


async def wait_until_settled(swarm: Swarm, before: dict[str, Usage], slack: int) -> list[str]:
    """Return :func:`find_growth` once layers have stopped moving."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        growth = find_growth(before, measure_usage_by_role(swarm.pcs), slack)
        if not growth or time.monotonic() > deadline:
            return growth
        await asyncio.sleep(_LOOK_S)


def find_growth(before: dict[str, Usage], after: dict[str, Usage], slack: int) -> list[str]:
    """Find roles with more processes, or with over ``slack`` more descriptors."""
    problems = []
    for key, now in after.items():
        then = before.get(key, Usage(0, 0, 0) if key.endswith("other") else now)
        if now.processes > then.processes:
            problems.append(f"{key}: {then.processes} processes before, {now.processes} after")
        elif now.descriptors > then.descriptors + slack:
            problems.append(
                f"{key}: {then.descriptors} descriptors before, {now.descriptors} after"
            )
    return problems
