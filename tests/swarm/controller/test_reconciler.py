from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from molink.errors import InvariantError
from molink.facts.device import Device
from molink.facts.model import BlockWeights
from molink.facts.profile import Profile
from molink.swarm.artifacts.transfer import MIN_RATE, STALL_TIMEOUT, stage_bytes
from molink.swarm.controller.backoff import MAX_DELAY
from molink.swarm.controller.events import (
    AnnouncePeerAction,
    ConnectionTriedEvent,
    DesiredStateChangedEvent,
    MemberRemovedEvent,
    PeerDisconnectedEvent,
    PeerReportedEvent,
    PeerStoppedEvent,
    ReserveEpochAction,
    TermRaisedEvent,
    TimePassedEvent,
)
from molink.swarm.controller.formation import LOAD_RATE, LOAD_TIMEOUT
from molink.swarm.controller.planner import (
    REVIEW_INTERVAL,
    candidate_from_report,
    candidates_differ,
    find_askers,
)
from molink.swarm.controller.records import PipelineRecord, StageRecord
from molink.swarm.controller.registry import (
    MAX_READ_LAG,
    MAX_ROUTE_MISMATCHES,
    PEER_TIMEOUT,
    Registry,
)
from molink.swarm.election.terms import next_term, term_of
from molink.swarm.placement.read_rates import SLOWDOWN_HOLD, SLOWDOWN_TTL
from molink.util.timeouts import TIMEOUTS
from molink.wire.messages.instructions import (
    Assign,
    FormPipeline,
    Notice,
    PeerInfo,
    PeerRemoved,
    Prefetch,
    Route,
    RouteRemoved,
    StageAddress,
    StageProfile,
    Unassign,
    Welcome,
)
from tests.support import fake_fleet
from tests.support.fake_fleet import FACTS, GB, FakeFleet, Kit, by_peer, member

QUICK = Profile(decode=((1, 0.01),))


def assign(
    epoch: int, stage: int, stages: int, layers: tuple[int, int], pipeline: str = "p1"
) -> Assign:
    return Assign(
        pipeline=pipeline,
        epoch=epoch,
        stage=stage,
        stages=stages,
        layers=layers,
        model="toy",
        sources=("a",),
        dtype="auto",
        max_model_len=4096,
    )


def prefetch(number: int, layers: tuple[int, int]) -> Prefetch:
    return Prefetch(number=number, layers=layers, model="toy", sources=("a",))


def route(epoch: int, head: StageAddress | None = None, pipeline: str = "p1") -> Route:
    return Route(
        pipeline=pipeline,
        epoch=epoch,
        model="toy",
        is_ready=head is not None,
        scheduler=head,
        max_model_len=1280 if head is not None else 4096,  # 80 blocks of 16 tokens
        sources=("a",),
    )


def address(name: str, port: int = 5468) -> StageAddress:
    return StageAddress(
        peer=name, public_key=name * 40, addresses=(f"10.0.0.{ord(name)}",), port=port
    )


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


def test_new_peer_is_placed_by_migration(running: FakeFleet) -> None:
    running.join("d", stage="none")
    assert ("d", route(1, address("a"))) in running.pop_messages()
    running.wait(3, *"abcd")
    assert running.pop_messages() == []

    running.join("e")
    running.wait(1.25, *"abcde")
    sent = running.pop_messages()
    assert ("e", route(1, address("a"))) in sent
    # The old pipeline serves until the files are there: only `e` lacks some.
    assert [each for each in sent if isinstance(each[1], Prefetch)] == [("e", prefetch(1, (5, 6)))]
    for minute in range(1, 10):
        running.prefetched("e", 1, "fetching", done=minute * 10**7)
        running.wait(29, *"abcde")
    assert running.reconciler.formation.record.epoch == 1
    assert running.reconciler.is_ready
    running.pop_messages()
    running.prefetched("e", 1)
    sent = running.pop_messages()
    assert by_peer(sent) == by_peer(
        [
            ("a", assign(2, 0, 4, (0, 2), "p2")),
            ("b", assign(2, 1, 4, (2, 4), "p2")),
            ("c", assign(2, 2, 4, (4, 5), "p2")),
            ("e", assign(2, 3, 4, (5, 6), "p2")),
        ]
    )
    for peer, message in sent:
        running.loaded(message, peer)
    form = running.pop_messages()
    assert {(p, m.pipeline, m.epoch) for p, m in form} == {(p, "p2", 2) for p in "abce"}
    assert running.reconciler.formation.record.epoch == 1  # it keeps serving
    assert len(running.committed) == 2
    for stage, peer in enumerate("abce"):
        running.ready(peer, stage, 2, "p2")
    context = 70 * 16
    there = msgspec.structs.replace(route(2, address("a"), "p2"), max_model_len=context)
    assert by_peer(running.pop_messages()) == by_peer([(p, there) for p in "abcde"])
    assert running.committed[-1].id == "p2"
    assert running.committed[-1].formed
    running.show_workers()
    running.wait(0.75, *"abcde")
    assert (
        running.pop_messages() == []
    )  # old streams continue until all peers know the new pipeline
    running.wait(0.5, *"abcde")
    assert by_peer(running.pop_messages()) == by_peer(
        [
            *[(p, RouteRemoved(pipeline="p1")) for p in "abcde"],
            *[(p, Unassign(pipeline="p1")) for p in "abc"],
        ]
    )
    running.wait(5, *"abcde")
    assert running.pop_messages() == []
    assert running.reconciler.is_ready


def form_successor(running: FakeFleet) -> list[tuple[str, Assign]]:
    """`d` has its files: a pipeline of four is being formed beside that of three."""
    join_and_prefetch(running)
    running.prefetched("d", 1)
    assert running.reconciler.successor.record.id == "p2"
    assert ReserveEpochAction("p2", 2) in running.decisions
    return [(p, m) for p, m in running.pop_messages() if isinstance(m, Assign)]


def test_failed_load_of_successor_keeps_serving(running: FakeFleet) -> None:
    form_successor(running)
    running.failed("d", 3, 2, "p2")
    assert by_peer(running.pop_messages()) == by_peer(
        [(p, Unassign(pipeline="p2")) for p in "abcd"]
    )
    running.wait(5, *"abcd")
    assert running.pop_messages() == []
    assert running.reconciler.is_ready
    assert "excluded for" in running.reconciler.explain_exclusion("d")
    running.wait(8, *"abcd")  # it has recovered
    running.obey()
    running.wait(1.25, *"abcd")
    assert running.reconciler.pipeline == "p3"
    assert running.reconciler.is_ready


def test_unlinked_successor_keeps_serving(running: FakeFleet) -> None:
    for peer, order in form_successor(running):
        running.loaded(order, peer)
    running.failed("c", 2, 2, "p2", next_lost=True)
    assert ("d", Unassign(pipeline="p2")) in running.pop_messages()
    running.wait(5, *"abcd")
    assert running.reconciler.formation.record.id == "p1"
    assert running.reconciler.is_ready


@pytest.mark.parametrize("how", ["no room", "less KV"])
def test_pipeline_is_replaced_in_place_without_room_for_two(running: FakeFleet, how: str) -> None:
    orders = form_successor(running)
    if how == "no room":
        running.failed("b", 1, 2, "p2", out_of_memory=True)
    else:
        for peer, order in orders:
            running.loaded(order, peer, blocks=79)  # of 80 blocks
    assert running.reconciler.successor is None
    assert running.reconciler.formation.record.id == "p1"
    assert running.reconciler.formation.record.epoch == 3
    assert running.reconciler.formation.peers == ("a", "b", "c", "d")
    running.obey()
    assert running.reconciler.is_ready
    assert running.reconciler.explain_exclusion("b") == ""


def test_successor_continues_when_serving_pipeline_breaks(running: FakeFleet) -> None:
    orders = form_successor(running)
    running.loaded(orders[0][1], "a")
    running.failed("b", 1, 1)
    sent = running.pop_messages()
    assert ("a", RouteRemoved(pipeline="p1")) in sent
    assert ("b", Unassign(pipeline="p1")) in sent
    last = {peer: messages[-1] for peer, messages in by_peer(sent).items()}
    assert last == dict.fromkeys("abcd", route(2, pipeline="p2"))
    assert running.committed[-1].id == "p2"
    running.obey(orders[1:])
    assert running.reconciler.is_ready
    assert running.reconciler.formation.record.epoch == 2


def test_loss_of_shared_peer_ends_both_pipelines(running: FakeFleet) -> None:
    form_successor(running)
    running.handle_event(PeerStoppedEvent("c"))
    assert running.reconciler.successor is None
    assert ("d", Unassign(pipeline="p2")) in running.pop_messages()
    running.wait(0.5, *"abd")
    running.obey()
    assert running.reconciler.formation.record.id == "p1"
    assert running.reconciler.formation.record.epoch == 3
    assert running.reconciler.formation.peers == ("a", "b", "d")


@pytest.mark.parametrize("how", ["silent", "left", "stuck", "wants no stage"])
def test_new_peer_lost_while_loading(running: FakeFleet, how: str) -> None:
    orders = form_successor(running)
    for peer, order in orders[:3]:
        running.loaded(order, peer)
    if how == "left":
        running.handle_event(MemberRemovedEvent("d", "left"))
    elif how == "silent":
        running.wait(4, *"abc")
    elif how == "stuck":
        running.wait(121, *"abcd")
    else:
        running.report("d", stage="none")
        running.wait(1.5, *"abcd")
    assert running.reconciler.successor is None
    assert ("a", Unassign(pipeline="p2")) in running.pop_messages()
    assert running.reconciler.is_ready
    assert running.reconciler.formation.record.epoch == 1


@pytest.mark.parametrize("when", ["at once", "while it loads"])
def test_unreachable_peer_gets_a_notice(running: FakeFleet, when: str) -> None:
    if when == "at once":
        running.join("d")
    else:
        form_successor(running)
    for source in "abc":
        running.handle_event(ConnectionTriedEvent(source, "d", succeeded=False))
    running.wait(2.5, *"abcd")
    sent = running.pop_messages()
    assert running.reconciler.successor is None
    assert running.reconciler.formation.record.epoch == 1
    assert running.reconciler.is_ready
    (text,) = {m.text for _, m in sent if isinstance(m, Notice)}
    assert [p for p, m in sent if isinstance(m, Notice)] == ["d"]
    assert text.startswith(
        "A can't connect to D at 10.0.0.100 port 5467; to open the ports, run on D: "
    )
    assert running.reconciler.explain_exclusion("d") == text
    running.wait(5, *"abcd")
    # One possible predecessor is enough; the ring has that order.
    running.handle_event(ConnectionTriedEvent("b", "d", succeeded=True))
    running.wait(2.5, *"abcd")
    running.obey()
    peers = running.reconciler.formation.peers
    assert sorted(peers) == ["a", "b", "c", "d"]
    assert peers[peers.index("d") - 1] == "b"
    assert running.reconciler.explain_exclusion("d") == ""


def test_extra_pc_stays_spare_if_a_link_costs_more(kit: Kit) -> None:
    fake = kit.FakeFleet("a")
    fake.serve(min_stages=1)
    fake.report("a")
    fake.wait(1.25, "a")
    fake.obey()
    fake.join("b")
    fake.wait(2.5, *"ab")
    fake.obey()
    assert fake.reconciler.formation.peers == ("a",)
    assert fake.reconciler.formation.record.epoch == 1
    assert fake.reconciler.explain_exclusion("b").startswith(
        "on standby: using it would not be faster"
    )
    assert not [m for _, m in fake.pop_messages() if isinstance(m, Notice)]


def test_endpoints_count_by_their_requests() -> None:
    registry = Registry("s", map(member, "abc"))
    for name, changes in {"a": {"requests": 5}, "b": {}, "c": {"api_address": ""}}.items():
        said = msgspec.structs.replace(fake_fleet.report(name), **changes)
        registry.record_report(name, said, True, 0.0)
    assert find_askers(registry) == {"a": 6.0, "b": 1.0}


def test_serving_ring_stays_until_another_is_worth_it(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b", "c", min_peers=3)
    fake.serve(min_stages=2)
    for name, memory in (("a", 8), ("b", 8), ("c", 8)):
        fake.report(name, memory=memory * GB)
    fake.wait(1.25, *"abc")
    fake.obey()
    assert fake.reconciler.formation.peers == ("a", "b")

    def link(one: str, other: str, latency: float) -> None:
        fake.handle_event(ConnectionTriedEvent(one, other, succeeded=True, latency=latency))
        fake.handle_event(ConnectionTriedEvent(other, one, succeeded=True, latency=latency))

    # 0.7 s of reading and 40 ms of links; with c it would be 38 ms.
    link("a", "b", 0.020)
    link("a", "c", 0.019)
    link("b", "c", 0.300)
    fake.wait(2 * REVIEW_INTERVAL, *"abc")
    assert fake.reconciler.formation.record.epoch == 1
    assert fake.reconciler.migration is None
    link("a", "b", 0.5)
    fake.wait(REVIEW_INTERVAL / 2, *"abc")
    assert fake.reconciler.formation.peers == ("a", "b")  # not at once: it may be temporary
    fake.wait(REVIEW_INTERVAL, *"abc")
    fake.obey()
    fake.wait(2.5, *"abc")
    fake.obey()
    assert set(fake.reconciler.formation.peers) == {"a", "c"}


def report_slowdown(fake: FakeFleet, peer: str, slowdown: float) -> None:
    """A stage reports that its steps take ``slowdown`` times as long."""
    old = fake.reconciler.registry.sessions[peer].report
    workers = tuple(msgspec.structs.replace(one, slowdown=slowdown) for one in old.workers)
    fake.handle_event(PeerReportedEvent(peer, msgspec.structs.replace(old, workers=workers)))


@pytest.fixture
def pair(kit: Kit) -> FakeFleet:
    """A and B serve; C, an equal peer, is a spare."""
    fake = kit.FakeFleet("a", "b", "c", min_peers=3)
    fake.serve(min_stages=2)
    for name in "abc":
        fake.report(name, memory=8 * GB)
    fake.wait(1.25, *"abc")
    fake.obey()
    assert fake.reconciler.formation.peers == ("a", "b")
    return fake


def test_lasting_slowdown_moves_the_stage(pair: FakeFleet) -> None:
    report_slowdown(pair, "a", 1.0)
    report_slowdown(pair, "b", 4.0)
    pair.wait(SLOWDOWN_HOLD - 1, *"abc")
    assert pair.reconciler.migration is None, "it may be temporary"
    pair.wait(REVIEW_INTERVAL + 2, *"abc")
    pair.obey()
    pair.wait(2.5, *"abc")
    pair.obey()
    assert set(pair.reconciler.formation.peers) == {"a", "c"}
    epoch = pair.reconciler.formation.record.epoch
    pair.wait(SLOWDOWN_TTL + 2 * REVIEW_INTERVAL, *"abc")
    assert pair.reconciler.formation.record.epoch == epoch, "B has recovered but is no better"


def test_link_review_does_not_delay_slowdown_review(
    pair: FakeFleet,
) -> None:
    report_slowdown(pair, "a", 1.0)
    pair.wait(2 * REVIEW_INTERVAL, *"abc")
    report_slowdown(pair, "b", 4.0)
    pair.wait(SLOWDOWN_HOLD - 5, *"abc")
    pair.handle_event(ConnectionTriedEvent("b", "c", succeeded=True, latency=0.005))
    pair.wait(3, *"abc")
    assert pair.reconciler.migration is None
    pair.wait(4, *"abc")
    assert set(pair.reconciler.migration.peers) == {"a", "c"}


def test_intermittent_slowdown_changes_nothing(pair: FakeFleet) -> None:
    report_slowdown(pair, "a", 1.0)
    for _ in range(6):
        report_slowdown(pair, "b", 4.0)
        pair.wait(SLOWDOWN_HOLD / 2, *"abc")
        report_slowdown(pair, "b", 1.0)
        pair.wait(SLOWDOWN_HOLD / 2, *"abc")
    assert pair.reconciler.formation.record.epoch == 1
    assert pair.reconciler.migration is None


@pytest.fixture
def unlike(kit: Kit) -> FakeFleet:
    """Two equal devices, of which B's stage was three times as slow when it was measured."""
    fake = kit.FakeFleet("a", "b")
    fake.serve(min_stages=2)
    for name in "ab":
        fake.report(name, memory=100 * GB)
    fake.wait(1.25, *"ab")
    for peer, message in fake.pop_messages():
        if isinstance(message, Assign):
            slow = Profile(decode=((1, 0.9 if peer == "b" else 0.3),))
            fake.loaded(message, peer, profile=slow)
    fake.obey()
    return fake


def shares(fake: FakeFleet) -> dict[str, int]:
    stages = fake.reconciler.formation.record.stages
    return {one.peer: one.layers[1] - one.layers[0] for one in stages}


def test_one_measurement_makes_no_shares(unlike: FakeFleet) -> None:
    before = shares(unlike)
    assert before == {"a": 3, "b": 3}
    unlike.wait(3 * REVIEW_INTERVAL, *"ab")
    unlike.join("c")
    unlike.wait(2.5, *"abc")
    assert (shares(unlike), unlike.reconciler.migration) == (before, None), "C is as fast as B"
    report_slowdown(unlike, "a", 1.0)
    report_slowdown(unlike, "b", 1 / 3)
    unlike.wait(5 * REVIEW_INTERVAL, *"abc")
    assert (shares(unlike), unlike.reconciler.formation.record.epoch) == (before, 1)


def test_a_peer_that_is_slower_again_and_again_gets_a_smaller_share_once(
    unlike: FakeFleet,
) -> None:
    report_slowdown(unlike, "a", 1.0)
    report_slowdown(unlike, "b", 1.0)
    unlike.wait(SLOWDOWN_HOLD - 1, *"ab")
    assert unlike.reconciler.migration is None
    unlike.wait(4, *"ab")
    unlike.obey()
    unlike.wait(2.5, *"ab")
    unlike.obey()
    after = shares(unlike)
    assert after["a"] > after["b"]
    epoch = unlike.reconciler.formation.record.epoch
    for slowdown in (1.0, 0.8, 1.3, 0.0, 1.1) * 4:
        for peer in "ab":
            report_slowdown(unlike, peer, slowdown)
        unlike.wait(REVIEW_INTERVAL / 2, *"ab")
    assert (shares(unlike), unlike.reconciler.formation.record.epoch) == (after, epoch)


def test_serving_peer_survives_a_failed_attempt(running: FakeFleet) -> None:
    running.handle_event(ConnectionTriedEvent("a", "b", succeeded=False))
    running.handle_event(ConnectionTriedEvent("z", "a", succeeded=False))
    running.wait(5, *"abc")
    assert running.pop_messages() == []
    assert running.reconciler.is_ready


def test_first_pc_serves_alone_if_second_is_unreachable(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    fake.serve()
    fake.report("a")
    fake.report("b")
    fake.handle_event(ConnectionTriedEvent("b", "a", succeeded=False))
    fake.handle_event(ConnectionTriedEvent("a", "b", succeeded=False))
    fake.wait(1.25, *"ab")
    assert fake.reconciler.formation.peers == ("a",)
    # A failed connection to a PC that is off doesn't count.
    fake.handle_event(PeerStoppedEvent("b"))
    fake.handle_event(ConnectionTriedEvent("a", "b", succeeded=False))
    fake.obey()
    fake.report("b", fresh=True)
    fake.wait(1.25, *"ab")
    fake.obey()
    assert fake.reconciler.formation.peers == ("a", "b")


def test_new_peer_is_blamed_for_a_failed_link(running: FakeFleet) -> None:
    for peer, order in form_successor(running):
        running.loaded(order, peer)
    running.failed("d", 3, 2, "p2", next_lost=True)  # it can't connect to `a`
    running.wait(3, *"abcd")
    assert running.reconciler.formation.peers == ("a", "b", "c")
    assert running.reconciler.is_ready
    assert "excluded for" in running.reconciler.explain_exclusion("d")


def test_join_during_loading_is_placed_afterwards(running: FakeFleet) -> None:
    orders = form_successor(running)
    running.join("e")
    running.wait(10, *"abcde")
    assert running.reconciler.successor.record.epoch == 2
    running.obey(orders)
    running.wait(2.5, *"abcde")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c", "d", "e")


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


def join_and_prefetch(running: FakeFleet) -> list[tuple[str, Prefetch]]:
    """`d` joins and is asked to prefetch."""
    running.join("d")
    running.wait(1.25, *"abcd")
    return [(p, m) for p, m in running.pop_messages() if isinstance(m, Prefetch)]


def test_prefetch_is_resent_until_reports_show_it(running: FakeFleet) -> None:
    asked = join_and_prefetch(running)
    assert asked == [("d", prefetch(1, (5, 6)))]
    running.wait(3.25, *"abcd")
    assert running.pop_messages() == asked
    running.prefetched("d", 1, "fetching")
    running.wait(10, *"abcd")
    assert running.pop_messages() == []
    running.report("d", fresh=True)  # its daemon restarted
    assert asked[0] in running.pop_messages()
    running.prefetched("d", 0)  # a report of another migration
    assert running.reconciler.formation.record.epoch == 1
    running.prefetched("d", 1)
    assert running.reconciler.successor.record.epoch == 2


def test_failed_prefetch_keeps_serving(running: FakeFleet) -> None:
    join_and_prefetch(running)
    running.prefetched("d", 1, "failed", "the disk is full")
    assert running.reconciler.migration is None
    assert "D can't fetch its files: the disk is full" in " ".join(running.fleet.story)
    running.wait(5, *"abcd")
    assert running.pop_messages() == []
    assert running.reconciler.formation.record.epoch == 1
    running.join("e")  # the others join without it
    running.wait(1.25, *"abcde")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c", "e")


def test_serving_peer_with_failed_prefetch_keeps_its_stage(running: FakeFleet) -> None:
    running.report("b", *running.fleet.registry.sessions["b"].report.workers, stage="none")
    running.wait(1.25, *"abc")
    assert [p for p, m in running.pop_messages() if isinstance(m, Prefetch)] == ["a", "c"]
    running.prefetched("c", 1, "failed")
    running.wait(59, *"abc")
    assert running.pop_messages() == []
    assert running.reconciler.is_ready
    running.wait(2, *"abc")
    assert [p for p, m in running.pop_messages() if isinstance(m, Prefetch)] == ["a", "c"]


@pytest.mark.parametrize("how", ["left", "silent"])
def test_new_peer_lost_while_fetching(running: FakeFleet, how: str) -> None:
    join_and_prefetch(running)
    if how == "left":
        running.handle_event(MemberRemovedEvent("d", "left"))
    running.wait(8, *"abc")
    assert running.reconciler.migration is None
    assert running.reconciler.is_ready
    assert running.reconciler.formation.record.epoch == 1


def test_loss_does_not_wait_for_prefetch(running: FakeFleet) -> None:
    join_and_prefetch(running)
    running.failed("b", 1, epoch=1)
    running.wait(0.5, *"abcd")
    assert running.reconciler.formation.record.epoch == 2
    assert running.reconciler.formation.peers == ("a", "b", "c", "d")
    assert running.reconciler.migration is None


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


def test_failed_worker_restarts_the_pipeline(running: FakeFleet) -> None:
    running.failed("b", 1, epoch=1)
    assert by_peer(running.pop_messages()) == by_peer([(p, route(1)) for p in "abc"])
    assert running.reconciler.reason == "stage 2 on B: oops"
    running.wait(0.5, *"abc")
    sent = running.pop_messages()
    # The first failure is free: same stages, and running ones only change epoch.
    assert {(p, m.layers, m.epoch) for p, m in sent if isinstance(m, Assign)} == {
        ("a", (0, 2), 2),
        ("b", (2, 4), 2),
        ("c", (4, 6), 2),
    }


def test_crash_loop_backs_off(running: FakeFleet) -> None:
    for name, memory in zip("abc", (3, 5, 3), strict=True):
        running.report(name, memory=memory * 10**9)  # without `b` there is no placement
    gaps = []
    for _ in range(9):
        formation = running.reconciler.formation
        running.failed("b", formation.stage_of("b"), formation.record.epoch)
        since = running.now
        while running.reconciler.formation is None:
            running.wait(0.25, *"abc")
            assert running.now - since < MAX_DELAY + 10
        gaps.append(round(running.now - since))
    assert gaps[0] == 0, "a short exclusion is waited for"
    assert gaps == sorted(gaps)
    assert gaps[-1] == MAX_DELAY
    assert "excluded for" in " ".join(running.fleet.story)


def test_suspect_peer_does_not_change_a_working_pipeline(running: FakeFleet) -> None:
    fail_until_excluded(running, "b")
    running.obey()
    running.wait(50, *"abc")
    assert running.reconciler.is_ready
    assert running.reconciler.formation.peers == ("a", "c")
    assert "excluded for 8 s more after 4 failures" in running.reconciler.explain_exclusion("b")
    running.wait(12, *"abc")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c")


def test_second_failure_is_waited_for(running: FakeFleet) -> None:
    for epoch in (1, 2):
        running.failed("b", 1, epoch)
        running.wait(1.5, *"abc")
        assert running.reconciler.formation.record.epoch == epoch + 1
        assert running.reconciler.formation.peers == ("a", "b", "c")


def test_disconnected_peer_may_reconnect_at_once(running: FakeFleet) -> None:
    running.handle_event(PeerDisconnectedEvent("c"))
    running.wait(0.25, *"ab")
    running.report("c", *running.fleet.registry.sessions["c"].report.workers, fresh=True)
    running.wait(5, *"abc")
    assert running.reconciler.formation.record.epoch == 1
    running.handle_event(PeerDisconnectedEvent("c"))
    running.handle_event(PeerDisconnectedEvent("z"))
    running.wait(0.25, *"ab")
    assert running.reconciler.is_ready
    running.wait(0.25, *"ab")
    assert running.reconciler.reason == "C disconnected"


def test_events_tell_people_what_happened(running: FakeFleet) -> None:
    running.join("e")
    running.wait(1.25, *"abce")
    running.prefetched("e", 1)
    running.obey()
    running.handle_event(PeerStoppedEvent("c"))
    events = [line.partition(" ")[2] for line in running.fleet.context.events]
    assert events[: events.index("A has loaded its layers")] == [
        "toy was requested",
        "A is online",
        "B is online",
        "C is online",
        "loading layers of toy: A 1-2, B 3-4, C 5-6",
    ]
    assert events[events.index("toy is ready: A 1-2, B 3-4, C 5-6") + 1 :] == [
        "E joined the swarm",
        "E is online",
        "layers of toy will move; waiting for files of E",
        "loading layers of toy: A 1-2, B 3-4, C 5, E 6",
        *(f"{name} has loaded its layers" for name in "ABCE"),
        "layers of toy moved: A 1-2, B 3-4, C 5, E 6",
        "C is offline: molink was stopped there",
        "toy is not ready: C shut down",
    ]


@pytest.mark.parametrize("first", ["neighbour", "connection"])
def test_neighbours_report_and_disconnect_mean_loss(running: FakeFleet, first: str) -> None:
    if first == "connection":
        running.handle_event(PeerDisconnectedEvent("c"))
    running.failed("b", 1, epoch=1, next_lost=True)
    running.handle_event(PeerDisconnectedEvent("c"))
    assert not running.fleet.registry.is_live("c")
    running.wait(0.5, *"ab")
    assert running.reconciler.formation.peers == ("a", "b")


def test_recovered_pc_is_used_within_seconds(running: FakeFleet) -> None:
    running.failed("c", 2, epoch=1)
    running.wait(6, *"ab")  # it fails first, and is offline later
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b")
    running.report("c", fresh=True)
    running.wait(12, *"abc")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c")


def fail_until_excluded(running: FakeFleet, peer: str) -> None:
    while peer in running.reconciler.formation.peers:
        formation = running.reconciler.formation
        running.failed(peer, formation.stage_of(peer), formation.record.epoch)
        running.wait(2.5, *"abc")


def test_reason_names_excluded_peers(running: FakeFleet) -> None:
    running.report("a", memory=4 * 10**9)
    running.report("b", memory=4 * 10**9)
    running.handle_event(MemberRemovedEvent("c", "left"))
    running.wait(0.5, *"ab")
    for _ in range(3):
        formation = running.reconciler.formation
        running.failed("b", formation.stage_of("b"), formation.record.epoch)
        while running.reconciler.formation is None:
            running.wait(0.25, *"ab")
    running.failed("b", 1, running.reconciler.formation.record.epoch)
    running.wait(0.5, *"ab")
    assert running.reconciler.reason.startswith(
        "toy needs 6.0 GB, the swarm offers 3.8 GB on 1 peer: room for 3 of 6 layers; add a peer, "
        "allow more memory or serve a smaller model; B is excluded for 4 s more after 4 failures, "
        "the last: stage 2 on B: oops"
    )


def test_lost_next_stage_is_blamed(running: FakeFleet) -> None:
    for epoch in (1, 2, 3, 4):
        stage = running.reconciler.formation.stage_of("a")
        running.failed("a", stage, epoch, next_lost=True)
        running.wait(2.5, *"abc")
    assert running.reconciler.formation.peers == ("a", "c")


def test_doubted_peer_is_placed_after_its_report(running: FakeFleet) -> None:
    running.failed("b", 1, epoch=1, next_lost=True)  # `c`, for an unknown reason
    running.wait(0.5, *"ab")
    assert running.reconciler.formation is None
    running.report("c", *running.fleet.registry.sessions["c"].report.workers)
    running.wait(0.5, *"abc")
    assert running.reconciler.formation.peers == ("a", "b", "c")


def test_wait_for_doubted_peer_is_bounded(running: FakeFleet) -> None:
    running.failed("b", 1, epoch=1, next_lost=True)
    running.wait(1.25, *"ab")
    assert running.reconciler.formation.peers == ("a", "b")


def test_blocked_previous_stage_is_blamed(running: FakeFleet) -> None:
    for epoch in (1, 2, 3, 4):
        peers = running.reconciler.formation.peers
        stage = (peers.index("b") + 1) % len(peers)
        running.failed(peers[stage], stage, epoch, previous_blocked=True)
        assert "it had to cut off B" in running.reconciler.reason
        running.wait(2.5, *"abc")
    assert running.reconciler.formation.peers == ("a", "c")


def test_silent_peer_is_replaced(running: FakeFleet) -> None:
    running.wait(3.25, *"ab")
    assert not running.reconciler.is_ready
    assert by_peer(running.pop_messages()) == by_peer([(p, route(1)) for p in "ab"])
    running.wait(0.5, *"ab")
    batch = running.pop_messages()
    assert {(p, m.layers) for p, m in batch if isinstance(m, Assign)} == {
        ("a", (0, 3)),
        ("b", (3, 6)),
    }
    running.obey(batch)
    # If it returns with its old worker, the worker is kept.
    running.report("c", fresh=True)
    running.wait(1.25, *"abc")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c")
    assert running.reconciler.is_ready


def test_simultaneous_losses_are_handled_together(running: FakeFleet) -> None:
    form_successor(running)
    running.pop_messages()
    running.wait(5, "a", "d")
    told = {peer for peer, _ in running.pop_messages()}
    assert told <= {"a", "d"}
    assert running.reconciler.formation.peers == ("a", "d")


def test_clean_shutdown_is_no_failure(running: FakeFleet) -> None:
    fail_until_excluded(running, "c")
    running.obey()
    assert "excluded for" in running.reconciler.explain_exclusion("c")
    running.handle_event(PeerStoppedEvent("c"))
    assert not running.fleet.registry.is_live("c")
    running.wait(1.25, *"ab")
    running.obey()
    assert running.reconciler.is_ready
    assert running.reconciler.formation.peers == ("a", "b")
    running.report("c", fresh=True)
    running.wait(1.25, *"abc")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c")
    assert running.reconciler.explain_exclusion("c") == ""


@pytest.mark.parametrize("how", ["silent", "restarted", "at once"])
def test_killed_pc_is_no_failure(running: FakeFleet, how: str) -> None:
    running.failed("b", 1, epoch=1, next_lost=True)  # before `c` counts as silent
    if how != "at once":
        running.wait(7 if how == "silent" else 2, *"ab")
        running.obey()
        assert running.reconciler.formation.peers == ("a", "b")
    running.report("c", fresh=True, pid=2)
    assert running.reconciler.explain_exclusion("c") == ""
    running.wait(1.25, *"abc")
    running.obey()
    assert running.reconciler.formation.peers == ("a", "b", "c")


def test_stale_peer_is_not_placed(running: FakeFleet) -> None:
    running.wait(2, *"ab")
    assert running.reconciler.is_ready
    running.failed("b", 1, epoch=1, next_lost=True)
    running.wait(0.5, *"ab")
    assert running.reconciler.formation.peers == ("a", "b")


def test_a_short_silence_changes_nothing(running: FakeFleet) -> None:
    running.wait(2.5, *"ab")
    running.report("c", *running.fleet.registry.sessions["c"].report.workers)
    running.wait(2, *"abc")
    assert running.pop_messages() == []
    assert running.reconciler.is_ready


def test_own_standstill_is_no_silence(running: FakeFleet) -> None:
    running.now += 60
    running.handle_event(TimePassedEvent())
    assert running.pop_messages() == []
    running.wait(6)
    assert running.pop_messages() == []
    assert not running.fleet.registry.sessions


def test_unread_messages_are_no_silence(running: FakeFleet) -> None:
    """The coordinator's PC is busy, so the coordinator reads late."""
    for quarter in range(1, 32):
        running.now += 0.25
        running.handle_event(TimePassedEvent(read_lag=quarter / 4))
    assert running.pop_messages() == []
    assert running.reconciler.is_ready
    running.now += 0.25
    running.handle_event(TimePassedEvent())
    assert not running.fleet.registry.sessions, "all was read, and none had sent anything"


def test_read_lag_is_bounded(running: FakeFleet) -> None:
    for quarter in range(1, 4 * round(MAX_READ_LAG + PEER_TIMEOUT) + 4):
        running.now += 0.25
        running.handle_event(TimePassedEvent(read_lag=quarter / 4))
    assert not running.fleet.registry.sessions


def test_reconnect_time_excludes_own_standstill(running: FakeFleet) -> None:
    running.handle_event(PeerDisconnectedEvent("b"))
    running.now += 60
    # Queued messages are read before the next timer.
    workers = {name: one.report.workers for name, one in running.fleet.registry.sessions.items()}
    running.report("a", *workers["a"])
    running.report("b", *workers["b"], fresh=True)
    running.wait(3, *"abc")
    assert running.reconciler.formation.record.epoch == 1


def test_deadlines_exclude_own_standstill(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    for name in "ab":
        fake.report(name, fresh=True)
    fake.serve()
    fake.wait(2, *"ab")
    fake.now += 600
    fake.handle_event(TimePassedEvent())
    assert fake.reconciler.formation.record.epoch == 1
    assert fake.reconciler.formation.state == "loading"


def test_peer_leaves(running: FakeFleet) -> None:
    running.handle_event(MemberRemovedEvent("b", "left"))
    assert by_peer(running.pop_messages()) == by_peer(
        [
            ("a", PeerRemoved(peer="b")),
            ("c", PeerRemoved(peer="b")),
            ("a", route(1)),
            ("c", route(1)),
        ]
    )
    running.handle_event(PeerReportedEvent("b", running.fleet.registry.sessions["a"].report))
    assert running.pop_messages() == []
    running.wait(0.5, *"ac")
    assert running.reconciler.formation.peers == ("a", "c")


def test_lack_of_memory_is_explained(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    fake.serve()
    fake.report("a", memory=4 * kit.GB)
    fake.wait(2, "a")
    assert fake.reconciler.reason.startswith("toy needs 6.0 GB, the swarm offers 3.8 GB on 1 peer")
    assert fake.pop_messages() == [("a", route(0))]
    fake.report("b", memory=4 * kit.GB)
    fake.wait(1.25, *"ab")
    assert fake.reconciler.formation is not None


def test_failing_packed_products_are_not_planned_again(kit: Kit) -> None:
    """The model fits only packed; at first the card's check of the usual formats has passed."""
    fake = kit.FakeFleet("a", "b")
    packed = BlockWeights(layer=(kit.GB // 4, 0), first=(0, 0), last=(0, 0))
    facts = msgspec.structs.replace(FACTS, plane_weights=packed)

    def report(*, has_passed: bool) -> None:
        card = Device(kind="cuda", name="RTX", memory=4 * kit.GB, has_block_kernels=has_passed)
        fake.report("a", device=card)

    fake.serve(facts=facts, min_peers=1)
    report(has_passed=True)
    fake.wait(2, "a")
    assert fake.reconciler.formation.peers == ("a",)
    fake.pop_messages()
    # The daemon reports the change first.
    report(has_passed=False)
    fake.failed("a", 0, 1)
    fake.wait(2, "a")
    assert fake.reconciler.formation is None
    assert fake.reconciler.reason.startswith("toy needs 6.0 GB, the swarm offers 3.8 GB on 1 peer")
    fake.report("b", memory=8 * kit.GB)
    fake.wait(2, *"ab")
    assert {"b"} <= set(fake.reconciler.formation.peers)


@pytest.mark.parametrize("fact", ["has_block_kernels", "reads_pages"])
def test_layers_are_placed_again_when_kernels_fail(fact: str) -> None:
    passed, failed = (
        candidate_from_report(
            "a",
            fake_fleet.report(
                "a", device=Device(kind="cuda", name="RTX", memory=GB, **{fact: proven})
            ),
        )
        for proven in (True, False)
    )
    assert candidates_differ((failed,), (passed,))
    assert not candidates_differ((failed,), (failed,))


def test_notice_for_nonexistent_layers(running: FakeFleet) -> None:
    running.join("d", stage="1-99")
    running.wait(2, *"abcd")
    why = "names layers that toy doesn't have: it has 6"
    notices = [told for told in running.pop_messages() if isinstance(told[1], Notice)]
    assert notices == [("d", Notice(text=f"--stage 1-99 {why}"))]
    assert running.reconciler.explain_exclusion("d") == f"excluded: --stage 1-99 {why}"
    running.handle_event(MemberRemovedEvent("c", "left"))
    running.wait(2, *"abd")
    running.obey()
    assert running.reconciler.is_ready, "it delays no other peer"
    running.report("d", stage="auto")
    assert ("d", Notice(text="")) in running.pop_messages()


def test_nonexistent_layers_are_the_reason(kit: Kit) -> None:
    fake = kit.FakeFleet("d")
    fake.serve()
    fake.report("d", stage="1-99")
    fake.wait(2, "d")
    assert "D (--stage 1-99) names layers that toy doesn't have" in fake.reconciler.reason


def test_impossible_placement_keeps_serving(running: FakeFleet) -> None:
    running.join("d", stage="1-2")
    running.join("e", stage="2-3")
    running.wait(2, *"abcde")
    assert running.reconciler.is_ready
    assert "overlap" in running.reconciler.reason
    running.handle_event(MemberRemovedEvent("d", "left"))
    running.handle_event(MemberRemovedEvent("e", "left"))
    running.wait(2, *"abc")
    assert running.reconciler.reason == ""
    assert running.reconciler.formation.record.epoch == 1


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


def fetch_until_failure(fake: FakeFleet, kit: Kit, claim: Callable[[float], int]) -> float:
    """`c` fetches and reports ``claim(seconds)`` bytes; returns when the others continue."""
    small = msgspec.structs.replace(kit.facts, layer_bytes=10**7)
    fake.serve(facts=small)
    for name in "abc":
        fake.report(name)
    fake.wait(1.5, *"abc")
    orders = {peer: m for peer, m in fake.pop_messages() if isinstance(m, Assign)}
    started = fake.now
    fake.loaded(orders["a"], "a")
    fake.loaded(orders["b"], "b")
    most = stage_bytes(small, orders["c"].layers) / MIN_RATE
    while fake.reconciler.formation is not None:
        assert fake.now - started < 2 * most, "for ever"
        done = claim(fake.now - started)
        fake.report("c", kit.worker("fetching", 1, 2, orders["c"].layers, done=done))
        fake.wait(0.25, *"abc") if done < 10**6 else fake.wait(15, *"abc")
    return fake.now - started


@pytest.mark.parametrize(
    "claim",
    [
        lambda _: 0,
        lambda seconds: round(1000 * seconds),
        lambda seconds: round(1e12 + seconds * 1e9),
        lambda seconds: int(seconds) % 2 * 10**5,
    ],
    ids=["nothing", "too little", "more than there is", "up and down"],
)
def test_stalled_fetch_excludes_the_peer(kit: Kit, claim: Callable[[float], int]) -> None:
    fake = kit.FakeFleet("a", "b", "c", min_peers=3)
    assert fetch_until_failure(fake, kit, claim) <= 62
    assert "C made too little progress fetching its stage" in " ".join(fake.fleet.story)
    fake.wait(0.5, "a", "b")
    assert fake.reconciler.formation.peers == ("a", "b")
    fake.obey()
    assert fake.reconciler.is_ready
    fake.wait(100, *"abc")
    assert fake.reconciler.formation.peers == ("a", "b")


def test_transfer_time_is_bounded_by_its_bytes(kit: Kit) -> None:
    """Reporting exactly the minimum rate ends too."""
    fake = kit.FakeFleet("a", "b", "c", min_peers=3)
    most = 1.5 * 2 * 10**7 + (1 << 20)
    taken = fetch_until_failure(fake, kit, lambda s: round(2 * MIN_RATE * s) + 10**6)
    assert taken <= most / MIN_RATE / 2 + STALL_TIMEOUT + 30


def test_stalled_prefetch_is_given_up(running: FakeFleet) -> None:
    join_and_prefetch(running)
    running.prefetched("d", 1, "fetching")
    running.wait(31, *"abcd")
    assert running.reconciler.migration is None
    assert "D can't fetch its files: the transfer is too slow" in " ".join(running.fleet.story)
    assert running.reconciler.is_ready


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


# --- restarts --------------------------------------------------------------------------------


def restarted(running: FakeFleet, kit: Kit) -> FakeFleet:
    record = running.committed[-1]
    return kit.FakeFleet(
        *"abc", desired=running.reconciler.desired, pipeline=record, last=(1, record.epoch)
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
