"""The processes of the swarm that runs on this PC."""

import json
import subprocess
import sys
from typing import Any

import psutil


def swarm_processes() -> tuple[dict[psutil.Process, str], list[str]]:
    """Every daemon, its workers and their other descendants with what each is; and endpoints.

    They come from ``molink status --json``.
    """
    command = [sys.executable, "-m", "molinkd", "status", "--json"]
    # Its exit code says whether the swarm is ready, too.
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, encoding="utf-8")
    if not done.stdout:
        raise SystemExit(f"`molink status` ended with exit code {done.returncode}")
    peers: list[dict[str, Any]] = json.loads(done.stdout)["peers"]
    found: dict[psutil.Process, str] = {}
    for peer in peers:
        daemon = psutil.Process(peer["daemon_pid"])
        found[daemon] = f"daemon of {peer['name']}"
        workers = {worker["pid"]: worker["stage"] for worker in peer["workers"]}
        for child in daemon.children(recursive=True):
            stage = workers.get(child.pid)
            found[child] = f"child of {peer['name']}" if stage is None else f"stage {stage}"
    return found, [peer["endpoint"] for peer in peers if peer["endpoint"]]
