import msgspec
import pytest
from msgspec import structs

from molink import __version__
from molink.facts.ring_times import HANDLING_S
from molink.swarm.controller.records import DesiredModel
from molink.swarm.controller.status import MAX_BYTES, build_status, encode_status
from molink.swarm.controller.status_schema import (
    ChannelStatus,
    CoordinatorStatus,
    LinkStatus,
    PeerStatus,
    RequestStatus,
    SchedulerStatus,
    StageStatus,
    StageUsage,
    TransferStatus,
    WorkerStatus,
    decode_status,
)
from molink.wire.messages.load import PeerLoad, RequestLoad, SchedulerLoad, StageLoad
from molink.wire.messages.peer_reports import PartialModel, TransferState
from tests.support.fake_fleet import FakeFleet, Kit


def test_status_of_a_running_swarm(running: FakeFleet) -> None:
    running.join("d", stage="none")
    running.wait(1, *"abcd")
    status = build_status(running.fleet, "s1", ["10.0.0.1:5466"], 42)
    assert status.swarm == "s1"
    assert status.coordinator == CoordinatorStatus("running", ("10.0.0.1:5466",), 42, __version__)
    assert (status.model, status.quantize) == ("toy", "none")
    assert status.peers[1] == PeerStatus(
        id="b",
        name="B",
        address="10.0.0.98",
        endpoint="http://127.0.0.1:5465",
        state="online",
        device="cpu: CPU",
        daemon_pid=1,
        version="1",
        stage="auto",
        memory=10**11,
        capacity=running.fleet.registry.sessions["b"].report.device,
        workers=(WorkerStatus((2, 4), "p1", 1, "ready", 1),),
    )
    (pipeline,) = status.pipelines
    assert (pipeline.id, pipeline.model, pipeline.epoch) == ("p1", "toy", 1)
    assert (pipeline.ready, pipeline.state, pipeline.reason) == (True, "ready", "")
    assert (pipeline.micro_batches, pipeline.blocks, pipeline.scheduler) == (3, 80, None)
    link_s = HANDLING_S + 0.001
    assert pipeline.stages == (
        StageStatus("a", (0, 2), "cpu: CPU", 0.01, link_s),
        StageStatus("b", (2, 4), "cpu: CPU", 0.01, link_s),
        StageStatus("c", (4, 6), "cpu: CPU", 0.01, link_s + 64 / 12.5e6),
    )
    assert pipeline.phases == {
        "reason": "the model was just requested",
        "decided": 1.0,
        "loaded": 1.5,
        "formed": 1.5,
    }
    assert status.clock == running.now
    assert (status.trouble, status.files) == ("", "Only A has all files of toy so far")
    assert decode_status(encode_status(status)) == status


def test_each_model_and_pipeline_is_shown(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b", "c")
    for name in "abc":
        fake.report(name)
    facts = [structs.replace(kit.facts, name=name) for name in ("x", "y", "z")]
    huge = structs.replace(facts[2], layers=600)
    models = DesiredModel(facts[0], "a", replicas=2), DesiredModel(facts[1], "b")
    fake.serve_all(*models, DesiredModel(huge, "a"))
    for _ in range(4):
        fake.wait(0.5, *"abc")
        fake.obey()
    status = build_status(fake.fleet, "s1", [], 1)
    assert status.model == "x"
    shown = [(one.name, one.replicas, one.ready) for one in status.models]
    assert shown == [("x", 2, 2), ("y", 1, 1), ("z", 1, 0)]
    pipelines = [(one.model, one.replica, one.ready) for one in status.pipelines]
    assert pipelines == [("x", 0, True), ("x", 1, True), ("y", 0, True), ("z", 0, False)]
    assert status.trouble.startswith("z: ")
    assert "No connected PC has all files of y" in status.files


def test_status_without_a_ready_pipeline(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b", min_peers=2)
    empty = build_status(fake.fleet, "s1", [], 1)
    assert (empty.model, empty.pipelines) == (None, ())
    fake.serve()
    fake.report("a")
    fake.wait(2, "a")
    status = build_status(fake.fleet, "s1", [], 1, banned={"b"})
    assert [peer.state for peer in status.peers] == ["online", "banned"]
    (pipeline,) = status.pipelines
    assert (pipeline.ready, pipeline.state, pipeline.stages) == (False, "waiting", ())
    assert pipeline.reason == "waiting for peers: 1 of 2 with a stage are connected"


def test_sole_holder_of_files_is_named(running: FakeFleet) -> None:
    def files(*models: str, **percent: int) -> str:
        for peer, session in running.fleet.registry.sessions.items():
            held = ("toy",) if peer in models else ()
            session.report = structs.replace(
                session.report, models=held, replicated_percent=percent.get(peer, 0)
            )
        return build_status(running.fleet, "s1", [], 1).files

    assert files("a", "b") == files("a", b=100) == files(b=100, c=100) == ""
    assert files("a", b=99) == "Only A has all files of toy so far"
    assert "has all files of toy; together they hold all layers" in files(b=99)
    for peer, held in (("a", ((0, 2),)), ("b", ()), ("c", ((1, 2), (4, 5)))):
        session = running.fleet.registry.sessions[peer]
        parts = (PartialModel(root=running.fleet.models[0].facts.root, layers=held),)
        session.report = structs.replace(session.report, partial_models=parts, workers=())
    assert "and none has those of layers 3-4, 6. Start a PC that has them" in files()
    for peer in "bc":
        running.fleet.registry.drop_session(peer)
    assert files("a") == "", "a single PC needs no warning"


def test_stage_and_scheduler_loads_are_shown(running: FakeFleet) -> None:
    """Stages are reported by their peers; the scheduler only by the first stage's."""
    request = RequestLoad("a", "decode", 12, 20, 9, 41_300, 3)
    for stage, peer in enumerate("abc"):
        session = running.fleet.registry.sessions[peer]
        one = StageLoad("p1", stage, 34, 12, 2, 100, 50, 15_000, 11_750_000, (1, 2), (3, 4))
        load = SchedulerLoad(
            "p1", 1, 2, 80, stage, 3, (request,), cached_percent=83, queues=(2, 0, 1)
        )
        other = StageLoad("p9", stage, 99)
        session.report = structs.replace(session.report, load=PeerLoad((other, one), (load,)))
    status = build_status(running.fleet, "s1", [], 1)
    link = LinkStatus(0.015, 11_750_000, ChannelStatus(1, 3), ChannelStatus(2, 4))
    assert status.peers[1].workers[0].load == StageUsage(34, 12, 2, 100, 50, link)
    assert status.pipelines[0].scheduler == SchedulerStatus(
        running=1,
        waiting=2,
        blocks=80,
        micro_batches=3,
        cached=83,
        queues=(2, 0, 1),
        requests=(RequestStatus("a", "decode", 12, 20, 9, 41.3, 3),),
    )


def test_transfers_are_shown(running: FakeFleet) -> None:
    session = running.fleet.registry.sessions["b"]
    fetching = TransferState(model="toy", done=20, total=100, rate=10, source="A")
    stalled = TransferState(model="toy", done=1, total=2, is_replica=True)
    session.report = structs.replace(session.report, transfers=(fetching, stalled))
    status = build_status(running.fleet, "s1", [], 1)
    assert status.peers[1].transfers == (
        TransferStatus("toy", 20, 100, 10, 8.0, "A"),
        TransferStatus("toy", 1, 2, copy=True),
    )
    assert msgspec.to_builtins(status.peers[1].transfers[0])["from"] == "A"


@pytest.mark.parametrize(("peers", "name", "kept"), [(600, "", 600), (3000, "x" * 200, 0)])
def test_status_size_is_bounded(running: FakeFleet, peers: int, name: str, kept: int) -> None:
    """Loads are dropped before names are."""
    status = build_status(running.fleet, "s1", [], 1)
    worker = WorkerStatus((0, 2), pid=1, load=StageUsage(weights=10**15, kv=10**15))
    many = tuple(PeerStatus(str(i), name, workers=(worker,)) for i in range(peers))
    text = encode_status(structs.replace(status, peers=many))
    assert len(text) <= MAX_BYTES
    decoded = decode_status(text)
    assert decoded.truncated
    assert len(decoded.peers) >= kept


def test_devices_follow_their_pc(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b", "c")
    for name in "abc":
        fake.report(name, pc="a" if name == "c" else "")
    status = build_status(fake.fleet, "s1", [], 1)
    assert [(one.id, one.pc) for one in status.peers] == [("a", ""), ("c", "a"), ("b", "")]


def test_files_warning_needs_a_second_pc(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    for name in "ab":
        fake.report(name, pc="a" if name == "b" else "")
    fake.serve()
    assert build_status(fake.fleet, "s1", [], 1).files == ""
    fake.report("b")
    assert build_status(fake.fleet, "s1", [], 1).files == "Only A has all files of toy so far"
