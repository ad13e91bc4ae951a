"""PCs that can't dial each other, nor the leader: they meet at a rendezvous."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Process, Tools
from tests.support.rig_swarm import House
from tools.wan import Node, unavailable

#: Addresses of this PC at which nothing of molink listens, as if each were behind a router.
UNREACHABLE = {
    "first": "127.77.0.1",
    "second": "127.77.0.2",
    "third": "127.77.0.3",
    "fourth": "127.77.0.4",
}


class Homes:
    """PCs behind routers, and a rendezvous."""

    def __init__(self, root: Path, tools: type[Tools]) -> None:
        self.root, self.tools = root, tools
        self.running: dict[str, Process] = {}
        server = self.serve("0")
        tools.wait_for(lambda: "--rendezvous" in server.output, server)
        self.address = server.output.split("--rendezvous ")[1].split()[0]

    def serve(self, port: str) -> Process:
        """Start the rendezvous."""
        options = ["rendezvous", "--host", "127.0.0.1", "--port", port]
        server = self.running["server"] = self.tools.Process(self.root / "server", options)
        return server

    def options(self, name: str, *more: str) -> list[str]:
        first = random.randrange(10_000, 30_000)
        network = ["--advertise", UNREACHABLE[name], "--coordinator-port", "0"]
        # A route leads to the ports of workers only, so they are chosen.
        ports = ["--worker-ports", f"{first}-{first + 19}", *more]
        return ["--name", name, *self.tools.local_options(*network, *ports)]

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

    def kill(self, name: str) -> None:
        """As if its power had gone."""
        process = self.running.pop(name)
        process.process.kill()
        process.stop()

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


def ways(process: Process) -> dict[tuple[str, str], str]:
    """Through whom which PCs are connected, by their names."""
    status = process.status()
    names = {one["id"]: one["name"] for one in status["peers"]}
    return {
        (names[one["from"]], names[one["to"]]): names.get(one["through"], one["through"])
        for one in status["relays"]
    }


def ask(process: Process, tools: type[Tools]) -> str:
    client = tools.client(process.found().endpoints[0])
    tools.wait_for(lambda: client.models.list().data, process)
    reply = client.completions.create(
        model="molink-demo", prompt="Once", max_tokens=12, temperature=0
    )
    return reply.choices[0].text


def test_a_leader_that_nobody_can_dial(homes: Homes, tools: type[Tools]) -> None:
    first = homes.up("first", "--stage", "none")
    second = homes.join("second", homes.invite("first"), "--stage", "none")
    tools.wait_for(lambda: online(second) == ["first", "second"], second)
    assert online(first) == ["first", "second"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_pcs_that_nobody_can_dial_serve_a_model(homes: Homes, tools: type[Tools]) -> None:
    first = homes.up("first", "--stage", "1-4")
    second = homes.join("second", homes.invite("first"), "--stage", "5-8")
    second.wait_ready()
    place = homes.address.partition("@")[2]
    assert ways(first) == {("first", "second"): place, ("second", "first"): place}
    assert ask(first, tools) == ask(second, tools)


def led_by(process: Process) -> str:
    """The name of the leader, as ``process`` knows it."""
    status = process.status()
    names = {one["id"]: one["name"] for one in status["peers"]}
    return names.get(status["leader"], "")


@pytest.mark.slow  # without processes: tests/molinkd/peer/election/test_leadership.py
@pytest.mark.timeout(300)
def test_the_next_leader_can_not_be_dialled_either(homes: Homes, tools: type[Tools]) -> None:
    homes.up("first", "--stage", "none")
    token = homes.invite("first")
    second = homes.join("second", token, "--stage", "none")
    tools.wait_for(second.home.membership.exists, second)  # who joined first leads next
    third = homes.join("third", token, "--stage", "none")
    tools.wait_for(lambda: online(third) == ["first", "second", "third"], third)
    tools.wait_for(lambda: third.home.replica.exists() and second.home.replica.exists(), third)
    late = homes.invite("third")
    homes.kill("first")
    tools.wait_for(lambda: led_by(third) == led_by(second) == "second", third)
    tools.wait_for(lambda: online(third) == ["second", "third"], third)
    # A token of before still admits: it names the second one as a contact point.
    fourth = homes.join("fourth", late, "--stage", "none")
    tools.wait_for(lambda: online(fourth) == ["fourth", "second", "third"], fourth)
    # The first one comes back, and follows.
    again = homes.up("first", "--stage", "none")
    tools.wait_for(lambda: led_by(again) == "second" and len(online(again)) == 4, again)


@pytest.mark.slow
def test_a_coordinator_without_a_daemon(homes: Homes, tools: type[Tools]) -> None:
    options = ["--host", "127.0.0.1", "--port", "0", "--advertise", UNREACHABLE["first"]]
    alone = homes.running["first"] = tools.Process(
        homes.root / "first",
        ["coordinator", *options],
        variables={"MOLINK_RENDEZVOUS": homes.address},
    )
    tools.wait_for(alone.home.membership.exists, alone)
    second = homes.join("second", homes.invite("first"), "--stage", "none")
    tools.wait_for(lambda: online(second) == ["second"], second)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_rendezvous_vanishes_and_returns(homes: Homes, tools: type[Tools]) -> None:
    """Each PC goes on alone meanwhile."""
    first = homes.up("first", "--stage", "none")
    second = homes.join("second", homes.invite("first"), "--stage", "none")
    tools.wait_for(lambda: online(first) == online(second) == ["first", "second"], second)
    homes.kill("server")
    tools.wait_for(lambda: led_by(second) == "second" and led_by(first) == "first", second)
    homes.serve(homes.address.rpartition(":")[2])
    tools.wait_for(lambda: online(first) == online(second) == ["first", "second"], second)
    assert led_by(first) == led_by(second)


@pytest.mark.slow
def test_a_token_says_what_failed(homes: Homes, tools: type[Tools], tmp_path: Path) -> None:
    homes.up("first", "--stage", "none")
    token = homes.invite("first")
    place = homes.address.partition("@")[2]
    homes.running.pop("server").stop()
    done = tools.run_molink(tmp_path / "lost", "join", token, *homes.options("second"))
    assert done.returncode == 6, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: can't join: 127.77.0.1:")
    assert f"the rendezvous {place} refuses connections" in line


@pytest.mark.slow
@pytest.mark.skipif(unavailable() is not None, reason=f"no namespaces here: {unavailable()}")
def test_all_are_behind_routers(tmp_path: Path) -> None:
    """20 ms from one to the other and back, by way of the rendezvous, which belongs to no swarm."""
    nodes = (
        Node("server"),
        Node("attic", closed=1, delay_ms=10),
        Node("couch", closed=1, delay_ms=10),
    )
    with House(tmp_path, *nodes) as house:
        address = house.rendezvous("server")
        attic, token = house.first("attic", "--stage", "1-4", "--rendezvous", address)
        couch = house.start("couch", "join", token, "--stage", "5-8")
        attic.wait_ready()
        place = address.partition("@")[2]
        assert set(ways(attic).values()) == {place}
        for one in (attic, couch):
            Tools.wait_for(lambda one=one: "is ready" in one.output, one)
            assert one.run("chat", "What is molink?").strip(), one.output
