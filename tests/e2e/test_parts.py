"""A swarm splits into two parts, each admits a PC and serves; then the parts merge."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from molinkd.coordinator.replica_file import read_replica
from tests.support.processes import Tools
from tests.support.rig_swarm import Behind, House, ask
from tools.wan import Node, unavailable

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason=f"no namespaces here: {unavailable()}"
)
#: Any free ports: several PCs share a node.
PORTS = ("--control-port", "0", "--worker-ports", "0-0", "--api-port", "0")
OPTIONS = (*PORTS, "--coordinator-port", "0")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with House(tmp_path, Node("near"), Node("far")) as house:
        yield house


def leader(one: Behind) -> str:
    """The leader's name by a PC's status; empty while it hears none."""
    status = one.status()
    names = {peer["id"]: peer["name"] for peer in status.get("peers", ())}
    running = status.get("coordinator", {}).get("state") == "running"
    return names.get(status.get("leader", ""), "") if running else ""


def online(one: Behind) -> list[str]:
    """Names of the connected PCs by a PC's status."""
    peers = one.status().get("peers", ())
    return sorted(peer["name"] for peer in peers if peer["state"] == "online")


def is_ready(one: Behind) -> bool:
    """Whether a PC knows a pipeline that is ready."""
    return any(pipeline["ready"] for pipeline in one.status().get("pipelines", ()))


def invite(one: Behind) -> str:
    """A token of that PC."""
    token: list[str] = []

    def invited() -> bool:
        token.append(one.run("invite").strip())
        return bool(token[-1])

    Tools.wait_for(invited, one, every=0.5)
    return token[-1]


# without processes: tests/dst/test_joins.py
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pcs_that_join_two_parts_are_members_of_the_whole(house: House) -> None:
    first = house.start("first", "up", "--dtype", "f32", *OPTIONS, node="near")
    Tools.wait_for(lambda: is_ready(first), first)
    second = house.start("second", "join", invite(first), *OPTIONS, node="far")
    Tools.wait_for(lambda: is_ready(second) and leader(second) == "first", second)
    Tools.wait_for(second.home.replica.exists, second)
    expected = ask(first)
    assert ask(second) == expected
    house.rig.cut(1)
    Tools.wait_for(lambda: leader(second) == "second" and is_ready(second), second)
    Tools.wait_for(lambda: online(first) == ["first"] and is_ready(first), first)
    third = house.start("third", "join", invite(first), *OPTIONS, node="near")
    fourth = house.start("fourth", "join", invite(second), *OPTIONS, node="far")
    parts = (first, third), (second, fourth)
    for part in parts:
        names = sorted(one.home.root.name for one in part)
        for one in part:
            Tools.wait_for(lambda one=one, names=names: online(one) == names, one)
            Tools.wait_for(lambda one=one: is_ready(one), one)
            assert ask(one) == expected
    house.rig.mend(1)
    everybody = [one for part in parts for one in part]
    names = sorted(one.home.root.name for one in everybody)
    for one in everybody:
        Tools.wait_for(lambda one=one: online(one) == names, one)
    led_by = {leader(one) for one in everybody}
    assert len(led_by) == 1
    assert led_by <= {"first", "second"}
    for one in everybody:
        Tools.wait_for(lambda one=one: is_ready(one), one)
        assert ask(one) == expected
        held = read_replica(one.home.replica)
        assert held is not None
        members = [held.log.members[peer].name for peer in held.log.branches]
        assert sorted(members) == names
    # No PC has to join again, and none is lost.
    assert all(one.process.poll() is None for one in everybody)
