"""A PC that a former version left starts with its swarm, model and options."""

from pathlib import Path

import pytest

from tests.support.former_state import SWARM, restore_home
from tests.support.processes import Process, local_options


@pytest.mark.slow
def test_its_swarm_goes_on(tmp_path: Path) -> None:
    home = restore_home(tmp_path / "home")
    process = Process(home.root, ["up", *local_options("--coordinator-port", "0")])
    try:
        status = process.wait_ready()
    finally:
        process.stop()
    assert status["swarm"] == SWARM
    assert [model["name"] for model in status["models"]] == ["molink-demo"]
