"""Changing models while the swarm runs: ``molink stop``, ``molink run``."""

from contextlib import ExitStack
from pathlib import Path

import openai
import psutil
import pytest

from tests.support.models import MakeModel
from tests.support.processes import Tools


def workers(status: dict[str, object]) -> list[int]:
    peers = status["peers"]
    assert isinstance(peers, list)
    return [worker["pid"] for peer in peers for worker in peer["workers"]]


def test_stop_and_run(tmp_path: Path, tools: type[Tools], make_model: MakeModel) -> None:
    folder = make_model(tmp_path / "brought", "qwen2", 1)
    options = tools.local_options("--dtype", "f32", "--coordinator-port", "0")
    clients = ExitStack()
    process = tools.Process(tmp_path / "home", ["up", *options])
    try:
        (pid,) = workers(process.wait_ready())
        # Closed at the end: a connection may outlive its answer.
        client = tools.client(process.found().endpoints[0])
        clients.callback(client.close)
        stopped = tools.run_molink(tmp_path / "home", "stop")
        assert "Unloaded molink-demo" in stopped.stdout
        tools.wait_for(lambda: not psutil.pid_exists(pid), process)
        tools.wait_for(lambda: not client.models.list().data, process)
        with pytest.raises(openai.APIStatusError, match="molink run MODEL") as refused:
            client.completions.create(model="molink-demo", prompt="x")
        assert refused.value.status_code == 503
        assert tools.run_molink(tmp_path / "home", "stop").returncode == 5

        ran = tools.run_molink(tmp_path / "home", "run", str(folder), "Hello?")
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip()
        status = process.status()
        assert (status["model"], len(workers(status))) == ("brought", 1)
        listed = tools.run_molink(tmp_path / "home", "list").stdout
        assert any("brought" in line and "served" in line for line in listed.splitlines())
        wrong = tools.run_molink(tmp_path / "home", "run", str(tmp_path / "nothing"), "Hello?")
        assert wrong.returncode == 5
        assert "no model" in wrong.stderr
        assert process.status()["model"] == "brought"
    finally:
        clients.close()
        process.stop()
    # It is served again after a restart.
    process = tools.Process(tmp_path / "home", ["up", *options])
    try:
        assert process.wait_ready()["model"] == "brought"
    finally:
        process.stop()
