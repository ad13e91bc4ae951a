import msgspec
import pytest

from molink.errors import InvariantError
from molink.swarm.controller.events import (
    MemberRemovedEvent,
    PeerReportedEvent,
    TermRaisedEvent,
    TimePassedEvent,
)
from molink.swarm.controller.records import PipelineRecord
from molink.swarm.controller.registry import (
    MAX_ROUTE_MISMATCHES,
    PEER_TIMEOUT,
)
from molink.swarm.election.terms import next_term, term_of
from molink.util.timeouts import TIMEOUTS
from molink.wire.messages.instructions import (
    FormPipeline,
    Route,
    Unassign,
)
from tests.support.fake_fleet import FakeFleet, Kit, by_peer
from tests.support.pipeline_messages import (
    address,
    form_successor,
    join_and_prefetch,
    restarted,
    route,
)


def test_a_restarted_coordinator_adopts_the_running_pipeline(running: FakeFleet, kit: Kit) -> None:
    again = restarted(running, kit)
    layers = [(0, 2), (2, 4), (4, 6)]
    for stage, name in enumerate("abc"):
        assert again.pop_messages() == []
        again.report(name, kit.worker("ready", 1, stage, layers[stage]))
    assert by_peer(again.pop_messages()) == by_peer([(p, route(1, address("a"))) for p in "abc"])
    again.wait(5, *"abc")
    assert again.pop_messages() == []
    assert again.committed == []


def test_new_leader_places_once_all_others_are_here(running: FakeFleet, kit: Kit) -> None:
    record = running.committed[-1]
    desired = running.reconciler.desired
    again = kit.FakeFleet(
        *"abc", desired=desired, pipeline=record, last=(1, record.epoch), lost_peer="a"
    )
    again.report("b", kit.worker("ready", 1, 1, (2, 4)))
    assert again.committed == []
    again.report("c", kit.worker("ready", 1, 2, (4, 6)))
    again.wait(0.5, *"bc")
    assert [stage.peer for stage in again.committed[-1].stages] == ["b", "c"]


def test_quiet_peer_is_lost_sooner_than_one_with_gaps(running: FakeFleet) -> None:
    for _ in range(10):
        running.wait(0.75, *"ab")
        running.wait(0.25, *"abc")
    running.wait(TIMEOUTS.shortest + 0.25, "a")
    assert set(running.fleet.registry.sessions) == {"a", "c"}
    running.wait(PEER_TIMEOUT - TIMEOUTS.shortest, "a")
    assert set(running.fleet.registry.sessions) == {"a"}


def test_peer_with_a_new_connection_has_the_full_time(running: FakeFleet, kit: Kit) -> None:
    running.wait(10.0, *"abc")
    running.report("c", kit.worker("ready", 1, 2, (4, 6)), fresh=True)
    running.wait(PEER_TIMEOUT - 0.25, *"ab")
    assert "c" in running.fleet.registry.sessions
    running.wait(0.5, *"ab")
    assert "c" not in running.fleet.registry.sessions


def test_restart_before_the_ring_formed(running: FakeFleet, kit: Kit) -> None:
    """A committed epoch may have been announced to none or only some of its peers."""
    again = restarted(running, kit)
    again.report("a", kit.worker("ready", 1, 0, (0, 2)))
    again.report("b", kit.worker("loaded", 1, 1, (2, 4)))
    again.report("c", kit.worker("loaded", 1, 2, (4, 6)))
    told = [
        (peer, message)
        for peer, message in again.pop_messages()
        if isinstance(message, FormPipeline)
    ]
    ring = tuple(address(name) for name in "abc")
    form = FormPipeline(pipeline="p1", epoch=1, ring=ring, blocks=80, micro_batches=0)
    assert told == [("b", form), ("c", form)]
    again.ready("b", 1, epoch=1)
    again.ready("c", 2, epoch=1)
    assert again.reconciler.is_ready


def test_restart_keeps_planning_for_a_new_peer(running: FakeFleet, kit: Kit) -> None:
    join_and_prefetch(running)
    again = restarted(running, kit)
    again.join("d")
    for stage, name in enumerate("abc"):
        again.report(name, kit.worker("ready", 1, stage, (2 * stage, 2 * stage + 2)))
    again.wait(1.25, *"abcd")
    again.obey()
    assert again.reconciler.formation.peers == ("a", "b", "c", "d")


def test_restart_drops_the_successor(running: FakeFleet, kit: Kit) -> None:
    form_successor(running)
    again = kit.FakeFleet(
        *"abcd", desired=running.reconciler.desired, pipeline=running.committed[-1], last=(2, 2)
    )
    for stage, name in enumerate("abc"):
        layers = (2 * stage, 2 * stage + 2)
        again.report(
            name,
            kit.worker("ready", 1, stage, layers),
            kit.worker("loading", 2, stage, layers, "p2"),
        )
    again.report("d", kit.worker("loading", 2, 3, (5, 6), "p2"))
    assert [p for p, m in again.pop_messages() if m == Unassign(pipeline="p2")] == list("abcd")
    assert again.reconciler.is_ready
    again.wait(1.25, *"abcd")
    again.obey()
    assert again.reconciler.formation.record.epoch == 3
    assert again.reconciler.pipeline == "p3"


def test_adoption_needs_all_reports(running: FakeFleet, kit: Kit) -> None:
    again = restarted(running, kit)
    for stage, name in enumerate("abc"):
        again.ready(name, stage, epoch=1)
    assert again.reconciler.formation.state == "adopting"


def test_a_changed_stage_is_not_adopted(running: FakeFleet, kit: Kit) -> None:
    again = restarted(running, kit)
    again.report("a", kit.worker("ready", 1, 0, (0, 2)))
    again.report("b", kit.worker("ready", 1, 1, (2, 5)))
    assert by_peer(again.pop_messages()) == by_peer([(p, route(1)) for p in "ab"])
    again.report("c", kit.worker("ready", 1, 2, (4, 6)))
    again.wait(1.5, *"abc")
    assert again.committed[-1].epoch == 2


def test_adoption_times_out(running: FakeFleet, kit: Kit) -> None:
    again = restarted(running, kit)
    again.report("a", kit.worker("ready", 1, 0, (0, 2)))
    again.report("b", kit.worker("ready", 1, 1, (2, 4)))
    again.wait(7.75, *"ab")
    assert again.pop_messages() == []
    again.wait(1, *"ab")
    assert again.committed[-1].epoch == 2
    assert again.reconciler.formation.peers == ("a", "b")


def test_restore_waits_for_min_peers_up_to_a_limit(running: FakeFleet, kit: Kit) -> None:
    again = restarted(running, kit)
    again.report("a")
    again.report("b")
    again.wait(29, *"ab")
    assert again.reconciler.reason == "waiting for peers: 2 of 3 with a stage are connected"
    again.wait(2, *"ab")
    assert again.committed[-1].epoch == 2


def test_restore_waits_only_for_members(running: FakeFleet, kit: Kit) -> None:
    again = restarted(running, kit)
    again.handle_event(MemberRemovedEvent("c", "left"))
    again.report("a")
    again.report("b")
    again.wait(1.5, *"ab")
    assert again.committed[-1].epoch == 2


def test_an_unformed_epoch_is_not_adopted(running: FakeFleet, kit: Kit) -> None:
    record = PipelineRecord("p1", "toy", 4, running.committed[-1].stages)
    again = kit.FakeFleet(*"abc", desired=running.reconciler.desired, pipeline=record, last=(1, 4))
    for stage, name in enumerate("abc"):
        again.report(name, kit.worker("ready", 4, stage, record.stages[stage].layers))
    again.wait(1.5, *"abc")
    assert again.committed[-1].epoch == 5


def test_invariant_errors_carry_the_story(running: FakeFleet) -> None:
    running.fleet.registry.sessions["z"] = running.fleet.registry.sessions["a"]
    with pytest.raises(InvariantError) as caught:
        running.handle_event(TimePassedEvent())
    assert any("is ready" in line for line in caught.value.story)


def test_formation_restarts_in_a_higher_term(kit: Kit) -> None:
    """Peers in the other part of the swarm may know newer epochs."""
    fake = kit.FakeFleet("a", "b")
    for name in "ab":
        fake.report(name, fresh=True)
    fake.serve()
    fake.wait(2, *"ab")
    assert fake.reconciler.formation.state == "loading"
    term = next_term(0, "a")
    fake.handle_event(TermRaisedEvent(term))
    fake.wait(2, *"ab")
    assert term_of(fake.reconciler.formation.record.epoch) == term


def test_serving_pipeline_survives_a_higher_term(running: FakeFleet) -> None:
    running.handle_event(TermRaisedEvent(next_term(0, "a")))
    running.wait(3, *"abc")
    assert running.reconciler.formation.record.epoch == 1


def test_lost_route_is_resent(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    fake.serve()
    for name in "ab":
        fake.report(name)
    fake.wait(2, *"ab")
    fake.obey()
    fake.pop_messages()
    last = fake.fleet.registry.sessions["b"].report
    known = msgspec.structs.replace(last, routes=(("p1", 1, True),))
    earlier = msgspec.structs.replace(last, routes=(("p1", 1, False),))
    for report in (
        *[earlier] * (MAX_ROUTE_MISMATCHES - 1),
        known,
        *[earlier] * (MAX_ROUTE_MISMATCHES - 1),
    ):
        fake.handle_event(PeerReportedEvent("b", report))
        assert fake.pop_messages() == []
    fake.handle_event(PeerReportedEvent("b", earlier))
    ((peer, route),) = fake.pop_messages(with_reasons=True)
    assert (peer, type(route), route.is_ready, route.epoch) == ("b", Route, True, 1)
