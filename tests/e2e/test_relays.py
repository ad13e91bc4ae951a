"""PCs behind routers: neither can connect to the other, and a third relays."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import MakeModel
from tests.support.processes import START_S, Tools
from tests.support.rig_swarm import Behind, House, ask
from tools.wan import Node, unavailable
from tools.wan.homes import homes_unavailable

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason=f"no namespaces here: {unavailable()}"
)


def ways(status: dict[str, Any]) -> dict[tuple[str, str], str]:
    """The relay of each connected pair, by names."""
    names = {one["id"]: one["name"] for one in status["peers"]}
    return {
        (names[one["from"]], names[one["to"]]): names[one["through"]] for one in status["relays"]
    }


def measured(status: dict[str, Any]) -> bool:
    """Whether placement knows the latencies of the ring's links."""
    stages = status["pipelines"][0]["stages"]
    return bool(stages) and all(
        stage["link_measured"] and 0.01 <= stage["link_s"] < 1 for stage in stages
    )


@pytest.mark.slow  # without processes: tests/molinkd/peer/membership/test_relay_server.py
def test_two_pcs_that_can_not_meet_serve_by_way_of_a_third(tmp_path: Path) -> None:
    # 20 ms round trip, through the hub.
    nodes = (
        Node("hub"),
        Node("attic", closed=1, delay_ms=10),
        Node("couch", closed=1, delay_ms=10),
    )
    with House(tmp_path, *nodes) as house:
        hub, token = house.first("hub", "--stage", "none")
        attic = house.start("attic", "join", token, "--stage", "1-4")
        couch = house.start("couch", "join", token, "--stage", "5-8")
        found = ways(hub.wait_ready())
        assert (found["attic", "couch"], found["couch", "attic"]) == ("hub", "hub")
        Tools.wait_for(lambda: measured(hub.status()), hub)
        # Each endpoint answers; the hub's uses a connection that the attic has opened.
        for one in (attic, couch, hub):
            Tools.wait_for(lambda one=one: "is ready" in one.output, one)
            assert one.run("chat", "What is molink?").strip(), one.output
        assert ways(hub.status())["hub", "attic"] == "hub"
        # A drained PC relays nothing, and there is no other relay.
        hub.run("drain", "--timeout", "5")
        Tools.wait_for(lambda: not hub.status()["relays"], hub)
        Tools.wait_for(lambda: not hub.status()["pipelines"][0]["ready"], hub)
        hub.run("resume")
        hub.wait_ready()
        assert couch.run("chat", "What is molink?").strip(), couch.output


@pytest.mark.slow  # without processes: tests/molinkd/peer/membership/test_hole_punching.py
@pytest.mark.skipif(
    homes_unavailable() is not None, reason=f"no routers here: {homes_unavailable()}"
)
def test_two_homes_leave_their_relay(tmp_path: Path) -> None:
    """Once connected directly, they serve without it."""
    nodes = (Node("hub"), Node("attic", delay_ms=10), Node("couch", delay_ms=10))
    with House(tmp_path, *nodes, kinds=("open", "port-cone", "address-cone")) as house:
        hub, token = house.first("hub", "--stage", "none")
        attic = house.start("attic", "join", token, "--stage", "1-4")
        house.start("couch", "join", token, "--stage", "5-8")
        hub.wait_ready()
        ends = ("attic", "couch"), ("couch", "attic")

        def punched() -> bool:
            names = {one["id"]: one["name"] for one in hub.status()["peers"]}
            relays = hub.status()["relays"]
            found = [(names[one["from"]], names[one["to"]]) for one in relays if one["punched"]]
            return sorted(found) == sorted(ends)

        Tools.wait_for(punched, hub)
        Tools.wait_for(lambda: "is ready" in attic.output, attic)
        answer = ask(attic)
        house.rig.cut(0)
        assert ask(attic) == answer


def ways_between(hub: Behind, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The relays of some pairs."""
    found = ways(hub.status())
    return {pair: found[pair] for pair in pairs if pair in found}


@contextmanager
def asked_all_the_time(one: Behind) -> Iterator[list[str]]:
    """The answers of that PC's endpoint, one after the other during the block."""
    answers: list[str] = []
    is_over = threading.Event()

    def keep_asking() -> None:
        while not is_over.is_set():
            answers.append("")
            answers[-1] = ask(one)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        yield answers
    finally:
        is_over.set()
        asking.join()


@pytest.mark.slow  # without processes: tests/molinkd/peer/membership/test_moving_routes.py
@pytest.mark.timeout(600)
def test_streams_leave_their_relay_while_they_run(tmp_path: Path) -> None:
    """For the other end itself, once it can be dialled: the ring doesn't form again."""
    nodes = (
        Node("hub", delay_ms=20),
        Node("attic", closed=1, delay_ms=2),
        Node("couch", closed=1, delay_ms=2),
    )
    ends = ("attic", "couch"), ("couch", "attic")
    with House(tmp_path, *nodes) as house:
        hub, token = house.first("hub", "--stage", "none")
        attic = house.start("attic", "join", token, "--stage", "1-4")
        house.start("couch", "join", token, "--stage", "5-8")
        hub.wait_ready()
        Tools.wait_for(lambda: "is ready" in attic.output, attic)
        answer = ask(attic)
        assert ways_between(hub, ends) == dict.fromkeys(ends, "hub")
        epoch = hub.status()["pipelines"][0]["epoch"]
        with asked_all_the_time(attic) as answers:
            for index in (1, 2):
                house.rig.change(index, closed=0)
            Tools.wait_for(lambda: not ways_between(hub, ends), hub, 3 * START_S)
        assert set(answers) == {answer}
        assert hub.status()["pipelines"][0]["epoch"] == epoch
        house.rig.cut(0)
        assert ask(attic) == answer


def choices(hub: Behind) -> list[dict[tuple[str, str], str]]:
    """The relay of each pair after each change, by the coordinator's log."""
    names = {one["id"]: one["name"] for one in hub.status()["peers"]}
    log = (hub.home.logs / "coordinator.log").read_text(encoding="utf-8", errors="replace")
    found = []
    for line in log.splitlines():
        _, is_told, routes = line.partition("relays: ")
        words = [route.split() for route in routes.split(", ") if route]
        if is_told:
            found.append({(names[a], names[b]): names[c] for a, _, b, _, c in words})
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lie", ["hold", "cut", "trickle"])
def test_a_member_that_seems_the_best_relay_passes_nothing_on(tmp_path: Path, lie: str) -> None:
    """Streams continue through another relay, and the liar is not chosen again.

    Without processes: tests/molinkd/peer/membership/test_relay_server.py,
    tests/swarm/controller/test_relays.py.
    """
    nodes = (
        Node("hub", delay_ms=10),
        Node("liar"),
        Node("attic", closed=1),
        Node("couch", closed=1),
    )
    with House(tmp_path, *nodes) as house:
        hub, token = house.first("hub", "--stage", "none")
        liar = house.start("liar", "join", token, "--stage", "none", lie=lie)
        Tools.wait_for(lambda: len(hub.status().get("peers", ())) == 2, liar)
        attic = house.start("attic", "join", token, "--stage", "1-4")
        couch = house.start("couch", "join", token, "--stage", "5-8")
        hub.wait_ready()
        for one in (attic, couch):
            Tools.wait_for(lambda one=one: "is ready" in one.output, one)
        answers = [ask(one) for one in (attic, couch, attic, couch)]
        assert len(set(answers)) == 1, answers
        ends = ("attic", "couch"), ("couch", "attic")
        Tools.wait_for(lambda: [ways(hub.status()).get(pair) for pair in ends] == ["hub"] * 2, hub)
        assert ask(couch) == answers[0]
        told = choices(hub)
        for pair in ends:
            by = [one.get(pair, "") for one in told]
            chosen = [now for before, now in zip(["", *by], by, strict=False) if now != before]
            assert chosen.count("liar") == 1, chosen


@pytest.mark.slow
def test_one_pc_can_dial_the_other(tmp_path: Path, make_model: MakeModel) -> None:
    """The other direction, model files included, uses a connection that it has opened."""
    model = make_model(tmp_path / "tiny", "qwen2", num_hidden_layers=8)
    with House(tmp_path, Node("hub"), Node("couch", closed=1)) as house:
        hub, token = house.first("hub", "--stage", "1-4")
        couch = house.start("couch", "join", token, "--stage", "5-8")
        assert ways(hub.wait_ready()) == {("hub", "couch"): "hub"}
        Tools.wait_for(lambda: "is ready" in couch.output, couch)
        assert couch.run("chat", "What is molink?").strip(), couch.output
        hub.run("stop")
        assert couch.run("run", str(model), "Hello"), couch.output
        assert hub.run("chat", "--model", "tiny", "Hello"), hub.output


@pytest.mark.slow
def test_model_files_go_by_way_of_a_third(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model(tmp_path / "tiny", "qwen2", num_hidden_layers=8)
    with House(tmp_path, Node("hub"), Node("attic", closed=1), Node("couch", closed=1)) as house:
        hub, token = house.first("hub", "--stage", "none")
        attic = house.start("attic", "join", token, "--stage", "1-4")
        couch = house.start("couch", "join", token, "--stage", "5-8")
        hub.wait_ready()
        Tools.wait_for(lambda: "is ready" in attic.output, attic)
        hub.run("stop")
        assert attic.run("run", str(model), "Hello"), attic.output
        assert couch.run("chat", "--model", "tiny", "Hello"), couch.output
        assert ways(hub.status())["couch", "attic"] == "hub"
