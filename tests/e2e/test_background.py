"""A daemon in the background outlives its command, and restarts with the same settings."""

import contextlib
import json
import time
from pathlib import Path

import psutil

from molinkd.peer.home import Home, read_run_file
from tests.support.processes import START_S, local_options, run_molink


def wait_for_peer(root: Path, **expected: object) -> None:
    """Wait until the swarm's status lists one PC with these values.

    A daemon runs before its coordinator has welcomed it under its new name.
    """
    deadline = time.monotonic() + START_S
    while True:
        done = run_molink(root, "status", "--json")
        # A daemon that is too busy to answer is asked again.
        peers = json.loads(done.stdout)["peers"] if done.stdout else []
        found = [{key: peer[key] for key in expected} for peer in peers]
        if found == [expected] or time.monotonic() > deadline:
            assert found == [expected], done.stderr
            return
        time.sleep(0.1)


def test_up_in_the_background_and_down_again(tmp_path: Path) -> None:
    home = Home(tmp_path)
    options = [*local_options(), "--coordinator-port", "0"]
    processes: list[psutil.Process] = []
    try:
        begun = run_molink(tmp_path, "up", "--background", "--stage", "none", *options)
        assert begun.returncode == 0, begun.stderr
        assert "To add a PC" in begun.stdout
        assert "join molink-" not in begun.stdout, "a token is a password"
        note = read_run_file(home.run_file)
        assert note is not None
        processes.append(psutil.Process(note.pid))
        wait_for_peer(tmp_path, daemon_pid=note.pid)
        second = run_molink(tmp_path, "up", "--background")
        assert second.returncode == 2
        assert "another molink daemon uses" in second.stderr
        assert "leads" in run_molink(tmp_path, "logs", "--process", "daemon").stdout

        assert run_molink(tmp_path, "down").returncode == 0
        psutil.wait_procs(processes, timeout=START_S)
        assert read_run_file(home.run_file) is None
        assert run_molink(tmp_path, "down").returncode == 6

        again = run_molink(tmp_path, "up", "--background", "--name", "attic")
        assert again.returncode == 0, again.stderr
        assert "Using saved options: --stage none" in again.stdout
        note = read_run_file(home.run_file)
        assert note is not None
        processes.append(psutil.Process(note.pid))
        wait_for_peer(tmp_path, daemon_pid=note.pid, name="attic")
        assert run_molink(tmp_path, "down").returncode == 0
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
