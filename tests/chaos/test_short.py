"""A short run: a process dies, then a PC, each until all streams continue."""

from pathlib import Path

import pytest

from molinkd.peer.home import Home
from tests.support.processes import restore_measurements, save_measurements
from tools.chaos.drill import run_drill
from tools.chaos.faults import Fault
from tools.chaos.report import render_report
from tools.chaos.streams import Load
from tools.chaos.swarm import Swarm

pytestmark = pytest.mark.timeout(400)


#: A leader's death is its coordinator's, too. All kinds: ``test_long.py``.
KINDS = ["kill-worker", "kill-leader"]


async def test_streams_outlive_any_process_and_any_pc(tmp_path: Path) -> None:
    faults = [Fault(kind, 0.0) for kind in KINDS]
    # At full speed the stages would leave little CPU time for recovery.
    paced = Swarm(tmp_path, 3, module="tests.support.slow_stages")
    for pc in paced.pcs:
        restore_measurements(Home(pc.home))
    async with paced as swarm, Load(swarm, 8, tokens=60) as load:
        verdict = await run_drill(swarm, load, faults, whole_s=0.0)
    save_measurements(Home(paced.founder.home))
    verdict.troubles += swarm.left_behind
    assert verdict.good, render_report(verdict)
    assert [result.fault.kind for result in verdict.results if result.pauses] == KINDS
