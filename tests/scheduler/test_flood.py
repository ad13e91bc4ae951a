"""A client floods the scheduler and cancels half of its requests; another client is served."""

from random import Random

import pytest

from molink.errors import Overloaded
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.fair_shares import W_INPUT, W_OUTPUT
from molink.scheduler.policies.create import create_scheduling_policy
from molink.scheduler.request_state import RequestState
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import OutputToken
from tests.support.micro_batches import run_micro_batches
from tests.support.request_states import make_state

FLOOD, SLOTS, ANSWER = 10_000, 4, 8
PROMPT = tuple(range(48))
#: Twice a client's maximum deficit (:mod:`molink.scheduler.fair_shares`).
U = W_INPUT * len(PROMPT) + W_OUTPUT * SLOTS * ANSWER


def request(key: str, peer: str, client: str, prompt: tuple[int, ...] = PROMPT) -> RequestState:
    return make_state(peer, key, prompt, len(prompt), ANSWER, SamplingParams(), client=client)


class Flooded:
    """A scheduler, a flooding client, and a quiet one that always has waiting requests."""

    def __init__(self, hostile: str, policy: str) -> None:
        config = SchedulerConfig(64, 16, 2, 128, max_num_seqs=SLOTS, max_queue_len=32)
        self.scheduler = Scheduler(config, 1, create_scheduling_policy(policy))
        self._random = Random(3)
        self._named = hostile == "a name each"
        self._peer = "other peer" if hostile == "another peer" else "d"
        self._quiet = "quiet peer" if self._named else "d"
        self.now = 0.0
        self.sent = self.refused = 0
        #: Units of service of each client.
        self.flood = self.quiet = 0
        #: The quiet client's requests, and whether they have a token.
        self.pending: dict[str, bool] = {}

    def send(self) -> None:
        """Send a request of the flood; half of them are cancelled at once."""
        key, client = f"f{self.sent}", f"name {self.sent}" if self._named else "greedy"
        self.sent += 1
        try:
            self.scheduler.submit_request(request(key, self._peer, client), self.now)
        except Overloaded:
            self.refused += 1
        if self._random.random() < 0.5:
            self.scheduler.cancel_request(self._peer, key, self.now)

    def ask(self) -> None:
        """Keep some of the quiet client's requests waiting; none is rejected or preempted."""
        while len(self.pending) < 2 * SLOTS:
            key = f"q{self._random.random()}"
            prompt = tuple(self._random.randrange(1000, 2000) for _ in PROMPT)
            told = self.scheduler.submit_request(
                request(key, self._quiet, "quiet", prompt), self.now
            )
            assert not any(each.message.key in self.pending for each in told)
            self.pending[key] = False

    def run_iteration(self) -> None:
        self.now += 0.01
        for emission in run_micro_batches(
            self.scheduler, self.scheduler.next_batch(self.now), self.now
        ):
            key = emission.message.key
            assert isinstance(emission.message, OutputToken)
            if key not in self.pending:
                self.flood += W_OUTPUT
                continue
            self.quiet += W_OUTPUT + (0 if self.pending[key] else W_INPUT * len(PROMPT))
            self.pending[key] = True
            if emission.message.finish_reason:
                del self.pending[key]

    def cease(self) -> None:
        """Cancel the flood, after which the quiet client gets its answers."""
        for peer, key in self.scheduler.live_requests:
            if key not in self.pending:
                self.scheduler.cancel_request(peer, key, self.now)
        while self.scheduler.live_requests:
            self.run_iteration()
        self.run_iteration()


@pytest.mark.parametrize("policy", ["fcfs", "skip-join-mlfq", "gittins"])
@pytest.mark.parametrize("hostile", ["one client", "a name each", "another peer"])
def test_a_flood_neither_starves_others_nor_leaks(hostile: str, policy: str) -> None:
    flooded = Flooded(hostile, policy)
    least = worst = 0
    while flooded.sent < FLOOD:
        for _ in range(20):
            flooded.send()
        flooded.ask()  # the queue is full of the flood's requests
        flooded.run_iteration()
        behind = flooded.flood - flooded.quiet
        least = min(least, behind)
        worst = max(worst, behind - least)
    flooded.scheduler.validate()
    assert flooded.refused > FLOOD // 4
    # The test counts prompts when they have been computed, the scheduler when they start.
    assert worst <= 2 * U + W_INPUT * SLOTS * len(PROMPT)
    assert flooded.quiet > 4 * U
    flooded.cease()
    assert not flooded.pending
    flooded.scheduler.validate()
    _, gauges = flooded.scheduler.collect_stats()
    assert (
        gauges["scheduler_blocks_used"],
        gauges["scheduler_waiting"],
        gauges["scheduler_clients"],
    ) == (0, 0, 0)
    assert flooded.scheduler._queues.fair_shares.num_counters <= 2 + 256
