"""Phases of recoveries, read from ``/metrics`` of the PCs."""

import asyncio
import re
from collections.abc import Mapping

import aiohttp

from tools.chaos.checks import fetch_gauges
from tools.chaos.pc import Pc
from tools.chaos.swarm import Swarm

#: Metrics of a daemon by name.
Figures = Mapping[str, float]
#: Metrics of all PCs by name and number of deaths.
Shown = Mapping[tuple[str, int], Figures]

_COUNT = "molink_recoveries_total"
_NOTICED = "molink_recovery_noticed_timestamp_seconds"
_PHASE = re.compile(r"molink_recovery_(?!last_)(\w+)_seconds_total")


async def read_phases(swarm: Swarm) -> Shown:
    """Read the metrics of all PCs that answer."""

    async def ask(pc: Pc) -> Figures:
        try:
            return await fetch_gauges(pc.url) if pc.running else {}
        except (aiohttp.ClientError, TimeoutError):
            return {}

    keys = [(pc.name, pc.deaths) for pc in swarm.pcs]
    return dict(zip(keys, await asyncio.gather(*map(ask, swarm.pcs)), strict=True))


def compute_phases(before: Shown, after: Shown, begun: float) -> dict[str, list[float]]:
    """Seconds of each phase at each PC that recovered once since a fault.

    ``begun`` is the fault's start in Unix time; ``noticed`` is the time until a PC noticed it.
    """
    found: dict[str, list[float]] = {}
    for key, figures in after.items():
        earlier = before.get(key, {})
        if _COUNT not in earlier or figures.get(_COUNT, 0.0) - earlier[_COUNT] != 1:
            continue
        if _NOTICED in figures:
            found.setdefault("noticed", []).append(figures[_NOTICED] - begun)
        for name, seconds in figures.items():
            if phase := _PHASE.fullmatch(name):
                found.setdefault(phase[1], []).append(seconds - earlier.get(name, 0.0))
    return found
