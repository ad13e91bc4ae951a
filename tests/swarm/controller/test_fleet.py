from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import msgspec
import pytest

from molink.swarm.controller.allocator import URGENT_AFTER
from molink.swarm.controller.events import (
    ConnectionTriedEvent,
    MemberRemovedEvent,
    PeerReportedEvent,
    PeerStoppedEvent,
    RebalanceRequestedEvent,
    TermRaisedEvent,
)
from molink.swarm.controller.fleet import Fleet
from molink.swarm.controller.records import DesiredModel, PipelineRecord
from molink.swarm.election.terms import next_term
from molink.wire.messages.instructions import Assign, FormPipeline, Route, RouteRemoved, Unassign
from tests.support.fake_fleet import FACTS, GB, FakeFleet, Kit


def wish(name: str, **changes: Any) -> DesiredModel:
    return DesiredModel(msgspec.structs.replace(FACTS, name=name), "a", **changes)


def settle(fake: FakeFleet, peers: str, seconds: float = 2.0) -> list[Any]:
    """Run until the desired state is reached; returns the messages."""
    told = []
    for _ in range(round(seconds / 0.5)):
        fake.wait(0.5, *peers)
        told += fake.obey()
    return told


def peers_of(fake: FakeFleet, model: str, replica: int = 0) -> str:
    formation = fake.deployment(model, replica).formation
    return "".join(sorted(formation.peers)) if formation is not None else ""


def start(kit: Kit, peers: str, *models: DesiredModel, **changes: Any) -> FakeFleet:
    fake = kit.FakeFleet(*peers)
    for name in peers:
        fake.report(name, **changes)
    fake.serve_all(*models)
    settle(fake, peers)
    return fake


@pytest.fixture
def both(kit: Kit) -> FakeFleet:
    """``x`` and ``y`` run on one peer each; the third peer is a spare of one of them."""
    fake = start(kit, "abc", wish("x"), wish("y"))
    assert all(one.is_ready for one in fake.fleet.deployments)
    fake.pop_messages()
    return fake


def test_models_use_separate_peers(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    for name in "ab":
        fake.report(name)
    fake.serve_all(wish("x"), wish("y"))
    told = settle(fake, "ab")
    assert {peers_of(fake, "x"), peers_of(fake, "y")} == {"a", "b"}
    routes = [m for p, m in told if p == "a" and isinstance(m, Route) and m.is_ready]
    assert {(one.model, one.pipeline) for one in routes} == {("x", "p1"), ("y", "p2")}
    assert len({one.epoch for one in fake.committed}) == 2
    assert fake.fleet.reason == ""


def test_loss_breaks_only_one_model(both: FakeFleet) -> None:
    x, y = both.deployment("x"), both.deployment("y")
    lost_peer = peers_of(both, "x")
    rest = "".join(name for name in "abc" if name not in lost_peer)
    epoch = y.formation.record.epoch
    both.handle_event(PeerStoppedEvent(lost_peer[0]))
    told = settle(both, rest)
    assert not [m for _, m in told if getattr(m, "pipeline", "") == y.pipeline]
    assert y.formation.record.epoch == epoch
    assert x.is_ready
    assert not set(peers_of(both, "x")) & set(lost_peer)


def test_stage_messages_reach_their_deployment(both: FakeFleet) -> None:
    """Two formations overlap in time."""
    x, y = both.deployment("x"), both.deployment("y")
    for one in (x, y):
        both.failed(one.formation.peers[0], 0, one.formation.record.epoch, one.pipeline)
    both.wait(1, *"abc")
    orders = {m.model: (p, m) for p, m in both.pop_messages() if isinstance(m, Assign)}
    assert orders["x"][1].epoch != orders["y"][1].epoch
    for name in ("y", "x"):  # in reverse order
        peer, order = orders[name]
        both.loaded(order, peer)
        told = {p: m for p, m in both.pop_messages() if isinstance(m, FormPipeline)}
        assert list(told) == [peer]
        both.ready(peer, 0, order.epoch, order.pipeline)
    assert x.is_ready
    assert y.is_ready


def test_model_without_room_waits_alone(kit: Kit) -> None:
    huge = msgspec.structs.replace(FACTS, name="huge", layers=600)
    fake = start(kit, "abc", DesiredModel(huge, "a"), wish("x"))
    assert fake.deployment("x").is_ready
    assert len(peers_of(fake, "x")) == 1
    assert "huge needs" in fake.deployment("huge").reason
    assert fake.fleet.reason.startswith("huge: huge needs")


def test_urgent_model_takes_a_peer_after_a_delay(kit: Kit) -> None:
    fake = start(kit, "ab", wish("x", min_stages=2))
    assert peers_of(fake, "x") == "ab"
    first = fake.deployment("x").formation.record
    fake.serve_all(wish("x", min_stages=2), wish("y"))
    settle(fake, "ab", URGENT_AFTER / 2)
    assert fake.deployment("x").formation.record == first
    assert fake.deployment("y").formation is None
    told = settle(fake, "ab", URGENT_AFTER + 5)
    assert {peers_of(fake, "x"), peers_of(fake, "y")} == {"a", "b"}
    # The peer was freed first: the new pipeline was ready before the old one ended.
    mine = [m for p, m in told if p == "a" and isinstance(m, Route | RouteRemoved)]
    gone = mine.index(RouteRemoved(pipeline=first.id))
    assert any(isinstance(m, Route) and m.model == "x" and m.is_ready for m in mine[:gone])
    freed = peers_of(fake, "y")
    orders = [m for p, m in told if p == freed and isinstance(m, Assign | Unassign)]
    ended = orders.index(Unassign(pipeline=first.id))
    assert [m.model for m in orders[ended:] if isinstance(m, Assign)] == ["y"]
    assert all(m.model == "x" for m in orders[:ended] if isinstance(m, Assign))


def test_model_that_is_no_longer_desired_stops(both: FakeFleet) -> None:
    x, y = both.deployment("x"), both.deployment("y")
    kept = x.formation.record
    both.serve_all(wish("x"))
    told = both.pop_messages()
    assert ("a", RouteRemoved(pipeline=y.pipeline)) in told
    assert {m.pipeline for _, m in told if isinstance(m, Unassign)} == {y.pipeline}
    settle(both, "abc")
    assert x.formation.record == kept
    assert len(both.fleet.deployments) == 1


def test_restarted_model_keeps_its_settings(kit: Kit) -> None:
    x, y = wish("x", applied=True), wish("y", replicas=2, pins=(("c", "auto"), ("b", "auto")))
    y = replace(y, applied=True)
    fake = start(kit, "abc", x, y)
    kept = fake.deployment("x").formation.record
    assert {peers_of(fake, "y"), peers_of(fake, "y", 1)} == {"b", "c"}
    fake.serve_all(x, replace(y, stopped=True))
    gone = {m.pipeline for p, m in fake.pop_messages() if p == "a" and isinstance(m, RouteRemoved)}
    assert len(gone) == 2
    settle(fake, "abc")
    assert [one.key for one in fake.fleet.deployments] == [("x", 0)]
    assert fake.fleet.reason == ""
    fake.serve_all(replace(x, stopped=True), replace(y, stopped=True))
    assert "molink run MODEL" in fake.fleet.reason
    fake.serve_all(x, y)
    settle(fake, "abc")
    assert {peers_of(fake, "y"), peers_of(fake, "y", 1)} == {"b", "c"}
    assert fake.deployment("x").formation.record.stages == kept.stages


def test_second_model_scales_up_and_down(kit: Kit) -> None:
    fake = start(kit, "abcd", wish("x"), wish("y", replicas=2))
    assert all(one.is_ready for one in fake.fleet.deployments)
    records = {one.key: one.formation.record for one in fake.fleet.deployments}
    used = [peer for one in fake.fleet.deployments for peer in one.formation.peers]
    assert len(set(used)) == len(used) == 3
    for replicas, ready in ((1, 1), (2, 2), (3, 3), (4, 3), (1, 1)):
        fake.serve_all(wish("x"), wish("y", replicas=replicas))
        settle(fake, "abcd", URGENT_AFTER + 2)
        of_y = [one for one in fake.fleet.deployments if one.key[0] == "y"]
        assert (len(of_y), sum(one.is_ready for one in of_y)) == (replicas, ready)
        assert ("y #4: " in fake.fleet.reason) == (replicas == 4)
        for key in (("x", 0), ("y", 0)):
            assert fake.deployment(*key).formation.record == records[key]


@pytest.mark.parametrize("late", [False, True])
def test_near_peers_share_a_ring(kit: Kit, late: bool) -> None:
    """``a`` and ``c`` are in one home, ``b`` and ``d`` in another; one more PC joins late."""
    fake = kit.FakeFleet(*"abcd")
    for name in "abcd":
        fake.report(name, memory=5 * GB)

    def measure() -> None:
        for one, other in product("abcd", "abcd"):
            if one != other:
                near = {one, other} in ({"a", "c"}, {"b", "d"})
                fake.handle_event(
                    ConnectionTriedEvent(
                        one, other, succeeded=True, latency=0.001 if near else 2.0, rate=None
                    )
                )

    if not late:
        measure()
    fake.serve_all(wish("x"), wish("y"))
    if late:
        assert any("peers are shared out" in line for line in fake.fleet.story)
        measure()
    settle(fake, "abcd", 3.0)
    assert {peers_of(fake, "x"), peers_of(fake, "y")} == {"ac", "bd"}
    assert all(one.is_ready for one in fake.fleet.deployments)


def test_undesired_workers_are_stopped(both: FakeFleet, kit: Kit) -> None:
    """Drift: a stage of an unknown pipeline, or on a peer that belongs to another model."""
    x, y = both.deployment("x"), both.deployment("y")
    both.report("c", kit.worker("ready", 9, 0, (0, 6), pipeline="p9"))
    assert ("c", Unassign(pipeline="p9")) in both.pop_messages()
    (at,) = peers_of(both, "y")
    shown = [
        kit.worker("ready", one.formation.record.epoch, 0, (0, 6), pipeline=one.pipeline)
        for one in (x, y)
    ]
    both.report(at, *shown)
    assert [m for p, m in both.pop_messages() if p == at] == [Unassign(pipeline=x.pipeline)]


def test_replicas_scale_up_and_down(kit: Kit) -> None:
    fake = start(kit, "abc", wish("x"))
    first = fake.deployment("x").formation.record
    fake.serve_all(wish("x", replicas=2))
    told = settle(fake, "abc")
    assert fake.deployment("x").formation.record == first
    second = fake.deployment("x", 1)
    assert second.is_ready
    assert second.formation.record.replica == 1
    assert not set(peers_of(fake, "x", 1)) & set(peers_of(fake, "x"))
    # Each route names the other one, so that a returning peer keeps both.
    beside = {m.pipeline: m.sibling_pipelines for p, m in told if p == "a" and isinstance(m, Route)}
    assert beside == {first.id: (second.pipeline,), second.pipeline: (first.id,)}
    fake.serve_all(wish("x"))
    told = fake.pop_messages()
    assert ("b", RouteRemoved(pipeline=second.pipeline)) in told
    settle(fake, "abc")
    assert fake.deployment("x").formation.record == first
    assert len(fake.fleet.deployments) == 1


def test_devices_of_a_pc_are_lost_together(kit: Kit) -> None:
    """Losing a PC causes one placement, not one per device."""
    fake = kit.FakeFleet("a", "b", "c", "d", min_peers=4)
    for name in "abcd":
        fake.report(name)
    fake.serve()
    settle(fake, "abcd")
    beside = msgspec.structs.replace(fake.fleet.registry.sessions["d"].report, primary_peer="c")
    fake.handle_event(PeerReportedEvent("d", beside))
    assert len(fake.reconciler.formation.peers) == 4
    assert fake.fleet.registry.primary_peer("d") == "c"
    # One device's last report came half a second after the other's.
    fake.wait(0.5, *"abd")
    fake.pop_messages()
    epoch = fake.reconciler.epoch
    fake.wait(4.0, *"ab")
    told = fake.pop_messages()
    assert not fake.fleet.registry.is_live("d")
    assert {m.epoch for _, m in told if isinstance(m, Assign)} == {epoch + 1}
    assert set(fake.reconciler.formation.peers) == {"a", "b"}
    # A device that still reports is not lost with the other one, whose daemon alone has ended.
    fake.report("c", fresh=True)
    fake.report("d", fresh=True, pc="c")
    fake.wait(4.0, *"abd")
    assert fake.fleet.registry.is_live("d")
    assert not fake.fleet.registry.is_live("c")


def test_rebalance_places_all_models(kit: Kit) -> None:
    """The serving ring is only slightly worse than another one; a user may want the other."""
    fake = start(kit, "ab", wish("x"))
    (at,) = peers_of(fake, "x")
    other = "b" if at == "a" else "a"
    report = fake.fleet.registry.sessions[other].report
    device = msgspec.structs.replace(report.device, name="a faster one", read_rate=10.5e9)
    fake.handle_event(PeerReportedEvent(other, msgspec.structs.replace(report, device=device)))
    fake.wait(70.0, *"ab")
    assert peers_of(fake, "x") == at
    fake.handle_event(RebalanceRequestedEvent())
    assert fake.deployment("x").is_ready  # and serves until the new ring is up
    fake.prefetched(other, 1)
    settle(fake, "ab", 5.0)
    assert fake.deployment("x").is_ready
    assert peers_of(fake, "x") == other


def test_surplus_replica_waits_for_peers(kit: Kit) -> None:
    fake = start(kit, "a", wish("x", replicas=2))
    assert fake.deployment("x").is_ready
    assert fake.deployment("x", 1).formation is None
    assert "x #2:" in fake.fleet.reason
    fake.join("b")
    settle(fake, "ab")
    assert peers_of(fake, "x", 1) == "b"


OTHER_FILES = msgspec.structs.replace(FACTS, name="x", root="0f" * 32 + ":9")


def test_changes_roll_out_one_replica_at_a_time(kit: Kit) -> None:
    fake = start(kit, "ab", wish("x", replicas=2))
    one, two = fake.fleet.deployments
    fake.serve_all(DesiredModel(OTHER_FILES, "a", replicas=2))
    for _ in range(8):
        assert one.is_ready or two.is_ready
        settle(fake, "ab", 0.5)
    assert one.is_ready
    assert two.is_ready
    assert {each.desired.facts.root for each in (one, two)} == {OTHER_FILES.root}


def test_failing_rollout_breaks_only_one_replica(kit: Kit) -> None:
    """Crash loop: retried with growing pauses while the other replica keeps serving."""
    fake = start(kit, "ab", wish("x", replicas=2))
    one, two = fake.fleet.deployments
    kept = two.formation.record
    (at,) = peers_of(fake, "x")
    fake.serve_all(DesiredModel(OTHER_FILES, "a", replicas=2))
    tries = []
    for _ in range(4 * 60):
        fake.wait(0.25, "a", "b")
        for peer, message in fake.pop_messages():
            if isinstance(message, Assign):
                assert (peer, message.root) == (at, OTHER_FILES.root)
                tries.append(fake.now)
                fake.failed(peer, message.stage, message.epoch, message.pipeline)
    assert two.formation.record == kept
    assert two.is_ready
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses == sorted(pauses)
    assert len(tries) < 10
    assert not one.is_ready
    # The desired state is the old one again.
    fake.serve_all(wish("x", replicas=2))
    settle(fake, "ab", 70)
    assert one.is_ready
    assert two.formation.record == kept


def test_pinned_layers_are_placed_as_named(kit: Kit) -> None:
    fake = start(kit, "abc", wish("x", pins=(("b", "5-6"), ("c", "1-4"))), wish("y"))
    record = fake.deployment("x").formation.record
    assert [(stage.peer, stage.layers) for stage in record.stages] == [("c", (0, 4)), ("b", (4, 6))]
    assert peers_of(fake, "y") == "a"
    fake.serve_all(wish("x", pins=(("b", "3-6"), ("c", "1-2"))), wish("y"))
    settle(fake, "abc")
    record = fake.deployment("x").formation.record
    assert [(stage.peer, stage.layers) for stage in record.stages] == [("c", (0, 2)), ("b", (2, 6))]


def test_a_restarted_coordinator_adopts_all_pipelines(both: FakeFleet, kit: Kit) -> None:
    records = [one.formation.record for one in both.fleet.deployments]
    again = kit.FakeFleet(*"abc", now=both.now)
    again.fleet = Fleet(
        "s1", again.members, again.now, models=both.fleet.models, pipelines=records, last=(2, 2)
    )
    reports = {name: both.fleet.registry.sessions[name].report for name in "abc"}
    for name, report in reports.items():
        again.handle_event(PeerReportedEvent(name, report, is_new_connection=True))
    again.wait(3, *"abc")
    assert [one.formation.record for one in again.fleet.deployments] == records
    assert all(one.is_ready for one in again.fleet.deployments)
    assert not [
        m for _, m in again.pop_messages() if isinstance(m, Assign | FormPipeline | Unassign)
    ]


def test_higher_term_applies_to_all_deployments(both: FakeFleet) -> None:
    term = next_term(0, "a")
    before = [one.formation.record for one in both.fleet.deployments]
    both.handle_event(TermRaisedEvent(term))
    settle(both, "abc")
    assert [one.formation.record for one in both.fleet.deployments] == before
    both.handle_event(MemberRemovedEvent(peers_of(both, "x")[0], "left"))
    settle(both, "".join(both.fleet.registry.sessions))
    assert both.deployment("x").epoch >> 16 == term


def test_peer_without_memory_is_not_allocated(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b", "c")
    fake.report("a", memory=GB // 2)
    for name in "bc":
        fake.report(name)
    fake.serve_all(wish("x"), wish("y"))
    settle(fake, "abc")
    assert {peers_of(fake, "x"), peers_of(fake, "y")} == {"b", "c"}


def test_each_deployment_commits_one_pipeline(both: FakeFleet) -> None:
    newest: dict[tuple[str, int], PipelineRecord] = {
        (one.model, one.replica): one for one in both.committed
    }
    assert [newest[one.key] for one in both.fleet.deployments] == [
        one.formation.record for one in both.fleet.deployments
    ]


def test_end_of_a_pipeline_is_resent(both: FakeFleet) -> None:
    """The peer had no session when the pipeline ended, or followed another coordinator."""
    own = {one.pipeline for one in both.fleet.deployments}
    routes = tuple((pipeline, 1, True) for pipeline in ("p0", *sorted(own)))
    both.pop_messages()
    told: list[Any] = []
    for _ in range(4):
        both.report("c", routes=routes)
        told += both.pop_messages()
    assert [m for p, m in told if isinstance(m, RouteRemoved)] == [RouteRemoved(pipeline="p0")]
    assert {p for p, m in told if isinstance(m, RouteRemoved)} == {"c"}


def test_adopting_coordinator_ends_no_routes(kit: Kit) -> None:
    fake = start(kit, "ab", wish("x", min_stages=2))
    record = fake.deployment("x").formation.record
    again = kit.FakeFleet(
        "a", "b", "c", desired=wish("x", min_stages=2), pipeline=record, last=(record.epoch, 1)
    )
    assert again.deployment("x").is_adopting
    for _ in range(8):
        again.report("c", routes=(("p0", 1, True),))
    assert again.deployment("x").is_adopting
    assert not [m for _, m in again.pop_messages() if isinstance(m, RouteRemoved)]
