import msgspec
import pytest

from molink.swarm.controller.events import MemberRemovedEvent, PeerReportedEvent, PeerStoppedEvent
from molink.swarm.controller.holdings import RETRY_INTERVAL, missing_layers, partial_holders
from molink.swarm.controller.status import build_status
from molink.wire.messages.instructions import MAX_SOURCES, Assign, Route
from molink.wire.messages.peer_reports import PartialModel
from tests.support.fake_fleet import FakeFleet, Kit

ROOT = f"{7:064}:99"
OTHER = f"{8:064}:99"


@pytest.fixture
def paper(kit: Kit) -> FakeFleet:
    """Two PCs; ``a``, which holds no stage, has loaded the model."""
    paper = kit.Paper("a", "b", "c", min_peers=2)
    paper.report("a", stage="none")
    paper.report("b")
    paper.report("c")
    paper.serve(facts=msgspec.structs.replace(kit.facts, root=ROOT))
    return paper


def have(paper: FakeFleet, peer: str, *layers: tuple[int, int], root: str = ROOT) -> None:
    """A peer reports the files of these layers."""
    report = paper.fleet.registry.sessions[peer].report
    parts = (PartialModel(root=root, layers=layers),)
    paper.handle_event(
        PeerReportedEvent(peer, msgspec.structs.replace(report, partial_models=parts, workers=()))
    )


def assigned(paper: FakeFleet) -> list[Assign]:
    return [message for _, message in paper.pop_messages() if isinstance(message, Assign)]


def reason(paper: FakeFleet) -> str:
    """The reason in the published routes."""
    route = paper.fleet.registry.sessions["b"].routes["p1"]
    assert isinstance(route, Route)
    return route.reason


def test_partial_holders_are_named(paper: FakeFleet) -> None:
    paper.wait(2, "a", "b", "c")
    first = assigned(paper)
    assert {(one.sources, one.partial_sources) for one in first} == {(("a",), ())}
    have(paper, "b", (0, 3))
    have(paper, "c", (3, 6), root=OTHER)
    paper.handle_event(PeerStoppedEvent("b"))
    have_facts = paper.fleet.models[0].facts
    assert partial_holders(have_facts, paper.fleet.registry) == ()
    paper.report("b")
    have(paper, "b", (0, 3))
    assert partial_holders(have_facts, paper.fleet.registry) == ("b",)
    paper.handle_event(PeerStoppedEvent("a"))
    paper.wait(3, "b", "c")
    route = paper.fleet.registry.sessions["c"].routes["p1"]
    assert (route.sources, route.partial_sources) == ((), ("b",))


def test_named_holders_cover_most_layers(paper: FakeFleet) -> None:
    facts = paper.fleet.models[0].facts
    for name in map(chr, range(ord("d"), ord("d") + MAX_SOURCES)):
        paper.join(name)
        have(paper, name, (0, 2))
    paper.join("z")
    have(paper, "z", (2, 6))
    found = partial_holders(facts, paper.fleet.registry)
    assert len(found) == MAX_SOURCES
    assert found[-1] == "z"
    reports = [
        one.report for one in paper.fleet.registry.sessions.values() if one.report.partial_models
    ]
    assert missing_layers(facts, reports, only_model=False) == ()


def test_missing_files_are_reported_and_not_retried(paper: FakeFleet) -> None:
    paper.wait(2, "a", "b", "c")
    paper.obey()
    paper.handle_event(MemberRemovedEvent("a", "has left"))
    paper.wait(1, "b", "c")
    paper.obey()
    have(paper, "b", (0, 3))
    have(paper, "c", (4, 6))
    paper.fleet.deployments[0].rebalance_ring(paper.now)
    paper.handle_event(PeerStoppedEvent("c"))
    paper.wait(3, "b")
    (order,) = assigned(paper)
    assert (order.layers, order.sources, order.partial_sources) == ((0, 6), (), ("b",))
    paper.failed("b", 0, order.epoch, files_missing=True)
    have(paper, "b", (0, 3))
    paper.wait(10, "b")
    assert assigned(paper) == []
    assert reason(paper) == "stage 0 on B: oops"
    status = build_status(paper.fleet, "s1", [], 1)
    assert status.pipelines[0].reason == "stage 0 on B: oops"
    assert status.peers[0].reason == ""
    # A peer with more files joins.
    paper.report("c")
    have(paper, "c", (3, 6))
    paper.wait(3, "b", "c")
    assert assigned(paper)


def test_missing_files_are_retried_after_an_interval(paper: FakeFleet) -> None:
    paper.handle_event(PeerStoppedEvent("a"))
    have(paper, "b", (0, 3))
    have(paper, "c", (3, 6))
    paper.wait(2, "b", "c")
    order = assigned(paper)[0]
    paper.failed("b", 0, order.epoch, files_missing=True)
    paper.wait(RETRY_INTERVAL - 5, "b", "c")
    assert assigned(paper) == []
    paper.wait(10, "b", "c")
    assert assigned(paper)
