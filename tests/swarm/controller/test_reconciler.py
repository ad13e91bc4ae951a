from typing import Any

import msgspec
import pytest

from molink.facts.profile import Profile
from molink.swarm.artifacts.transfer import stage_bytes
from molink.swarm.controller.events import (
    AnnouncePeerAction,
    PeerReportedEvent,
)
from molink.swarm.controller.formation import LOAD_RATE, LOAD_TIMEOUT
from molink.swarm.controller.records import PipelineRecord, StageRecord
from molink.wire.messages.instructions import (
    Assign,
    FormPipeline,
    PeerInfo,
    Route,
    StageProfile,
    Unassign,
    Welcome,
)
from tests.support.fake_fleet import FakeFleet, Kit, by_peer
from tests.support.pipeline_messages import address, assign, join_and_prefetch, route

QUICK = Profile(decode=((1, 0.01),))


def test_a_pipeline_forms_step_by_step(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b", "c", min_peers=2)
    fake.serve()
    assert fake.pop_messages() == []
    fake.report("a")
    fake.wait(2, "a")
    assert fake.pop_messages() == [("a", route(0))]
    assert fake.reconciler.reason == "waiting for peers: 1 of 2 with a stage are connected"

    fake.report("b")
    fake.report("c", stage="none")
    fake.wait(0.75, *"abc")
    assert by_peer(fake.pop_messages()) == by_peer([("b", route(0)), ("c", route(0))])
    fake.wait(0.5, *"abc")
    first, second = assign(1, 0, 2, (0, 3)), assign(1, 1, 2, (3, 6))
    assert by_peer(fake.pop_messages()) == by_peer(
        [("a", first), ("b", second)] + [(p, route(1)) for p in "abc"]
    )
    assert fake.committed == [
        PipelineRecord("p1", "toy", 1, (StageRecord("a", (0, 3)), StageRecord("b", (3, 6))))
    ]

    fake.loaded(first, "a", port=5470)
    assert fake.pop_messages() == []
    fake.loaded(second, "b", port=5471)
    form = FormPipeline(
        pipeline="p1",
        epoch=1,
        ring=(address("a", 5470), address("b", 5471)),
        blocks=80,
        micro_batches=0,
    )
    assert by_peer(fake.pop_messages()) == by_peer([("a", form), ("b", form)])
    assert fake.committed[-1] == PipelineRecord(
        "p1",
        "toy",
        1,
        (StageRecord("a", (0, 3), 5470, 100, QUICK), StageRecord("b", (3, 6), 5471, 80, QUICK)),
        True,
        80,
        0,
    )

    fake.ready("b", 1, epoch=1)
    assert fake.pop_messages() == []
    fake.ready("a", 0, epoch=1)
    assert by_peer(fake.pop_messages()) == by_peer(
        [(p, route(1, address("a", 5470))) for p in "abc"]
    )
    assert fake.reconciler.reason == ""


@pytest.mark.parametrize(
    ("facts", "dtype", "chosen"),
    [
        ({"element_bytes": 2}, "auto", 256),
        ({"element_bytes": 4}, "auto", 16),
        ({"element_bytes": 4}, "bf16", 256),
        ({"element_bytes": 2}, "f32", 16),
        ({"element_bytes": 2, "score_heads": 8}, "auto", 16),
    ],
)
def test_kv_block_size_is_the_largest_requested(
    kit: Kit, facts: dict[str, int], dtype: str, chosen: int
) -> None:
    fake = kit.FakeFleet("a", "b", min_peers=2)
    fake.serve(facts=msgspec.structs.replace(kit.facts, **facts), dtype=dtype)
    fake.report("a", block_size=256)
    fake.report("b")
    fake.wait(3, "a", "b")
    orders = [message for _, message in fake.pop_messages() if isinstance(message, Assign)]
    assert [order.block_size for order in orders] == [chosen, chosen]
    for order, peer in zip(orders, "ab", strict=True):
        fake.loaded(order, peer, blocks=3)
    for stage, peer in enumerate("ab"):
        fake.ready(peer, stage, epoch=1)
    told = [message for _, message in fake.pop_messages() if isinstance(message, Route)]
    assert told[-1].max_model_len == min(kit.facts.max_model_len, 3 * chosen)


def test_profiles_are_sent_before_the_ring_forms(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    fake.serve()
    fake.report("a")
    fake.report("b")
    fake.wait(2, "a", "b")
    first, second = assign(1, 0, 2, (0, 3)), assign(1, 1, 2, (3, 6))
    fake.pop_messages()
    profiles = [Profile(decode=((1, s),), prefill=((16, 2 * s),)) for s in (0.01, 0.02)]
    fake.loaded(first, "a", profile=profiles[0])
    fake.loaded(second, "b", profile=profiles[1])
    told = [
        StageProfile(pipeline="p1", epoch=1, stage=stage, profile=profile)
        for stage, profile in enumerate(profiles)
    ]
    sent = by_peer(fake.pop_messages())
    assert sent.keys() == {"a", "b"}
    for *profiles_sent, last in sent.values():
        assert profiles_sent == told
        assert isinstance(last, FormPipeline)
    assert [stage.profile for stage in fake.committed[-1].stages] == profiles
    # A connection was lost: the peer is told again.
    for peer in ("a", "b"):
        fake.report(peer, fresh=True)
        assert fake.pop_messages()[:2] == [(peer, profile) for profile in told]


def test_route_carries_the_reason_for_waiting(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b", min_peers=2)
    fake.serve()
    fake.report("a")
    fake.wait(2, "a")
    first, second = (m for _, m in fake.pop_messages(with_reasons=True) if isinstance(m, Route))
    assert (first.reason, second.reason) == (
        "",
        "waiting for peers: 1 of 2 with a stage are connected",
    )
    fake.report("b", stage="1-4")
    fake.report("a", stage="4-6")
    fake.wait(2, *"ab")
    told = {p: m for p, m in fake.pop_messages(with_reasons=True) if isinstance(m, Route)}
    assert "overlap" in told["a"].reason
    assert told["a"] == told["b"]
    fake.wait(5, *"ab")
    assert fake.pop_messages(with_reasons=True) == []
    fake.report("b", stage="1-3")
    fake.wait(2, *"ab")
    routes = [
        m for p, m in fake.pop_messages(with_reasons=True) if isinstance(m, Route) and p == "a"
    ]
    assert routes[-1].reason == ""  # being formed


def test_model_root_is_sent_with_assignments_and_routes(running: FakeFleet, kit: Kit) -> None:
    running.serve(facts=msgspec.structs.replace(kit.facts, root="0f" * 32 + ":9"))
    running.wait(1.25, *"abc")
    sent = running.obey()
    told = {type(message): message.root for _, message in sent if hasattr(message, "root")}
    assert told == {Assign: "0f" * 32 + ":9", Route: "0f" * 32 + ":9"}
    # The same model with other files is reloaded.
    running.serve(facts=msgspec.structs.replace(kit.facts, root="1f" * 32 + ":9"))
    running.wait(1.25, *"abc")
    assert any(isinstance(m, Assign) and m.pipeline == "p3" for _, m in running.obey())
    assert [wish.root for _, wish in join_and_prefetch(running)] == ["1f" * 32 + ":9"]


def test_epoch_is_committed_before_it_is_announced(kit: Kit) -> None:
    fake = kit.FakeFleet("a")
    fake.serve()
    fake.report("a")
    fake.wait(0.75, "a")
    fake.pop_messages()
    fake.wait(0.25, "a")
    kinds = [type(getattr(d, "message", d)).__name__ for d in fake.decisions]
    assert kinds[0] == "CommitPipelineAction"
    assert sorted(kinds[1:]) == ["Assign", "Route"]


def test_peers_learn_about_each_other(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    fake.report("a")
    assert by_peer(fake.pop_messages(about_members=True)) == by_peer(
        [
            ("a", Welcome(swarm="s1", peer="a")),
            (
                "a",
                PeerInfo(peer="b", name="B", public_key="b" * 40, addresses=(), control_port=0),
            ),
        ]
    )
    fake.report("b")
    of_a, of_b = (
        PeerInfo(
            peer=name,
            name=name.upper(),
            public_key=name * 40,
            addresses=(f"10.0.0.{ord(name)}",),
            control_port=5467,
            models=("toy",) if name == "a" else (),
        )
        for name in "ab"
    )
    assert AnnouncePeerAction(of_b) in fake.decisions
    assert by_peer(fake.pop_messages(about_members=True)) == by_peer(
        [
            ("b", Welcome(swarm="s1", peer="b")),
            ("a", of_b),
            ("b", of_a),
        ]
    )
    fake.report("a")
    assert fake.pop_messages(about_members=True) == []


def test_reconnected_peer_is_told_everything(running: FakeFleet) -> None:
    running.handle_event(
        PeerReportedEvent("c", running.fleet.registry.sessions["c"].report, is_new_connection=True)
    )
    sent = running.pop_messages(about_members=True)
    assert [peer for peer, _ in sent] == ["c"] * 4
    assert sent[0][1] == Welcome(swarm="s1", peer="c")
    messages = [message for _, message in sent]
    assert {message.peer for message in messages if isinstance(message, PeerInfo)} == {"a", "b"}
    assert route(1, address("a")) in messages
    assert running.reconciler.is_ready


def test_formation_finishes_before_it_is_improved(running: FakeFleet) -> None:
    running.wait(3.25, *"ab")
    running.wait(0.5, *"ab")
    assert running.reconciler.formation.record.epoch == 2
    orders = [(p, m) for p, m in running.pop_messages() if isinstance(m, Assign)]
    running.report("c", fresh=True)
    running.join("d")
    running.wait(15, *"abcd")
    assert running.reconciler.formation.record.epoch == 2
    running.obey(orders)
    assert running.reconciler.formation.record.epoch == 2
    assert running.reconciler.is_ready
    running.wait(1.25, *"abcd")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c", "d")


@pytest.mark.parametrize("change", [{"stage": "none"}, {"memory": 10**9}])
def test_impossible_formation_restarts(running: FakeFleet, change: dict[str, Any]) -> None:
    running.failed("b", 1, epoch=1)
    running.wait(0.5, *"abc")
    running.report("a", **change)
    running.wait(1.25, *"abc")
    assert running.reconciler.formation.record.epoch == 3


def test_progress_of_a_formation_is_published(running: FakeFleet) -> None:
    running.failed("b", 1, epoch=1)
    progress = [m.forming_progress for p, m in running.pop_messages(with_reasons=True) if p == "b"]
    assert progress == [0]
    running.wait(11, *"abc")
    batch = [(p, m) for p, m in running.pop_messages(with_reasons=True) if p == "b"]
    progress += [m.forming_progress for _, m in batch if isinstance(m, Route)]
    running.obey([each for each in batch if isinstance(each[1], Assign)])
    assert len(set(progress)) == len(progress) == 4  # at the start, after 5 and after 10 s
    running.wait(601, *"abc")
    routes = [
        m for p, m in running.pop_messages(with_reasons=True) if p == "a" and isinstance(m, Route)
    ]
    assert len(routes) > 20


def test_joins_close_together_form_once(kit: Kit) -> None:
    fake = kit.FakeFleet("a")
    fake.serve()
    fake.report("a")
    fake.wait(0.75, "a")
    fake.join("b")
    fake.wait(0.75, *"ab")
    fake.join("c")
    fake.wait(1.25, *"abc")
    assert len(fake.committed) == 1
    assert len(fake.committed[0].stages) == 3


def test_debounce_is_bounded(kit: Kit) -> None:
    fake = kit.FakeFleet("a")
    fake.serve()
    fake.report("a")
    for name in "bcdefghijk":
        fake.wait(0.75, *fake.fleet.registry.sessions)
        fake.join(name)
    assert fake.committed


def test_messages_of_other_epochs_peers_and_pipelines_are_ignored(running: FakeFleet) -> None:
    running.failed("b", 1, epoch=0)
    running.failed("b", 1, epoch=2)
    running.failed("b", 0, epoch=1)
    running.failed("b", 9, epoch=1)
    running.failed("b", 1, epoch=1, pipeline="p2")
    running.failed("z", 1, epoch=1)
    running.ready("b", 1, epoch=1)
    running.loaded(assign(1, 1, 3, (2, 4)), "b")
    assert running.pop_messages() == []
    assert running.reconciler.is_ready


def test_formation_without_progress_fails(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    fake.serve()
    for name in "ab":
        fake.report(name)
    fake.wait(1.25, *"ab")
    first, second = (m for _, m in fake.pop_messages() if isinstance(m, Assign))
    fake.loaded(first, "a")
    for step in range(1, 11):
        fake.report("b", kit.worker("fetching", 1, 1, second.layers, done=step * 10**7))
        fake.wait(29, *"ab")
    assert fake.reconciler.formation.record.epoch == 1  # bytes are progress
    fake.report("b", kit.worker("loading", 1, 1, second.layers))
    seconds = LOAD_TIMEOUT + stage_bytes(kit.facts, second.layers) / LOAD_RATE
    fake.wait(seconds // 1, *"ab")
    assert fake.reconciler.formation.record.epoch == 1
    fake.report(
        "b", kit.worker("fetching", 1, 1, second.layers, done=2 * 10**8)
    )  # states never go back
    fake.wait(2, *"ab")
    assert fake.reconciler.formation.record.epoch == 2
    assert "B made too little progress loading its stage" in " ".join(fake.fleet.story)


def test_linking_times_out(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    fake.serve()
    for name in "ab":
        fake.report(name)
    fake.wait(1.25, *"ab")
    for peer, message in fake.pop_messages():
        if isinstance(message, Assign):
            fake.loaded(message, peer)
    fake.ready("a", 0, epoch=1)
    fake.wait(61, *"ab")
    assert "B did not join the ring" in " ".join(fake.fleet.story)
    assert fake.reconciler.formation.record.epoch == 2


def test_lost_instructions_are_resent(kit: Kit) -> None:
    fake = kit.FakeFleet("a")
    fake.serve()
    fake.report("a")
    fake.wait(1.25, "a")
    (message,) = (m for _, m in fake.pop_messages() if isinstance(m, Assign))
    # Its reports don't show the assignment.
    fake.wait(3.5, "a")
    assert ("a", message) in fake.pop_messages()
    fake.report("a", fresh=True)
    assert ("a", message) in fake.pop_messages()
    fake.loaded(message, "a")
    form = fake.pop_messages()
    fake.report("a", fresh=True)
    assert form[0] in fake.pop_messages()
    # A report replaces a lost StageReady.
    fake.report("a", kit.worker("ready", 1, 0, (0, 6)))
    assert fake.reconciler.is_ready


def test_a_peer_without_room_for_kv_is_named(kit: Kit) -> None:
    fake = kit.FakeFleet("a")
    fake.serve()
    fake.report("a")
    fake.wait(1.25, "a")
    (message,) = (m for _, m in fake.pop_messages() if isinstance(m, Assign))
    fake.loaded(message, "a", blocks=0)
    assert fake.reconciler.reason == "A has no memory left for KV"


@pytest.mark.parametrize("how", ["failed", "gone", "restarted"])
def test_reports_replace_lost_messages(running: FakeFleet, kit: Kit, how: str) -> None:
    if how == "failed":
        running.report("b", kit.worker("failed", 1, 1, (2, 4)))
    elif how == "gone":
        running.report("b")
        assert running.reconciler.is_ready  # the report may be older than readiness
        running.wait(3.25, *"abc")
    else:
        running.report("b", kit.worker("ready", 1, 1, (2, 4)), pid=2)
    assert running.pop_messages()[0] == ("a", route(1))


def test_unknown_workers_are_stopped(running: FakeFleet, kit: Kit) -> None:
    running.report("b", kit.worker("ready", 1, 1, (2, 4)), kit.worker("ready", 7, 0, (0, 2), "p9"))
    assert running.pop_messages() == [("b", Unassign(pipeline="p9"))]
    running.join("d", stage="none")
    running.pop_messages()
    running.report("d", kit.worker("ready", 1, 1, (2, 4)), stage="none")
    assert running.pop_messages() == [("d", Unassign(pipeline="p1"))]


def test_dropped_peer_is_unassigned(running: FakeFleet) -> None:
    running.report("b", *running.fleet.registry.sessions["b"].report.workers, stage="none")
    running.wait(1.25, *"abc")
    running.obey()
    running.wait(1.25, *"abc")
    assert ("b", Unassign(pipeline="p1")) in running.pop_messages()
    assert running.reconciler.formation.peers == ("a", "c")
