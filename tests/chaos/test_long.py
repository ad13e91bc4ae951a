"""Long runs: five minutes of all faults, and half an hour of PCs that join and leave."""

import argparse
from pathlib import Path

import pytest

from tools.chaos.__main__ import run
from tools.chaos.churn import run_churn
from tools.chaos.faults import KINDS
from tools.chaos.report import render_report
from tools.soak import TARGET, compare_usage, worst_ratio

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("network", [False, True], ids=["processes", "network"])
async def test_five_minutes_of_faults(tmp_path: Path, network: bool) -> None:
    """Faults of the network come with a forwarder between PCs, which hides refused connections."""
    options = argparse.Namespace(
        kinds=[name for name, kind in KINDS.items() if kind.network == network],
        seconds=300.0 if not network else 100.0,
        faults=1000,
        shortest=1.0,
        longest=30.0,
        seed=1,
        pcs=4,
        streams=16,
        tokens=200,
    )
    verdict = await run(tmp_path, options)
    print(render_report(verdict))
    assert verdict.good, render_report(verdict)


@pytest.mark.timeout(3600)
async def test_half_an_hour_of_comings_and_goings(tmp_path: Path) -> None:
    found = await run_churn(tmp_path, 1800.0, streams=16)
    rows = compare_usage(found.settled, found.last)
    assert found.troubles == []
    assert found.joins >= 25
    assert worst_ratio(rows) <= TARGET, rows
