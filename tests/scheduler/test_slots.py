"""Some clients hold all slots with long answers; another client's request starts soon."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from molink.facts.profile import Profile
from molink.facts.settings import PREEMPTION_MODES, PreemptionMode
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.policies.create import create_scheduling_policy
from molink.scheduler.request_queues import PREEMPT_AFTER_S
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import OutputToken
from tests.support.micro_batches import run_micro_batches
from tests.support.request_states import make_state

#: Seconds of an iteration.
ITERATION_S = 0.01
STAGE = Profile(
    decode=((1, ITERATION_S), (64, ITERATION_S)), prefill=((16, ITERATION_S), (64, 4 * ITERATION_S))
)
#: Bound of docs/clients.md: seconds until a request of a client with too few slots starts.
BOUND_S = 2.0
ENDLESS = 100_000


class _Crowd:
    """A scheduler in virtual time whose iterations take :data:`ITERATION_S`."""

    def __init__(
        self,
        slots: int,
        policy: str = "fcfs",
        mode: PreemptionMode = "recompute",
        blocks: int = 4096,
        cache: bool = True,
    ) -> None:
        config = SchedulerConfig(
            blocks,
            16,
            2,
            64,
            slots,
            max_queue_len=64,
            prefix_cache=cache,
            profiles=(STAGE,),
            preemption_mode=mode,
        )
        self.scheduler = Scheduler(config, 1, create_scheduling_policy(policy))
        self.scheduler.set_host_memory(blocks, ITERATION_S / 100)
        self.now = 0.0
        self.count = 0
        #: The position of each request's next token, and the credit of those that read.
        self.positions: dict[str, int] = {}
        self.ended: set[str] = set()

    def submit(
        self, client: str, prompt: int, answer: int, peer: str = "d", window: int = 1 << 16
    ) -> str:
        """Submit a request with a prompt of its own; returns its key."""
        self.count += 1
        key = f"{client} {self.count}"
        tokens = tuple(range(self.count * 1000, self.count * 1000 + prompt))
        state = make_state(
            peer,
            key,
            tokens,
            prompt,
            answer,
            SamplingParams(),
            credit_window=window,
            client=client,
        )
        assert self.scheduler.submit_request(state, self.now) == []
        self.positions[key] = prompt
        return key

    def run_iteration(self) -> None:
        batch = self.scheduler.next_batch(self.now)
        self.now += ITERATION_S
        for emission in run_micro_batches(self.scheduler, batch, self.now):
            token = emission.message
            assert isinstance(token, OutputToken)
            assert token.position == self.positions[token.key]
            self.positions[token.key] += 1
            if token.finish_reason is not None:
                self.ended.add(token.key)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.run_iteration()
        self.scheduler.validate()

    def wait_s(self, key: str) -> float:
        """Virtual seconds until a request ends."""
        start = self.now
        while key not in self.ended:
            self.run_iteration()
            assert self.now < start + 10 * BOUND_S, "locked out"
        self.scheduler.validate()
        return self.now - start

    def slots_of(self, *clients: str) -> list[int]:
        running = [state.request.client for state in self.scheduler._queues.running_requests]
        return [running.count(client) for client in clients]

    @property
    def preemptions(self) -> int:
        return int(self.scheduler.collect_stats()[0]["scheduler_preemptions_total"])


@given(
    policy=st.sampled_from(["fcfs", "skip-join-mlfq", "gittins", "cached-share"]),
    mode=st.sampled_from(PREEMPTION_MODES),
    slots=st.integers(4, 12),
    floods=st.lists(st.tuples(st.integers(8, 80), st.booleans()), min_size=1, max_size=3),
    blocks=st.sampled_from([64, 128, 4096]),
    peers=st.sampled_from([("d", "d"), ("d", "e")]),
    cache=st.booleans(),
)
@example(  # slots of clients that don't read
    policy="fcfs",
    mode="proactive-swap",
    slots=4,
    floods=[(49, False), (68, True)],
    blocks=128,
    peers=("d", "d"),
    cache=False,
)
@example(  # the client's preempted requests are not admitted first
    policy="cached-share",
    mode="recompute",
    slots=4,
    floods=[(8, True)],
    blocks=4096,
    peers=("d", "d"),
    cache=True,
)
@settings(max_examples=20)
def test_a_short_request_starts_within_the_bound(
    policy: str,
    mode: PreemptionMode,
    slots: int,
    floods: Sequence[tuple[int, bool]],
    blocks: int,
    peers: tuple[str, str],
    cache: bool,
) -> None:
    """All slots or blocks are held by endless answers, some of clients that never read."""
    crowd = _Crowd(slots, policy, mode, blocks, cache)
    for number, (prompt, reads) in enumerate(floods):
        for _ in range(slots + 4):
            answer = min(ENDLESS, 16 * blocks - prompt)
            window = 1 << 16 if reads else 16
            crowd.submit(f"flood {number}", prompt, answer, peers[0], window)
    crowd.run(3.0)
    for _ in range(3):
        key = crowd.submit("quiet", 8, 1, peers[1])
        assert crowd.wait_s(key) <= BOUND_S
        crowd.run(0.5)


def test_slots_converge_to_equal_shares_and_stay() -> None:
    crowd = _Crowd(slots=12)
    for _ in range(20):
        crowd.submit("a", 40, ENDLESS // 4)
    crowd.run(3.0)
    assert crowd.slots_of("a") == [12]
    for _ in range(20):
        crowd.submit("b", 40, ENDLESS // 4)
    crowd.run(3.0)
    assert crowd.slots_of("a", "b") == [6, 6]
    assert crowd.preemptions == 6
    for _ in range(20):
        crowd.submit("c", 40, ENDLESS // 4)
    crowd.run(3.0)
    assert crowd.slots_of("a", "b", "c") == [4, 4, 4]
    assert crowd.preemptions == 10
    crowd.run(30.0)
    assert crowd.preemptions == 10, "no circles"


def test_a_slot_that_becomes_free_in_time_is_taken() -> None:
    """Nothing is preempted if answers end within :data:`PREEMPT_AFTER_S`."""
    crowd = _Crowd(slots=4)
    for number in range(40):
        crowd.submit("a", 16, 50 + number)
    crowd.run(0.5)
    assert crowd.wait_s(crowd.submit("b", 16, 1)) < PREEMPT_AFTER_S
    assert crowd.preemptions == 0


def test_requests_of_one_client_never_give_way_to_each_other() -> None:
    crowd = _Crowd(slots=4)
    for _ in range(10):
        crowd.submit("a", 16, 1000)
    crowd.run(9.0)
    assert crowd.preemptions == 0


@pytest.mark.parametrize("policy", ["fcfs", "skip-join-mlfq", "gittins"])
def test_more_clients_than_slots_take_turns(policy: str) -> None:
    """Between preemptions a request generates at least as many tokens as its preemption costs."""
    crowd = _Crowd(slots=1, policy=policy, cache=False)
    keys = [crowd.submit(client, 100, 400) for client in ("a", "b", "c")]
    while len(crowd.ended) < len(keys):
        crowd.run_iteration()
    generated = sum(crowd.positions[key] - 100 for key in keys)
    assert generated == 3 * 400
    assert 2 <= crowd.preemptions <= 24
    assert crowd.now < 2 * generated * ITERATION_S


def test_the_estimate_of_the_wait_knows_preemption() -> None:
    """A request that preemption would serve in time is not rejected."""
    crowd = _Crowd(slots=4)
    for _ in range(8):
        crowd.submit("a", 16, 2000)
    crowd.run(3.0)
    state = make_state("d", "b", range(8), 8, 1, SamplingParams(), client="b", max_queue_s=BOUND_S)
    assert crowd.scheduler.submit_request(state, crowd.now) == []
    crowd.positions["b"] = 8
    assert crowd.wait_s("b") <= BOUND_S
