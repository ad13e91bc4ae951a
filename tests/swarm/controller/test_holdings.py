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
def fake(kit: Kit) -> FakeFleet:
    """Two PCs; ``a``, which holds no stage, has loaded the model."""
    fake = kit.FakeFleet("a", "b", "c", min_peers=2)
    fake.report("a", stage="none")
    fake.report("b")
    fake.report("c")
    fake.serve(facts=msgspec.structs.replace(kit.facts, root=ROOT))
    return fake


def have(fake: FakeFleet, peer: str, *layers: tuple[int, int], root: str = ROOT) -> None:
    """A peer reports that it has the files of these layers."""
    report = fake.fleet.registry.sessions[peer].report
    parts = (PartialModel(root=root, layers=layers),)
    fake.handle_event(
        PeerReportedEvent(peer, msgspec.structs.replace(report, partial_models=parts, workers=()))
    )


def assigned(fake: FakeFleet) -> list[Assign]:
    return [message for _, message in fake.pop_messages() if isinstance(message, Assign)]


def reason(fake: FakeFleet) -> str:
    """The reason in the published routes."""
    route = fake.fleet.registry.sessions["b"].routes["p1"]
    assert isinstance(route, Route)
    return route.reason


def test_partial_holders_are_named(fake: FakeFleet) -> None:
    fake.wait(2, "a", "b", "c")
    first = assigned(fake)
    assert {(one.sources, one.partial_sources) for one in first} == {(("a",), ())}
    have(fake, "b", (0, 3))
    have(fake, "c", (3, 6), root=OTHER)
    fake.handle_event(PeerStoppedEvent("b"))
    have_facts = fake.fleet.models[0].facts
    assert partial_holders(have_facts, fake.fleet.registry) == ()
    fake.report("b")
    have(fake, "b", (0, 3))
    assert partial_holders(have_facts, fake.fleet.registry) == ("b",)
    fake.handle_event(PeerStoppedEvent("a"))
    fake.wait(3, "b", "c")
    route = fake.fleet.registry.sessions["c"].routes["p1"]
    assert (route.sources, route.partial_sources) == ((), ("b",))


def test_named_holders_cover_most_layers(fake: FakeFleet) -> None:
    facts = fake.fleet.models[0].facts
    for name in map(chr, range(ord("d"), ord("d") + MAX_SOURCES)):
        fake.join(name)
        have(fake, name, (0, 2))
    fake.join("z")
    have(fake, "z", (2, 6))
    found = partial_holders(facts, fake.fleet.registry)
    assert len(found) == MAX_SOURCES
    assert found[-1] == "z"
    reports = [
        one.report for one in fake.fleet.registry.sessions.values() if one.report.partial_models
    ]
    assert missing_layers(facts, reports, only_model=False) == ()


def test_missing_files_are_reported_and_not_retried(fake: FakeFleet) -> None:
    fake.wait(2, "a", "b", "c")
    fake.obey()
    fake.handle_event(MemberRemovedEvent("a", "has left"))
    fake.wait(1, "b", "c")
    fake.obey()
    have(fake, "b", (0, 3))
    have(fake, "c", (4, 6))
    fake.fleet.deployments[0].rebalance_ring(fake.now)
    fake.handle_event(PeerStoppedEvent("c"))
    fake.wait(3, "b")
    (order,) = assigned(fake)
    assert (order.layers, order.sources, order.partial_sources) == ((0, 6), (), ("b",))
    fake.failed("b", 0, order.epoch, files_missing=True)
    have(fake, "b", (0, 3))
    fake.wait(10, "b")
    assert assigned(fake) == []
    assert reason(fake) == "stage 1 on B: oops"
    status = build_status(fake.fleet, "s1", [], 1)
    assert status.pipelines[0].reason == "stage 1 on B: oops"
    assert status.peers[0].reason == ""
    # A peer with more files joins.
    fake.report("c")
    have(fake, "c", (3, 6))
    fake.wait(3, "b", "c")
    assert assigned(fake)


def test_missing_files_are_retried_after_an_interval(fake: FakeFleet) -> None:
    fake.handle_event(PeerStoppedEvent("a"))
    have(fake, "b", (0, 3))
    have(fake, "c", (3, 6))
    fake.wait(2, "b", "c")
    order = assigned(fake)[0]
    fake.failed("b", 0, order.epoch, files_missing=True)
    fake.wait(RETRY_INTERVAL - 5, "b", "c")
    assert assigned(fake) == []
    fake.wait(10, "b", "c")
    assert assigned(fake)
