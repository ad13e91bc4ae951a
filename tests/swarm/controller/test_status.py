import json

import msgspec

from molink import __version__
from molink.facts.ring_times import HANDLING_S
from molink.swarm.controller.records import DesiredModel
from molink.swarm.controller.status import MAX_BYTES, build_status, encode_status
from molink.wire.messages.load import PeerLoad, RequestLoad, SchedulerLoad, StageLoad
from molink.wire.messages.peer_reports import PartialModel, TransferState
from tests.support.fake_fleet import FakeFleet, Kit


def test_status_has_the_documented_keys(running: FakeFleet) -> None:
    running.join("d", stage="none")
    running.wait(1, *"abcd")
    status = build_status(running.fleet, "s1", ["10.0.0.1:5466"], 42)
    assert status["swarm"] == "s1"
    assert status["coordinator"] == {
        "addresses": ["10.0.0.1:5466"],
        "state": "running",
        "pid": 42,
        "version": __version__,
    }
    assert (status["model"], status["quantize"]) == ("toy", "none")
    assert status["peers"][1] == {
        "id": "b",
        "name": "B",
        "address": "10.0.0.98",
        "endpoint": "http://127.0.0.1:5465",
        "state": "online",
        "pc": "",
        "device": "cpu: CPU",
        "daemon_pid": 1,
        "reason": "",
        "version": "1",
        "stage": "auto",
        "memory": 10**11,
        "paused": "",
        "copied": 0,
        "held": {},
        "transfers": [],
        "workers": [
            {
                "pid": 1,
                "pipeline": "p1",
                "stage": 1,
                "layers": [2, 4],
                "state": "ready",
                "fetching": None,
                "loading": None,
                "load": None,
            }
        ],
    }
    (pipeline,) = status["pipelines"]
    assert pipeline == {
        "id": "p1",
        "model": "toy",
        "replica": 0,
        "epoch": 1,
        "ready": True,
        "micro_batches": 3,
        "stages": [
            {
                "peer": p,
                "layers": layers,
                "device": "cpu: CPU",
                "decode_s": 0.01,
                "link_s": HANDLING_S + 0.001 + (64 / 12.5e6 if p == "c" else 0.0),
                "link_measured": False,
            }
            for p, layers in (("a", [0, 2]), ("b", [2, 4]), ("c", [4, 6]))
        ],
        "blocks": 80,
        "state": "ready",
        "reason": "",
        "phases": {
            "reason": "the model was just requested",
            "decided": 1.0,
            "loaded": 1.5,
            "formed": 1.5,
        },
        "scheduler": None,
    }
    assert status["clock"] == running.now
    assert (status["trouble"], status["files"]) == ("", "Only A has all files of toy so far")
    assert json.loads(encode_status(status)) == status


def test_each_model_and_pipeline_is_shown(kit: Kit) -> None:
    paper = kit.Paper("a", "b", "c")
    for name in "abc":
        paper.report(name)
    facts = [msgspec.structs.replace(kit.facts, name=name) for name in ("x", "y", "z")]
    huge = msgspec.structs.replace(facts[2], layers=600)
    paper.serve_all(
        DesiredModel(facts[0], "a", replicas=2),
        DesiredModel(facts[1], "b"),
        DesiredModel(huge, "a"),
    )
    for _ in range(4):
        paper.wait(0.5, *"abc")
        paper.obey()
    status = build_status(paper.fleet, "s1", [], 1)
    assert status["model"] == "x"
    assert [(one["name"], one["replicas"], one["ready"]) for one in status["models"]] == [
        ("x", 2, 2),
        ("y", 1, 1),
        ("z", 1, 0),
    ]
    shown = [(one["model"], one["replica"], one["ready"]) for one in status["pipelines"]]
    assert shown == [("x", 0, True), ("x", 1, True), ("y", 0, True), ("z", 0, False)]
    assert status["trouble"].startswith("z: ")
    assert "No connected PC has all files of y" in status["files"]


def test_status_without_a_ready_pipeline(kit: Kit) -> None:
    paper = kit.Paper("a", "b", min_peers=2)
    empty = build_status(paper.fleet, "s1", [], 1)
    assert (empty["model"], empty["pipelines"]) == (None, [])
    paper.serve()
    paper.report("a")
    paper.wait(2, "a")
    status = build_status(paper.fleet, "s1", [], 1, blocked={"b"})
    assert [peer["state"] for peer in status["peers"]] == ["here", "blocked"]
    (pipeline,) = status["pipelines"]
    assert (pipeline["ready"], pipeline["state"], pipeline["stages"]) == (False, "waiting", [])
    assert pipeline["reason"] == "waiting for peers: 1 of 2 with a stage are connected"


def test_sole_holder_of_files_is_named(running: FakeFleet) -> None:
    def files(*models: str, **copied: int) -> str:
        for peer, session in running.fleet.registry.sessions.items():
            held = ("toy",) if peer in models else ()
            session.report = msgspec.structs.replace(
                session.report, models=held, replicated_percent=copied.get(peer, 0)
            )
        text: str = build_status(running.fleet, "s1", [], 1)["files"]
        return text

    assert files("a", "b") == files("a", b=100) == files(b=100, c=100) == ""
    assert files("a", b=99) == "Only A has all files of toy so far"
    assert "has all files of toy; together they hold all layers" in files(b=99)
    for peer, held in (("a", ((0, 2),)), ("b", ()), ("c", ((1, 2), (4, 5)))):
        session = running.fleet.registry.sessions[peer]
        parts = (PartialModel(root=running.fleet.models[0].facts.root, layers=held),)
        session.report = msgspec.structs.replace(session.report, partial_models=parts, workers=())
    assert "and none has those of layers 2:4, 5:6. Start a PC that has them" in files()
    for peer in "bc":
        running.fleet.registry.drop_session(peer)
    assert files("a") == ""  # one PC is no swarm


def test_stage_and_scheduler_loads_are_shown(running: FakeFleet) -> None:
    """What the peers of a pipeline's stages say of them; of its head, only that of the first."""
    request = RequestLoad("a", "decode", 12, 20, 9, 41_300, 3)
    for stage, peer in enumerate("abc"):
        session = running.fleet.registry.sessions[peer]
        one = StageLoad("p1", stage, 34, 12, 2, 100, 50, 15_000, 11_750_000, (1, 2), (3, 4))
        head = SchedulerLoad(
            "p1", 1, 2, 80, stage, 3, (request,), cached_percent=83, queues=(2, 0, 1)
        )
        other = StageLoad("p9", stage, 99)
        load = PeerLoad((other, one), (head,))
        session.report = msgspec.structs.replace(session.report, load=load)
    status = build_status(running.fleet, "s1", [], 1)
    peer = status["peers"][1]
    assert peer["workers"][0]["load"] == {
        "busy": 34,
        "bubbles": 12,
        "requests": 2,
        "weights": 100,
        "kv": 50,
        "link": {
            "latency_s": 0.015,
            "rate": 11_750_000,
            "decode": {"queued": 1, "in_flight": 3},
            "bulk": {"queued": 2, "in_flight": 4},
        },
    }
    assert status["pipelines"][0]["scheduler"] == {
        "running": 1,
        "waiting": 2,
        "blocks": 80,
        "used": 0,
        "micro_batches": 3,
        "swapped": 0,
        "host_blocks": 0,
        "host_used": 0,
        "swap_fallbacks": 0,
        "cached": 83,
        "queues": [2, 0, 1],
        "requests": [
            {
                "peer": "a",
                "state": "decode",
                "prompt": 12,
                "computed": 20,
                "generated": 9,
                "tokens_per_s": 41.3,
                "age_s": 3,
                "resume_s": 0.0,
            }
        ],
    }


def test_names_are_kept_when_loads_are_dropped(running: FakeFleet) -> None:
    status = build_status(running.fleet, "s1", [], 1)
    loaded = {"workers": [{"pid": 1, "load": {"busy": "x" * 400}}]}
    status["peers"] = [{"id": str(i), **loaded} for i in range(600)]
    text = encode_status(status)
    assert len(text) <= MAX_BYTES
    assert len(json.loads(text)["peers"]) == 600


def test_transfers_are_shown(running: FakeFleet) -> None:
    session = running.fleet.registry.sessions["b"]
    coming = TransferState(model="toy", done=20, total=100, rate=10, source="A")
    stalled = TransferState(model="toy", done=1, total=2, is_replica=True)
    session.report = msgspec.structs.replace(session.report, transfers=(coming, stalled))
    first, second = build_status(running.fleet, "s1", [], 1)["peers"][1]["transfers"]
    assert first == {
        "model": "toy",
        "bytes": 20,
        "total": 100,
        "rate": 10,
        "eta_s": 8.0,
        "from": "A",
        "copy": False,
    }
    assert (second["eta_s"], second["copy"]) == (None, True)


def test_status_size_is_bounded(running: FakeFleet) -> None:
    status = build_status(running.fleet, "s1", [], 1)
    status["peers"] = [{"id": str(i), "name": "x" * 200} for i in range(3000)]
    text = encode_status(status)
    assert len(text) <= MAX_BYTES
    assert json.loads(text)["truncated"] is True


def test_devices_follow_their_pc(kit: Kit) -> None:
    paper = kit.Paper("a", "b", "c")
    for name in "abc":
        paper.report(name, pc="a" if name == "c" else "")
    status = build_status(paper.fleet, "s1", [], 1)
    assert [(one["id"], one["pc"]) for one in status["peers"]] == [("a", ""), ("c", "a"), ("b", "")]


def test_files_warning_needs_a_second_pc(kit: Kit) -> None:
    paper = kit.Paper("a", "b")
    for name in "ab":
        paper.report(name, pc="a" if name == "b" else "")
    paper.serve()
    assert build_status(paper.fleet, "s1", [], 1)["files"] == ""
    paper.report("b")
    assert build_status(paper.fleet, "s1", [], 1)["files"] == "Only A has all files of toy so far"
