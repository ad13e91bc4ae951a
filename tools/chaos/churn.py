"""A swarm under steady load that one PC joins and leaves repeatedly."""

import asyncio
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from molinkd.cli import daemon_client as local_daemon
from tools.chaos import checks
from tools.chaos.pc import Pc
from tools.chaos.streams import Load
from tools.chaos.swarm import START_S, Swarm
from tools.chaos.usage import Usage, measure_usage_by_role

#: Seconds between joins.
PERIOD_S = 60.0
#: Share of the run after which memory counts as settled.
SETTLED = 0.2
#: Tokens of an answer.
_TOKENS = 100
#: Pieces that every stream must receive after each join and leave.
_AGAIN = 5


@dataclass(slots=True)
class Churn:
    """Results of a run."""

    settled: dict[str, Usage] = field(default_factory=dict)
    last: dict[str, Usage] = field(default_factory=dict)
    joins: int = 0
    requests: int = 0
    troubles: list[str] = field(default_factory=list)


async def run_churn(root: Path, seconds: float, *, streams: int, period: float = PERIOD_S) -> Churn:
    """Run three PCs for ``seconds``; a fourth joins and leaves every ``period``.

    Usage of the three is measured while the fourth is gone and all streams advance.
    """
    found = Churn()
    async with (
        Swarm(root, 4, absent=1) as swarm,
        Load(swarm, streams, _TOKENS, pcs=swarm.pcs[:3]) as load,
    ):
        *stayers, guest = swarm.pcs
        begun = time.monotonic()
        while (now := time.monotonic()) < begun + seconds:
            await _run_round(swarm, load, guest, found)
            await checks.wait_for_standby_workers(stayers, period)
            look = measure_usage_by_role(stayers)
            if not found.settled and time.monotonic() >= begun + SETTLED * seconds:
                found.settled = look
            found.last = look
            print(f"{found.joins} joins, {len(load.answers)} answers", file=sys.stderr)
            await asyncio.sleep(max(0.0, now + period - time.monotonic()))
        await load.finish()
        found.troubles += await checks.find_busy_gauges(swarm)
        for pc in swarm.pcs:
            found.troubles += checks.find_aborts(pc)
    found.requests = len(load.answers)
    bad = [answer for answer in load.answers if answer.end != "same"]
    found.troubles += [f"a stream of {a.pc} was {a.end}: {a.trouble}" for a in bad]
    found.troubles += swarm.left_behind
    return found


async def _run_round(swarm: Swarm, load: Load, guest: Pc, found: Churn) -> None:
    """Let the guest join, hold layers, and leave the swarm."""
    await swarm.admit(guest)
    try:
        await swarm.serves(guest, START_S)
        found.joins += 1
        await _await_streams(load, found, "joined")
        at = local_daemon.require_daemon(guest.home)
        await asyncio.to_thread(local_daemon.request_shutdown, at, leave=True)
        await asyncio.to_thread(guest.ended)
    except Exception:
        guest.kill()
        raise
    await _await_streams(load, found, "left")


async def _await_streams(load: Load, found: Churn, what: str) -> None:
    if not await load.advance(_AGAIN, START_S):
        found.troubles.append(f"streams stalled for {START_S:.0f} s after a PC {what}")
