"""What a peer does about its assignments: exact decisions."""

import msgspec
import pytest

from molink.facts.profile import Profile
from molink.swarm.agent.keeper import (
    Decision,
    Fetch,
    Keeper,
    StartWorker,
    StopWorker,
    TellCoordinator,
    TellWorker,
)
from molink.wire.messages.instructions import Assign, Form, StageAddress, StageProfile
from molink.wire.messages.pipe import (
    Formed,
    FormRing,
    Loaded,
    MemberBlocked,
    NextStageLost,
    Ping,
    Pong,
    Start,
    WorkerFailed,
)
from molink.wire.messages.reports import StageFailed, StageLoaded, StageReady

KEY = "k" * 40
PROFILE = Profile(decode=((1, 0.01), (4, 0.012)), prefill=((16, 0.02), (64, 0.04)), tile=16)
RING = (StageAddress(peer="a", public_key=KEY, addresses=("127.0.0.1",), port=5468),)
PING = TellWorker(1, Ping())
LOADED = Loaded(port=5468, max_blocks=100, profile=PROFILE, weight_bytes=1000)


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


def form(epoch: int = 1) -> Form:
    return Form(pipeline="p1", epoch=epoch, ring=RING, blocks=64, micro_batches=2)


def start() -> Start:
    return Start(
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
        max_context=128,
    )


def told(epoch: int = 1) -> TellCoordinator:
    return TellCoordinator(
        StageLoaded(pipeline="p1", epoch=epoch, stage=0, port=5468, max_blocks=100, profile=PROFILE)
    )


def ready(epoch: int = 1) -> TellCoordinator:
    return TellCoordinator(StageReady(pipeline="p1", epoch=epoch, stage=0))


def state(keeper: Keeper) -> tuple[str, int]:
    (worker,) = keeper.states({}, {})
    return worker.state, worker.epoch


def running() -> Keeper:
    keeper = Keeper()
    keeper.assign(assign())
    keeper.fetched(1, start())
    keeper.started(1, 4711)
    keeper.worker_said(1, LOADED)
    keeper.form(form())
    keeper.worker_said(1, Formed(epoch=1))
    keeper.validate()
    return keeper


def test_from_assignment_to_ready() -> None:
    keeper = Keeper()
    assert keeper.assign(assign()) == [Fetch(1, assign())]
    assert state(keeper) == ("fetching", 1)
    (shown,) = keeper.states({1: (5, 9, 2), 2: (1, 1, 0)}, {"p1": 1.5})
    assert (shown.done, shown.total, shown.rate, shown.pace) == (5, 9, 2, 1.5)
    assert keeper.fetched(1, start()) == [StartWorker(1, start())]
    keeper.started(1, 4711)
    assert keeper.states({}, {})[0].pid == 4711
    assert keeper.worker_said(1, LOADED) == [told()]
    ring = FormRing(epoch=1, ring=RING, blocks=64, micro_batches=2)
    assert keeper.form(form()) == [TellWorker(1, ring)]
    assert keeper.worker_said(1, Formed(epoch=1)) == [ready()]
    assert state(keeper) == ("ready", 1)
    keeper.validate()


def test_the_same_layers_in_a_new_epoch_keep_the_worker() -> None:
    keeper = running()
    assert keeper.assign(assign(epoch=2)) == [PING]
    assert state(keeper) == ("loaded", 2)
    assert keeper.repeat() == [], "it has not answered yet"
    assert keeper.worker_said(1, Pong()) == [told(2)]
    # The ring of the epoch before has nothing to say any more.
    assert keeper.worker_said(1, Formed(epoch=1)) == []
    assert [type(d) for d in keeper.form(form(2))] == [TellWorker]
    assert keeper.worker_said(1, Formed(epoch=2)) == [ready(2)]
    keeper.validate()


@pytest.mark.parametrize(
    "change", [{"dtype": "f32"}, {"quantize": "nf4"}, {"root": "0f" * 32 + ":9"}]
)
def test_other_weights_take_another_worker(change: dict[str, str]) -> None:
    keeper = running()
    other = msgspec.structs.replace(assign(epoch=2), **change)
    assert keeper.assign(other) == [StopWorker(1), Fetch(2, other)]


def test_what_the_head_has_to_know_comes_with_its_ring() -> None:
    def known(epoch: int, stage: int = 1) -> StageProfile:
        return StageProfile(pipeline="p1", epoch=epoch, stage=stage, profile=PROFILE)

    ring = form().ring * 2
    keeper = running()
    keeper.assign(assign(epoch=2))
    keeper.profile(known(1, 0))
    keeper.profile(known(2))
    keeper.profile(StageProfile(pipeline="p2", epoch=2, stage=0, profile=PROFILE))
    (order,) = keeper.form(msgspec.structs.replace(form(2), ring=ring))
    assert isinstance(order, TellWorker)
    assert order.message.profiles == (Profile(), PROFILE), "stages nobody knows of keep their place"
    keeper.assign(assign(epoch=3))
    (order,) = keeper.form(form(3))
    assert isinstance(order, TellWorker)
    assert order.message.profiles == ()


def test_another_context_keeps_the_worker_but_not_what_it_was_told() -> None:
    keeper = running()
    other = msgspec.structs.replace(assign(epoch=2), context=4096)
    assert keeper.assign(other) == [PING, Fetch(1, other)]


def test_other_layers_of_the_same_weights_keep_the_worker() -> None:
    keeper = running()
    other = assign(epoch=2, layers=(0, 6))
    assert keeper.assign(other) == [PING, Fetch(1, other)]
    assert keeper.worker_said(1, Pong()) == []
    assert state(keeper) == ("fetching", 2)
    # The ring of the epoch before, in which it still is, has nothing to say any more.
    assert keeper.worker_said(1, NextStageLost(epoch=1, reason="silent")) == []
    changed = msgspec.structs.replace(start(), layers=(0, 6))
    assert keeper.fetched(1, changed) == [TellWorker(1, changed)]
    assert keeper.states({}, {})[0].pid == 4711
    keeper.validate()
    assert keeper.worker_said(1, Formed(epoch=1)) == []
    assert keeper.worker_said(1, LOADED) == [told(2)]
    assert [type(d) for d in keeper.form(form(2))] == [TellWorker]
    assert keeper.worker_said(1, Formed(epoch=2)) == [ready(2)]
    keeper.validate()


def test_a_worker_that_ends_before_it_holds_other_layers_has_failed() -> None:
    keeper = running()
    keeper.assign(assign(epoch=2, layers=(0, 6)))
    reason = "ended by signal 9"
    failed = StageFailed(pipeline="p1", epoch=2, stage=0, reason=reason)
    assert keeper.failed(1, reason) == [StopWorker(1), TellCoordinator(failed)]
    assert keeper.fetched(1, start()) == []
    keeper.validate()


def test_a_worker_that_is_still_loading_is_replaced() -> None:
    keeper = running()
    keeper.assign(assign(epoch=2, layers=(0, 6)))
    keeper.fetched(1, start())
    other = assign(epoch=3, layers=(0, 5))
    assert keeper.assign(other) == [StopWorker(1), Fetch(2, other)]
    # News of the one that is being stopped is nobody's.
    assert keeper.worker_said(1, LOADED) == []
    assert keeper.failed(1, "gone") == []
    keeper.validate()


def test_a_new_epoch_while_loading_goes_on_loading() -> None:
    keeper = Keeper()
    keeper.assign(assign())
    keeper.fetched(1, start())
    assert keeper.assign(assign(epoch=2)) == []
    assert keeper.worker_said(1, LOADED) == [told(2)]


def test_an_old_epoch_is_ignored() -> None:
    keeper = running()
    keeper.assign(assign(epoch=3))
    assert keeper.assign(assign(epoch=2)) == []
    assert keeper.form(form(2)) == []


def test_the_same_assignment_again_repeats_what_was_told() -> None:
    keeper = running()
    assert keeper.assign(assign()) == [told(), ready()]
    assert state(keeper) == ("ready", 1)


def test_a_failed_worker_is_reported_once_and_replaced() -> None:
    keeper = running()
    failed = TellCoordinator(
        StageFailed(pipeline="p1", epoch=1, stage=0, reason="OutOfMemory: no room")
    )
    report = WorkerFailed(kind="OutOfMemory", message="no room")
    assert keeper.worker_said(1, report) == [StopWorker(1), failed]
    assert keeper.failed(1, "exited with code 1") == []
    assert keeper.repeat() == [failed]
    assert keeper.assign(assign(epoch=2)) == [StopWorker(1), Fetch(2, assign(epoch=2))]
    keeper.validate()


def test_files_that_cannot_be_had() -> None:
    keeper = Keeper()
    keeper.assign(assign())
    decisions = keeper.failed(1, "no source")
    assert decisions == [
        StopWorker(1),
        TellCoordinator(StageFailed(pipeline="p1", epoch=1, stage=0, reason="no source")),
    ]
    assert keeper.fetched(1, start()) == []


def test_a_lost_neighbour_is_told_but_not_our_failure() -> None:
    keeper = running()
    (tell,) = keeper.worker_said(1, NextStageLost(epoch=1, reason="silent"))
    assert isinstance(tell, TellCoordinator)
    assert isinstance(tell.message, StageFailed)
    assert tell.message.next_lost
    assert state(keeper) == ("ready", 1)
    assert keeper.worker_said(1, NextStageLost(epoch=0, reason="silent")) == []


def test_a_previous_stage_that_was_cut_off_is_to_blame() -> None:
    keeper = running()
    blocked = MemberBlocked(epoch=1, peer="b", reason="nonsense", previous=True)
    (tell,) = keeper.worker_said(1, blocked)
    assert isinstance(tell, TellCoordinator)
    assert isinstance(tell.message, StageFailed)
    assert (tell.message.previous_blocked, tell.message.next_lost) == (True, False)
    assert state(keeper) == ("ready", 1)
    for change in ({"epoch": 0}, {"previous": False}):
        assert keeper.worker_said(1, msgspec.structs.replace(blocked, **change)) == []


def test_what_was_said_of_a_neighbour_is_repeated_until_the_next_ring() -> None:
    keeper = running()
    said = keeper.worker_said(1, NextStageLost(epoch=1, reason="silent"))
    assert keeper.repeat() == [told(), ready(), *said]
    assert keeper.assign(assign()) == [told(), ready(), *said]
    keeper.form(form())
    assert keeper.repeat() == [told(), ready()]
    blocked = MemberBlocked(epoch=1, peer="b", reason="nonsense", previous=True)
    said = keeper.worker_said(1, blocked)
    assert keeper.repeat() == [told(), ready(), *said]
    keeper.assign(assign(epoch=2))
    keeper.worker_said(1, Pong())
    assert keeper.repeat() == [told(2)]


def test_unassign_ends_it() -> None:
    keeper = running()
    assert keeper.unassign("p1") == [StopWorker(1)]
    assert keeper.states({}, {}) == ()
    assert keeper.unassign("p1") == []
    assert keeper.form(form()) == []


def watched(keeper: Keeper, begun: float, seconds: float) -> list[Decision]:
    """What is decided while nobody answers."""
    looks = range(1, round(seconds / 0.5) + 1)
    return [each for look in looks for each in keeper.watch(begun + 0.5 * look)]


def test_a_worker_that_does_not_answer_is_followed_by_another_one() -> None:
    keeper = running()
    keeper.watch(0.0)
    keeper.assign(assign(epoch=2))
    assert watched(keeper, 0.0, 1.0) == []
    again = assign(epoch=2)
    assert watched(keeper, 1.0, 0.5) == [StopWorker(1, kill=True), Fetch(2, again)]
    assert keeper.worker_said(1, Pong()) == [], "it is too late"
    assert keeper.fetched(2, start()) == [StartWorker(2, start())]
    assert keeper.worker_said(2, LOADED) == [told(2)]
    keeper.validate()


def test_a_worker_whose_computation_hangs_is_followed_by_another_one() -> None:
    keeper = running()
    other = assign(epoch=2, layers=(0, 6))
    keeper.assign(other)
    stopped = keeper.worker_said(1, Pong(stuck=True))
    assert stopped == [StopWorker(1, kill=True), Fetch(2, other)]
    assert keeper.fetched(1, start()) == []
    keeper.validate()


def test_a_worker_that_serves_is_asked_now_and_then() -> None:
    keeper = running()
    assert watched(keeper, 0.0, 1.0) == [PING]
    assert keeper.worker_said(1, Pong()) == []
    assert watched(keeper, 1.0, 1.0) == [PING]
    assert watched(keeper, 2.0, 3.5) == []
    (stop, tell) = watched(keeper, 5.5, 0.5)
    assert stop == StopWorker(1, kill=True)
    assert isinstance(tell, TellCoordinator)
    assert isinstance(tell.message, StageFailed)
    assert tell.message.reason == "the worker has not answered for 4.0 s"
    keeper.validate()


def test_a_standstill_of_the_daemon_itself_is_no_silence() -> None:
    keeper = running()
    assert watched(keeper, 0.0, 1.0) == [PING]
    assert keeper.watch(31.0) == []
    assert watched(keeper, 31.0, 3.0) == []
    assert keeper.worker_said(1, Pong()) == []
    assert keeper.watch(34.5) == []


def test_a_worker_that_loads_is_not_asked() -> None:
    keeper = Keeper()
    keeper.assign(assign())
    keeper.fetched(1, start())
    assert watched(keeper, 0.0, 60.0) == []
