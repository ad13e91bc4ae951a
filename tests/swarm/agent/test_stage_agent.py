"""The stage agent: exact actions."""

from typing import Any

import msgspec
import pytest

from molink.facts.profile import Profile
from molink.swarm.agent.stage_agent import (
    AgentAction,
    FetchFilesAction,
    SendToCoordinatorAction,
    SendToWorkerAction,
    StageAgent,
    StartWorkerAction,
    StopWorkerAction,
)
from molink.wire.messages.instructions import Assign, FormPipeline, StageAddress, StageProfile
from molink.wire.messages.peer_reports import StageFailed, StageLoaded, StageReady
from molink.wire.messages.worker_pipe import (
    FormRing,
    LoadStage,
    NextStageLost,
    PeerBlocked,
    Ping,
    Pong,
    RingFormed,
    WorkerFailed,
    WorkerLoaded,
)

KEY = "k" * 40
PROFILE = Profile(decode=((1, 0.01), (4, 0.012)), prefill=((16, 0.02), (64, 0.04)), tile=16)
RING = (StageAddress(peer="a", public_key=KEY, addresses=("127.0.0.1",), port=5468),)
PING = SendToWorkerAction(1, Ping())
LOADED = WorkerLoaded(port=5468, max_blocks=100, profile=PROFILE, weight_bytes=1000)


def assign(epoch: int = 1, layers: tuple[int, int] = (0, 4), stage: int = 0) -> Assign:
    return Assign(
        pipeline="p1",
        epoch=epoch,
        stage=stage,
        stages=2,
        layers=layers,
        model="m",
        sources=("a",),
        dtype="auto",
    )


def form(epoch: int = 1) -> FormPipeline:
    return FormPipeline(pipeline="p1", epoch=epoch, ring=RING, blocks=64, micro_batches=2)


def start() -> LoadStage:
    return LoadStage(
        pipeline="p1",
        stage=0,
        stages=2,
        layers=(0, 4),
        model_dir="/x",
        dtype="auto",
        device="cpu",
        threads=1,
        public_key=KEY,
        secret_key=KEY,
        bind="127.0.0.1",
        ports=(0, 1),
        kv_bytes=1,
        block_size=16,
        max_model_len=128,
    )


def told(epoch: int = 1) -> SendToCoordinatorAction:
    return SendToCoordinatorAction(
        StageLoaded(pipeline="p1", epoch=epoch, stage=0, port=5468, max_blocks=100, profile=PROFILE)
    )


def ready(epoch: int = 1) -> SendToCoordinatorAction:
    return SendToCoordinatorAction(StageReady(pipeline="p1", epoch=epoch, stage=0))


def state(agent: StageAgent) -> tuple[str, int]:
    (worker,) = agent.worker_states({}, {})
    return worker.state, worker.epoch


def running() -> StageAgent:
    agent = StageAgent()
    agent.assign_stage(assign())
    agent.on_files_fetched(1, start())
    agent.on_worker_started(1, 4711)
    agent.on_worker_message(1, LOADED)
    agent.form_ring(form())
    agent.on_worker_message(1, RingFormed(epoch=1))
    agent.validate()
    return agent


def test_assignment_becomes_ready() -> None:
    agent = StageAgent()
    assert agent.assign_stage(assign()) == [FetchFilesAction(1, assign())]
    assert state(agent) == ("fetching", 1)
    (shown,) = agent.worker_states({1: (5, 9, 2), 2: (1, 1, 0)}, {"p1": 1.5})
    assert (shown.done, shown.total, shown.rate, shown.slowdown) == (5, 9, 2, 1.5)
    assert agent.on_files_fetched(1, start()) == [StartWorkerAction(1, start())]
    agent.on_worker_started(1, 4711)
    assert agent.worker_states({}, {})[0].pid == 4711
    assert agent.on_worker_message(1, LOADED) == [told()]
    ring = FormRing(epoch=1, ring=RING, blocks=64, micro_batches=2)
    assert agent.form_ring(form()) == [SendToWorkerAction(1, ring)]
    assert agent.on_worker_message(1, RingFormed(epoch=1)) == [ready()]
    assert state(agent) == ("ready", 1)
    agent.validate()


def test_same_layers_in_a_new_epoch_keep_the_worker() -> None:
    agent = running()
    assert agent.assign_stage(assign(epoch=2)) == [PING]
    assert state(agent) == ("loaded", 2)
    assert agent.resend_reports() == [], "the worker has not answered yet"
    assert agent.on_worker_message(1, Pong()) == [told(2)]
    # Reports about the previous epoch's ring are ignored.
    assert agent.on_worker_message(1, RingFormed(epoch=1)) == []
    assert [type(d) for d in agent.form_ring(form(2))] == [SendToWorkerAction]
    assert agent.on_worker_message(1, RingFormed(epoch=2)) == [ready(2)]
    agent.validate()


@pytest.mark.parametrize(
    "change", [{"dtype": "f32"}, {"quantize": "nf4"}, {"root": "0f" * 32 + ":9"}]
)
def test_other_weights_replace_the_worker(change: dict[str, str]) -> None:
    agent = running()
    other = msgspec.structs.replace(assign(epoch=2), **change)
    assert agent.assign_stage(other) == [StopWorkerAction(1), FetchFilesAction(2, other)]


def test_profiles_accompany_the_ring() -> None:
    def known(epoch: int, stage: int = 1) -> StageProfile:
        return StageProfile(pipeline="p1", epoch=epoch, stage=stage, profile=PROFILE)

    ring = form().ring * 2
    agent = running()
    agent.assign_stage(assign(epoch=2))
    agent.record_profile(known(1, 0))
    agent.record_profile(known(2))
    agent.record_profile(StageProfile(pipeline="p2", epoch=2, stage=0, profile=PROFILE))
    (order,) = agent.form_ring(msgspec.structs.replace(form(2), ring=ring))
    assert isinstance(order, SendToWorkerAction)
    assert order.message.profiles == (Profile(), PROFILE), "unknown stages get a placeholder"
    agent.assign_stage(assign(epoch=3))
    (order,) = agent.form_ring(form(3))
    assert isinstance(order, SendToWorkerAction)
    assert order.message.profiles == ()


@pytest.mark.parametrize("change", [{"max_model_len": 4096}, {"kv_cache_dtype": "int8"}])
def test_other_kv_keeps_the_worker_but_reloads_it(change: dict[str, Any]) -> None:
    agent = running()
    other = msgspec.structs.replace(assign(epoch=2), **change)
    assert agent.assign_stage(other) == [PING, FetchFilesAction(1, other)]


def test_other_layers_of_the_same_weights_keep_the_worker() -> None:
    agent = running()
    other = assign(epoch=2, layers=(0, 6))
    assert agent.assign_stage(other) == [PING, FetchFilesAction(1, other)]
    assert agent.on_worker_message(1, Pong()) == []
    assert state(agent) == ("fetching", 2)
    # Reports about the previous epoch's ring are ignored, although it still runs.
    assert agent.on_worker_message(1, NextStageLost(epoch=1, reason="silent")) == []
    changed = msgspec.structs.replace(start(), layers=(0, 6))
    assert agent.on_files_fetched(1, changed) == [SendToWorkerAction(1, changed)]
    assert agent.worker_states({}, {})[0].pid == 4711
    agent.validate()
    assert agent.on_worker_message(1, RingFormed(epoch=1)) == []
    assert agent.on_worker_message(1, LOADED) == [told(2)]
    assert [type(d) for d in agent.form_ring(form(2))] == [SendToWorkerAction]
    assert agent.on_worker_message(1, RingFormed(epoch=2)) == [ready(2)]
    agent.validate()


def test_worker_that_exits_before_reloading_has_failed() -> None:
    agent = running()
    agent.assign_stage(assign(epoch=2, layers=(0, 6)))
    reason = "ended by signal 9"
    failed = StageFailed(pipeline="p1", epoch=2, stage=0, reason=reason)
    assert agent.on_failure(1, reason) == [StopWorkerAction(1), SendToCoordinatorAction(failed)]
    assert agent.on_files_fetched(1, start()) == []
    agent.validate()


def test_loading_worker_is_replaced() -> None:
    agent = running()
    agent.assign_stage(assign(epoch=2, layers=(0, 6)))
    agent.on_files_fetched(1, start())
    other = assign(epoch=3, layers=(0, 5))
    assert agent.assign_stage(other) == [StopWorkerAction(1), FetchFilesAction(2, other)]
    # Reports of the stopped worker are ignored.
    assert agent.on_worker_message(1, LOADED) == []
    assert agent.on_failure(1, "gone") == []
    agent.validate()


def test_new_epoch_does_not_interrupt_loading() -> None:
    agent = StageAgent()
    agent.assign_stage(assign())
    agent.on_files_fetched(1, start())
    assert agent.assign_stage(assign(epoch=2)) == []
    assert agent.on_worker_message(1, LOADED) == [told(2)]


def test_old_epoch_is_ignored() -> None:
    agent = running()
    agent.assign_stage(assign(epoch=3))
    assert agent.assign_stage(assign(epoch=2)) == []
    assert agent.form_ring(form(2)) == []


def test_repeated_assignment_repeats_the_reports() -> None:
    agent = running()
    assert agent.assign_stage(assign()) == [told(), ready()]
    assert state(agent) == ("ready", 1)


def test_failed_worker_is_reported_once_and_replaced() -> None:
    agent = running()
    failed = SendToCoordinatorAction(
        StageFailed(pipeline="p1", epoch=1, stage=0, reason="OutOfMemory: no room")
    )
    report = WorkerFailed(kind="OutOfMemory", message="no room")
    assert agent.on_worker_message(1, report) == [StopWorkerAction(1), failed]
    assert agent.on_failure(1, "exited with code 1") == []
    assert agent.resend_reports() == [failed]
    assert agent.assign_stage(assign(epoch=2)) == [
        StopWorkerAction(1),
        FetchFilesAction(2, assign(epoch=2)),
    ]
    agent.validate()


def test_missing_files_are_reported() -> None:
    agent = StageAgent()
    agent.assign_stage(assign())
    decisions = agent.on_failure(1, "no source")
    assert decisions == [
        StopWorkerAction(1),
        SendToCoordinatorAction(StageFailed(pipeline="p1", epoch=1, stage=0, reason="no source")),
    ]
    assert agent.on_files_fetched(1, start()) == []


def test_lost_neighbour_is_reported_but_not_as_own_failure() -> None:
    agent = running()
    (tell,) = agent.on_worker_message(1, NextStageLost(epoch=1, reason="silent"))
    assert isinstance(tell, SendToCoordinatorAction)
    assert isinstance(tell.message, StageFailed)
    assert tell.message.next_lost
    assert state(agent) == ("ready", 1)
    assert agent.on_worker_message(1, NextStageLost(epoch=0, reason="silent")) == []


def test_banned_previous_stage_is_blamed() -> None:
    agent = running()
    blocked = PeerBlocked(epoch=1, peer="b", reason="nonsense", is_previous_stage=True)
    (tell,) = agent.on_worker_message(1, blocked)
    assert isinstance(tell, SendToCoordinatorAction)
    assert isinstance(tell.message, StageFailed)
    assert (tell.message.previous_blocked, tell.message.next_lost) == (True, False)
    assert state(agent) == ("ready", 1)
    for change in ({"epoch": 0}, {"is_previous_stage": False}):
        assert agent.on_worker_message(1, msgspec.structs.replace(blocked, **change)) == []


def test_neighbour_failure_is_repeated_until_the_next_ring() -> None:
    agent = running()
    said = agent.on_worker_message(1, NextStageLost(epoch=1, reason="silent"))
    assert agent.resend_reports() == [told(), ready(), *said]
    assert agent.assign_stage(assign()) == [told(), ready(), *said]
    agent.form_ring(form())
    assert agent.resend_reports() == [told(), ready()]
    blocked = PeerBlocked(epoch=1, peer="b", reason="nonsense", is_previous_stage=True)
    said = agent.on_worker_message(1, blocked)
    assert agent.resend_reports() == [told(), ready(), *said]
    agent.assign_stage(assign(epoch=2))
    agent.on_worker_message(1, Pong())
    assert agent.resend_reports() == [told(2)]


def test_unassign_stops_the_worker() -> None:
    agent = running()
    assert agent.unassign_pipeline("p1") == [StopWorkerAction(1)]
    assert agent.worker_states({}, {}) == ()
    assert agent.unassign_pipeline("p1") == []
    assert agent.form_ring(form()) == []


def watched(agent: StageAgent, begun: float, seconds: float) -> list[AgentAction]:
    """The actions while the worker does not answer."""
    looks = range(1, round(seconds / 0.5) + 1)
    return [each for look in looks for each in agent.check_liveness(begun + 0.5 * look)]


def test_unresponsive_worker_is_replaced() -> None:
    agent = running()
    agent.check_liveness(0.0)
    agent.assign_stage(assign(epoch=2))
    assert watched(agent, 0.0, 1.0) == []
    again = assign(epoch=2)
    assert watched(agent, 1.0, 0.5) == [StopWorkerAction(1, kill=True), FetchFilesAction(2, again)]
    assert agent.on_worker_message(1, Pong()) == [], "the answer is too late"
    assert agent.on_files_fetched(2, start()) == [StartWorkerAction(2, start())]
    assert agent.on_worker_message(2, LOADED) == [told(2)]
    agent.validate()


def test_stuck_worker_is_replaced() -> None:
    agent = running()
    other = assign(epoch=2, layers=(0, 6))
    agent.assign_stage(other)
    stopped = agent.on_worker_message(1, Pong(is_stuck=True))
    assert stopped == [StopWorkerAction(1, kill=True), FetchFilesAction(2, other)]
    assert agent.on_files_fetched(1, start()) == []
    agent.validate()


def test_serving_worker_is_pinged_periodically() -> None:
    agent = running()
    assert watched(agent, 0.0, 1.0) == [PING]
    assert agent.on_worker_message(1, Pong()) == []
    assert watched(agent, 1.0, 1.0) == [PING]
    assert watched(agent, 2.0, 3.5) == []
    (stop, tell) = watched(agent, 5.5, 0.5)
    assert stop == StopWorkerAction(1, kill=True)
    assert isinstance(tell, SendToCoordinatorAction)
    assert isinstance(tell.message, StageFailed)
    assert tell.message.reason == "the worker has not answered for 4.0 s"
    agent.validate()


def test_suspension_of_the_daemon_is_not_silence() -> None:
    agent = running()
    assert watched(agent, 0.0, 1.0) == [PING]
    assert agent.check_liveness(31.0) == []
    assert watched(agent, 31.0, 3.0) == []
    assert agent.on_worker_message(1, Pong()) == []
    assert agent.check_liveness(34.5) == []


def test_loading_worker_is_not_pinged() -> None:
    agent = StageAgent()
    agent.assign_stage(assign())
    agent.on_files_fetched(1, start())
    assert watched(agent, 0.0, 60.0) == []
