"""Scarce memory: a long request finishes among endless short ones."""

from hypothesis import given, settings
from hypothesis import strategies as st

from molink.facts.profile import Profile
from molink.facts.settings import PREEMPTION_MODES, PreemptionMode
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.policies.create import SCHEDULING_POLICIES, create_scheduling_policy
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import OutputToken
from tests.support.micro_batches import run_micro_batches
from tests.support.request_states import make_state

#: Seconds of an iteration.
ITERATION_S = 0.01
STAGE = Profile(
    decode=((1, ITERATION_S), (8, ITERATION_S)), prefill=((16, ITERATION_S), (64, 4 * ITERATION_S))
)
BLOCK_SIZE = 4
#: Short requests that are always waiting.
CROWD = 6
#: Iterations within which a long request must finish; alone it needs less than a tenth of them.
ITERATIONS = 1500
#: A policy under which short prompts always go first.
STARVING = "fixed-priority"


class Crowded:
    """A scheduler with a long request and a client that always has short ones waiting."""

    def __init__(self, policy: str, mode: PreemptionMode, blocks: int, host: int) -> None:
        config = SchedulerConfig(
            blocks,
            BLOCK_SIZE,
            2,
            max_num_batched_tokens=16,
            max_num_seqs=4,
            max_queue_len=2 * CROWD,
            profiles=(STAGE,),
            preemption_mode=mode,
        )
        self.scheduler = Scheduler(config, 1, create_scheduling_policy(policy))
        self.scheduler.set_host_memory(host, ITERATION_S / 100)
        self.now = 0.0
        self.count = 0
        #: Tokens of each request so far, and those wanted.
        self.got: dict[str, int] = {}
        self.wanted: dict[str, int] = {}

    def submit(self, key: str, prompt: tuple[int, ...], answer: int) -> None:
        request = make_state("d", key, prompt, len(prompt), answer, SamplingParams(), (), 1 << 16)
        self.got[key], self.wanted[key] = 0, answer
        assert self.scheduler.submit_request(request, self.now) == []

    def crowd(self, tokens: int, answer: int, alike: bool) -> None:
        while self.scheduler._queues.num_waiting < CROWD:
            self.count += 1
            first = 1 if alike else self.count
            self.submit(f"s{self.count}", (first, *range(tokens - 1)), answer)

    def run_iteration(self) -> None:
        batch = self.scheduler.next_batch(self.now)
        self.now += ITERATION_S
        for emission in run_micro_batches(self.scheduler, batch, self.now):
            assert isinstance(emission.message, OutputToken)
            key = emission.message.key
            self.got[key] += 1
            assert (emission.message.finish_reason is None) == (self.got[key] < self.wanted[key])

    def serve(self, long: tuple[int, int], short: tuple[int, int], alike: bool) -> int:
        """Number of tokens that the long request gets in :data:`ITERATIONS` iterations."""
        self.crowd(*short, alike)
        self.submit("long", tuple(range(100, 100 + long[0])), long[1])
        for number in range(ITERATIONS):
            if self.got["long"] == self.wanted["long"]:
                break
            self.crowd(*short, alike)
            self.run_iteration()
            if number % 50 == 0:
                self.scheduler.validate()
        return self.got["long"]


@given(
    policy=st.sampled_from([name for name in SCHEDULING_POLICIES if name != STARVING]),
    mode=st.sampled_from(PREEMPTION_MODES),
    blocks=st.integers(16, 40),
    host=st.sampled_from([0, 8, 64]),
    prompt=st.integers(1, 48),
    answer=st.integers(1, 12),
    short=st.tuples(st.integers(2, 16), st.integers(1, 8)),
    alike=st.booleans(),
)
@settings(max_examples=25)
def test_no_policy_starves_a_long_request(
    policy: str,
    mode: PreemptionMode,
    blocks: int,
    host: int,
    prompt: int,
    answer: int,
    short: tuple[int, int],
    alike: bool,
) -> None:
    crowded = Crowded(policy, mode, blocks, host)
    assert crowded.serve((prompt, answer), short, alike) == answer
    for _, key in crowded.scheduler.live_requests:
        crowded.scheduler.cancel_request("d", key, crowded.now)
    while crowded.scheduler.live_requests:
        crowded.run_iteration()
    crowded.run_iteration()
    crowded.scheduler.validate()
    _, gauges = crowded.scheduler.collect_stats()
    assert gauges["scheduler_blocks_used"] == gauges["scheduler_host_blocks_used"] == 0


def test_fixed_priority_may_starve_long_prompts() -> None:
    """Shows that the test above would detect starvation."""
    assert Crowded(STARVING, "recompute", 16, 0).serve((40, 4), (4, 4), alike=False) == 0
