"""Small scenarios that simulate quickly."""

import pytest

from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.workload import Workload


@pytest.fixture
def workload() -> Workload:
    return Workload(rate=0.8, duration=5.0, seed=3, input_tokens=400, output_tokens=8)


@pytest.fixture
def baseline(workload: Workload) -> Scenario:
    """A ring with all link features off."""
    return Scenario.make_baseline(workload, link=LinkProfile(100, 30))
