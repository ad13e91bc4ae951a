import pytest

from molink.swarm.controller.events import (
    DesiredStateChangedEvent,
    PeerStoppedEvent,
)
from molink.wire.messages.instructions import (
    Assign,
    FormPipeline,
    Prefetch,
    Route,
    RouteRemoved,
    Unassign,
)
from tests.support.fake_fleet import FakeFleet, Kit, by_peer
from tests.support.pipeline_messages import form_successor, route


def test_another_model_ends_all_pipelines(running: FakeFleet) -> None:
    running.obey(form_successor(running))
    running.serve(dtype="f32")
    ended = [
        m.pipeline for p, m in running.pop_messages() if p == "a" and isinstance(m, RouteRemoved)
    ]
    assert ended == ["p1", "p2"]
    assert running.reconciler.predecessor is None
    assert running.reconciler.pipeline == "p3"


def test_no_model_releases_all_memory(running: FakeFleet, kit: Kit) -> None:
    running.obey(form_successor(running))
    running.handle_event(DesiredStateChangedEvent(()))
    sent = running.pop_messages()
    ended = {(p, m.pipeline) for p, m in sent if isinstance(m, Unassign)}
    assert {("a", "p1"), ("d", "p2")} <= ended
    assert {m.pipeline for p, m in sent if p == "a" and isinstance(m, RouteRemoved)} == {"p1", "p2"}
    running.fleet.validate()
    # A worker that was starting is stopped too.
    running.report("a", kit.worker("ready", 1, 0, (0, 6), pipeline="p2"))
    assert ("a", Unassign(pipeline="p2")) in running.pop_messages()
    running.handle_event(PeerStoppedEvent("b"))
    running.wait(20, *"acd")
    assert not [
        m
        for _, m in running.pop_messages()
        if isinstance(m, (Assign, FormPipeline, Route, Prefetch))
    ]
    assert "`molink run MODEL`" in running.fleet.reason
    running.serve()
    running.wait(1, *"acd")
    running.obey()
    assert running.reconciler.is_ready


def test_unchanged_desired_state_changes_nothing(running: FakeFleet) -> None:
    running.serve(min_peers=1, source="b")
    running.wait(2, *"abc")
    assert running.pop_messages() == []


@pytest.mark.parametrize(
    "change", [{"dtype": "f32"}, {"quantize": "int8"}, {"kv_cache_dtype": "int8"}]
)
def test_another_model_gets_another_pipeline(running: FakeFleet, change: dict[str, str]) -> None:
    running.serve(**change)
    sent = running.pop_messages()
    assert by_peer(sent) == by_peer(
        [
            *[(p, Unassign(pipeline="p1")) for p in "abc"],
            *[(p, RouteRemoved(pipeline="p1")) for p in "abc"],
            *[(p, route(1, pipeline="p2")) for p in "abc"],
        ]
    )
    for name in "abc":
        running.report(name)
    running.wait(0.5, *"abc")
    assert running.committed[-1].id == "p2"
    assert running.committed[-1].epoch == 2
    orders = [m for _, m in running.pop_messages() if isinstance(m, Assign)]
    assert {(m.quantize, m.kv_cache_dtype) for m in orders} == {
        (change.get("quantize", "none"), change.get("kv_cache_dtype", "auto"))
    }


def test_micro_batches_change_starts_an_epoch(running: FakeFleet) -> None:
    running.serve(micro_batches=5)
    running.wait(0.5, *"abc")
    running.obey()
    assert running.committed[-1].epoch == 2
    assert running.committed[-1].micro_batches == 5
    assert running.committed[-1].id == "p1"
