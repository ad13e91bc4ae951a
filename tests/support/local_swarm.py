"""A local swarm of real processes with separate homes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from molink.errors import MolinkError
from molinkd.cli import daemon_client as local_daemon
from molinkd.peer.home import Home
from tests.support.processes import Process, Tools

NAMES = ("first", "second", "third")


class LocalSwarm:
    """Three PCs with a stage each; more may join later."""

    def __init__(self, root: Path, tools: type[Tools], model: Sequence[str] = ()) -> None:
        """``model`` is the option of ``up``."""
        self.root, self.tools, self.model = root, tools, model
        self.running: dict[str, Process] = {}
        self.up()
        tools.wait_for(lambda: self._home("first").membership.exists(), self.running["first"])
        token = self.molink("first", "invite", "--uses", "2")
        for name in NAMES[1:]:
            self.join(name, token)

    def _home(self, name: str) -> Home:
        return Home(self.root / name)

    def up(self) -> None:
        """Start the first PC."""
        options = self.tools.local_options("--dtype", "f32", "--min-peers", "3")
        start = ["up", *self.model, "--name", "first", "--coordinator-port", "0", *options]
        self.running["first"] = self.tools.Process(self.root / "first", start)

    def join(self, name: str, token: str, *more: str, **variables: str) -> None:
        """Start another PC; returns once it is a member. ``variables`` are its environment's."""
        options = self.tools.local_options("--coordinator-port", "0", *more)
        start = ["join", token, "--name", name, *options]
        process = self.tools.Process(self.root / name, start, variables=variables)
        self.running[name] = process
        # The first PC to join is the next to lead.
        self.tools.wait_for(lambda: self._home(name).membership.exists(), process)

    def molink(self, name: str, *arguments: str) -> str:
        """The output of a command on that PC, which must succeed."""
        done = self.tools.run_molink(self.root / name, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def status(self, name: str) -> dict[str, Any]:
        """The status by that PC; empty while it is unavailable."""
        found = local_daemon.find_daemon(self._home(name))
        try:
            return {} if found is None else local_daemon.fetch_status(found)
        except MolinkError:  # it is starting, or its coordinator is being replaced
            return {}

    def led_by(self, name: str, by: str, there: int) -> bool:
        """Whether ``name`` knows ``there`` PCs, the leader ``by``, and a ready pipeline."""
        status = self.status(name)
        peers = [peer for peer in status.get("peers", ()) if peer["state"] == "online"]
        leaders = [peer["name"] for peer in peers if peer["id"] == status.get("leader")]
        pipelines = status.get("pipelines", [])
        ready = bool(pipelines) and pipelines[0]["ready"]
        return leaders == [by] and len(peers) == there and ready

    def wait_led_by(self, name: str, by: str, there: int) -> None:
        """Wait until :meth:`led_by` holds."""
        self.tools.wait_for(lambda: self.led_by(name, by, there), self.running[name])

    def kill(self, name: str) -> None:
        """Kill its processes as a power failure would: the daemon sends no goodbye."""
        process = self.running.pop(name)
        process.process.kill()
        process.stop()

    def stop(self) -> None:
        """Stop all daemons."""
        for process in reversed(self.running.values()):
            process.stop()
