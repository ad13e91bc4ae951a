"""PCs that can't dial each other, nor the leader: they meet at a rendezvous."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Process, Tools

#: Addresses of this PC at which nothing of molink listens, as if each were behind a router.
UNREACHABLE = {"first": "127.77.0.1", "second": "127.77.0.2", "third": "127.77.0.3"}


class Homes:
    """PCs behind routers, and a rendezvous."""

    def __init__(self, root: Path, tools: type[Tools]) -> None:
        self.root, self.tools = root, tools
        self.running: dict[str, Process] = {}
        options = ["rendezvous", "--host", "127.0.0.1", "--port", "0"]
        server = self.rendezvous = tools.Process(root / "server", options)
        self.running["server"] = server
        tools.wait_for(lambda: "--rendezvous" in server.output, server)
        self.address = server.output.split("--rendezvous ")[1].split()[0]

    def options(self, name: str, *more: str) -> list[str]:
        network = ["--advertise", UNREACHABLE[name], "--coordinator-port", "0", *more]
        return ["--name", name, *self.tools.local_options(*network)]

    def up(self, name: str, *more: str) -> Process:
        meet = ["--rendezvous", self.address]
        process = self.tools.Process(self.root / name, ["up", *meet, *self.options(name, *more)])
        self.running[name] = process
        self.tools.wait_for(process.home.membership.exists, process)
        return process

    def invite(self, name: str) -> str:
        done = self.tools.run_molink(self.root / name, "invite", "--uses", "9")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def join(self, name: str, token: str, *more: str) -> Process:
        start = ["join", token, *self.options(name, *more)]
        process = self.running[name] = self.tools.Process(self.root / name, start)
        return process

    def stop(self) -> None:
        for process in reversed(self.running.values()):
            process.stop()


@pytest.fixture
def homes(tmp_path: Path, tools: type[Tools]) -> Iterator[Homes]:
    made = Homes(tmp_path, tools)
    try:
        yield made
    finally:
        made.stop()


def online(process: Process) -> list[str]:
    return sorted(one["name"] for one in process.status()["peers"] if one["state"] == "online")


def test_a_leader_that_nobody_can_dial(homes: Homes, tools: type[Tools]) -> None:
    first = homes.up("first", "--stage", "none")
    second = homes.join("second", homes.invite("first"), "--stage", "none")
    tools.wait_for(lambda: online(second) == ["first", "second"], second)
    assert online(first) == ["first", "second"]
