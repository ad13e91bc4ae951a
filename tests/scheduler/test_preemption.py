"""Preemption for waiting requests, by a complete scheduler."""

import random
from collections import deque
from collections.abc import Sequence

import pytest

from molink.facts.profile import Profile
from molink.facts.settings import PreemptionMode
from molink.scheduler.batch import MicroBatch
from molink.scheduler.blocks import BlockAllocator, ReleasingBlocks
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.policies.create import create_scheduling_policy
from molink.scheduler.request_state import RequestState
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import OutputToken
from tests.support.micro_batches import run_micro_batches
from tests.support.request_states import make_state

ITERATION_S = 0.01
STAGE = Profile(
    decode=((1, ITERATION_S), (64, ITERATION_S)), prefill=((16, ITERATION_S), (64, 4 * ITERATION_S))
)


class Served:
    """A scheduler of one stage, by default with one micro-batch at a time."""

    def __init__(
        self,
        policy: str,
        running: int,
        blocks: int = 400,
        cache: bool = False,
        micro_batches: int = 1,
        mode: PreemptionMode = "recompute",
    ) -> None:
        config = SchedulerConfig(
            blocks,
            16,
            micro_batches,
            64,
            running,
            prefix_cache=cache,
            profiles=(STAGE,),
            num_stages=1,
            preemption_mode=mode,
        )
        self.scheduler = Scheduler(config, 1, create_scheduling_policy(policy))
        self.now = 0.0
        self.count = 0
        self.ended: set[str] = set()

    def submit(
        self,
        key: str,
        prompt: Sequence[int],
        answer: int,
        client: str = "",
        priority: int = 0,
        window: int = 1 << 16,
    ) -> RequestState:
        request = make_state(
            "d",
            key,
            tuple(prompt),
            len(prompt),
            answer,
            SamplingParams(),
            credit_window=window,
            client=client,
            priority=priority,
        )
        self.scheduler.submit_request(request, self.now)
        state = self.scheduler._queues.find_request("d", key)
        assert state is not None
        return state

    def crowd(self, client: str = "", priority: int = 0) -> None:
        """Submit four short requests."""
        while self.scheduler._queues.num_waiting < 4:
            self.count += 1
            self.submit(f"s{self.count}", tuple(range(8)), 8, client, priority)

    def run_iteration(self) -> None:
        batch = self.scheduler.next_batch(self.now)
        self.now += ITERATION_S
        for emission in run_micro_batches(self.scheduler, batch, self.now):
            assert isinstance(emission.message, OutputToken)
            if emission.message.finish_reason is not None:
                self.ended.add(emission.message.key)

    @property
    def preemptions(self) -> float:
        return self.scheduler.collect_stats()[0]["scheduler_preemptions_total"]


@pytest.mark.parametrize(("policy", "several"), [("skip-join-mlfq", False), ("gittins", True)])
def test_several_requests_are_preempted_at_once(policy: str, several: bool) -> None:
    """Four requests have run for a long time when four short ones arrive."""
    served = Served(policy, running=4)
    for number in range(4):
        served.submit(f"long{number}", tuple(range(8 * number, 8 * number + 8)), 4000)
    while served.preemptions == 0:
        for _ in range(50):
            served.run_iteration()
        served.crowd()
        served.run_iteration()
    assert (served.preemptions > 1) == several


@pytest.mark.parametrize("policy", ["skip-join-mlfq", "gittins"])
def test_requests_readmitted_by_share_are_not_preempted(policy: str) -> None:
    """One client always has short requests, another one submits a long one."""
    served = Served(policy, running=2)
    for _ in range(200):
        served.crowd("greedy")
        served.run_iteration()
    served.submit("long", tuple(range(400)), 60, "modest")
    before = len(served.ended)
    for _ in range(1000):
        served.crowd("greedy")
        served.run_iteration()
    assert "long" in served.ended
    assert len(served.ended) - before > 100


def test_requests_readmitted_by_priority_are_not_preempted() -> None:
    served = Served("gittins", running=1)
    served.submit("urgent", tuple(range(400)), 60)
    for _ in range(70):
        if "urgent" not in served.ended:
            served.run_iteration()
            served.crowd(priority=1)
    assert "urgent" in served.ended
    assert served.preemptions == 0


@pytest.mark.parametrize("policy", ["skip-join-mlfq", "gittins"])
def test_matched_cached_blocks_are_not_available_to_others(policy: str) -> None:
    """Of 40 blocks, 20 are cached and matched; a running request has most of the others."""
    served = Served(policy, running=4, blocks=40, cache=True)
    prefix = tuple(range(20 * 16))
    served.submit("first", (*prefix, 1), 1)
    for _ in range(9):
        served.run_iteration()
    served.submit("old", tuple(range(1000, 1010)), 400)
    for _ in range(280):
        served.run_iteration()
    served.submit("new", (*prefix, *range(500, 500 + 4 * 16)), 4)
    for _ in range(20):
        served.run_iteration()
    assert "new" in served.ended
    assert served.preemptions == 1


def outlived(served: Served, key: str, blocks: int, priority: int = 0) -> None:
    """Run a request with a far longer answer than prompt until it has ``blocks`` blocks."""
    state = served.submit(key, range(8), 500, "", priority)
    while len(state.blocks) < blocks:
        served.run_iteration()


@pytest.mark.parametrize(("blocks", "gives_way"), [(32, False), (20, True)])
def test_insufficient_preemptions_are_not_made(blocks: int, gives_way: bool) -> None:
    """An old request and a more urgent one hold the blocks that the waiting request lacks."""
    served = Served("gittins", running=4, blocks=40)
    outlived(served, "old", 8, priority=1)
    outlived(served, "urgent", 12)
    held = {state.key: len(state.blocks) for state in served.scheduler._queues}
    assert 40 - sum(held.values()) < 20 < 40 - held["urgent"] < 32
    served.submit("new", tuple(range(16 * blocks - 1)), 1, priority=1)
    served.run_iteration()
    assert served.preemptions == gives_way


def test_requests_in_flight_are_preempted_after_their_return() -> None:
    """One request is in flight and one idle; a third arrives and needs the blocks of both."""
    served = Served("gittins", running=4, blocks=40, micro_batches=2)
    outlived(served, "a", 10)
    outlived(served, "b", 10)
    scheduler = served.scheduler
    flying = scheduler.next_batch(served.now)
    assert flying is not None
    assert len(flying.volumes[0].header.slices) == 1
    served.submit("new", range(32 * 16), 1)
    scheduler.next_batch(served.now)
    assert (served.preemptions, scheduler._queues.num_running) == (1, 1)
    run_micro_batches(scheduler, flying, served.now)
    scheduler.next_batch(served.now)
    assert (served.preemptions, scheduler._queues.num_running) == (2, 0)


@pytest.mark.parametrize(("reserved", "give_way"), [(0, 0), (15, 1), (39, 2)])
def test_resumed_requests_respect_the_reserve(
    reserved: int, give_way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served("gittins", running=4, blocks=40, mode="reactive-swap")
    served.scheduler.set_host_memory(100, 1e-9)
    outlived(served, "a", 6)
    outlived(served, "b", 6)
    new = served.submit("new", range(16 * 10), 40)
    while new.phase != "decode":
        served.run_iteration()
    monkeypatch.setattr(served.scheduler._swap, "reserved_blocks", lambda now: reserved)
    served.scheduler._batcher._preempt(new)
    for _ in range(4):
        served.run_iteration()
    assert new.phase == "decode"
    assert served.preemptions == 1 + give_way


def test_shared_blocks_count_once_all_holders_are_preempted() -> None:
    blocks = BlockAllocator(8)
    shared, own = blocks.allocate_blocks(3), blocks.allocate_blocks(2)
    blocks.share_blocks(shared)
    found = ReleasingBlocks(blocks)
    assert (found.add_blocks([*shared, *own]), found.add_blocks(shared), found.count) == (2, 3, 5)


@pytest.mark.parametrize("policy", ["fcfs", "skip-join-mlfq", "gittins"])
@pytest.mark.parametrize("blocks", [10, 24])
def test_as_many_stalled_requests_are_preempted_as_needed(policy: str, blocks: int) -> None:
    """Two stalled requests, not yet abandoned, hold all blocks."""
    served = Served(policy, running=4, blocks=40)
    holders = [served.submit(key, range(16 * 17), 200, key, window=4) for key in "ab"]
    while not all(state.is_stalled for state in holders):
        served.run_iteration()
    served.submit("new", range(16 * blocks), 4, "c")
    for _ in range(40):
        served.run_iteration()
    assert "new" in served.ended
    assert served.preemptions == (1 if blocks == 10 else 2)


def test_blocks_shared_with_the_preemptor_are_not_freed() -> None:
    """The request "urgent" has 26 of 64 blocks and ends late; "old" and "new" share 20 blocks."""
    served = Served("gittins", running=8, blocks=64, cache=True)
    prefix = range(1000, 1000 + 20 * 16)
    urgent = served.submit("urgent", range(16 * 25), 600, priority=-1)
    while urgent.phase != "decode":
        served.run_iteration()
    old = served.submit("old", (*prefix, 1, 2, 3), 300)
    for _ in range(60):
        served.run_iteration()
    assert old.phase == "decode"
    served.submit("new", (*prefix, *range(5000, 5000 + 16 * 17)), 4)
    served.run_iteration()
    assert served.preemptions == 0


def test_new_admissions_run_before_preemption() -> None:
    served = Served("gittins", running=4, blocks=40, mode="proactive-swap")
    served.scheduler.set_host_memory(100, 1e-9)
    outlived(served, "old", 16)
    queues = served.scheduler._queues
    old = queues.find_request("d", "old")
    assert old is not None
    served.scheduler._batcher._preempt(old)
    while old.phase == "waiting":
        served.run_iteration()
    assert old.is_fresh
    preemptor = served.submit("new", range(16 * 30), 1)
    assert list(queues.preemption_candidates(preemptor, served.now)) == []
    while old.is_fresh:
        served.run_iteration()
    assert list(queues.preemption_candidates(preemptor, served.now)) == [old]


@pytest.mark.parametrize(("seed", "clients"), [(4, 1), (8, 3), (6, 3)])
def test_resumed_requests_are_not_preempted_next(seed: int, clients: int) -> None:
    """Requests of several priorities, too many for the memory, all finish."""
    rng, way = random.Random(seed), deque[MicroBatch]()
    served = Served("gittins", 12, blocks=60, micro_batches=2, mode="proactive-swap")
    scheduler, count, tokens = served.scheduler, 0, -1.0
    scheduler.set_host_memory(200, 1e-5)
    while count < 120 or len(scheduler._queues):
        if count < 120 and rng.random() < 0.06 and scheduler._queues.num_waiting < 20:
            size = rng.choice((0, 128)) + log_normal(rng, 3.8, 1.2, 500)
            prompt = [rng.randrange(10, 999) for _ in range(size)]
            answer, priority = log_normal(rng, 3.3, 1.0, 300), rng.choice((0, 0, 1))
            served.submit(f"r{count}", prompt, answer, f"c{count % clients}", priority)
            count += 1
        batch = scheduler.next_batch(served.now)
        served.now += ITERATION_S
        if batch is not None:
            way.append(batch)
        if len(way) == 2 or (batch is None and way):
            run_micro_batches(scheduler, way.popleft(), served.now)
        if round(served.now / ITERATION_S) % 400 == 0:
            before, tokens = tokens, scheduler.collect_stats()[0]["scheduler_tokens_total"]
            assert tokens > before


def log_normal(rng: random.Random, mean: float, spread: float, most: int) -> int:
    return min(most, max(1, round(rng.lognormvariate(mean, spread))))
