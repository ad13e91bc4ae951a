"""One client sends requests by the thousand and cancels half of them; another one is served."""

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
#: What a client can fall behind by, half of it (`molink.scheduler.fair_shares`).
U = W_INPUT * len(PROMPT) + W_OUTPUT * SLOTS * ANSWER


def request(key: str, owner: str, client: str, prompt: tuple[int, ...] = PROMPT) -> RequestState:
    return make_state(owner, key, prompt, len(prompt), ANSWER, SamplingParams(), client=client)


class Flooded:
    """A head, one who floods it, and another one who has requests waiting all the time."""

    def __init__(self, hostile: str, policy: str) -> None:
        config = SchedulerConfig(64, 16, 2, 128, max_num_seqs=SLOTS, max_queue_len=32)
        self.head = Scheduler(config, 1, create_scheduling_policy(policy))
        self._random = Random(3)
        self._named = hostile == "a name each"
        self._owner = "other daemon" if hostile == "a daemon of its own" else "d"
        self._quiet = "quiet daemon" if self._named else "d"
        self.now = 0.0
        self.sent = self.refused = 0
        #: Units that were served to each.
        self.flood = self.quiet = 0
        #: Requests of the quiet one, and whether they have a token.
        self.pending: dict[str, bool] = {}

    def send(self) -> None:
        """One of the flood, which may be cancelled at once."""
        key, client = f"f{self.sent}", f"name {self.sent}" if self._named else "greedy"
        self.sent += 1
        try:
            self.head.submit_request(request(key, self._owner, client), self.now)
        except Overloaded:
            self.refused += 1
        if self._random.random() < 0.5:
            self.head.cancel_request(self._owner, key, self.now)

    def ask(self) -> None:
        """The quiet one keeps some waiting; it is never refused, and never gives way."""
        while len(self.pending) < 2 * SLOTS:
            key = f"q{self._random.random()}"
            prompt = tuple(self._random.randrange(1000, 2000) for _ in PROMPT)
            told = self.head.submit_request(request(key, self._quiet, "quiet", prompt), self.now)
            assert not any(each.message.key in self.pending for each in told)
            self.pending[key] = False

    def turn(self) -> None:
        self.now += 0.01
        for emission in run_micro_batches(self.head, self.head.next_batch(self.now), self.now):
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
        """The flood cancels all that it has left, and the quiet one gets its answers."""
        for peer, key in self.head.live_requests:
            if key not in self.pending:
                self.head.cancel_request(peer, key, self.now)
        while self.head.live_requests:
            self.turn()
        self.turn()


@pytest.mark.parametrize("policy", ["fcfs", "skip-join-mlfq", "gittins"])
@pytest.mark.parametrize("hostile", ["one client", "a name each", "a daemon of its own"])
def test_a_flood_neither_starves_others_nor_leaks(hostile: str, policy: str) -> None:
    flooded = Flooded(hostile, policy)
    least = worst = 0
    while flooded.sent < FLOOD:
        for _ in range(20):
            flooded.send()
        flooded.ask()  # the queue is full of the flood's
        flooded.turn()
        behind = flooded.flood - flooded.quiet
        least = min(least, behind)
        worst = max(worst, behind - least)
    flooded.head.validate()
    assert flooded.refused > FLOOD // 4
    # Its prompts are counted when they are through here; the head counts them as they begin.
    assert worst <= 2 * U + W_INPUT * SLOTS * len(PROMPT)
    assert flooded.quiet > 4 * U
    flooded.cease()
    assert not flooded.pending
    flooded.head.validate()
    _, gauges = flooded.head.collect_stats()
    assert (
        gauges["scheduler_blocks_used"],
        gauges["scheduler_waiting"],
        gauges["scheduler_clients"],
    ) == (0, 0, 0)
    assert flooded.head._queues.fair_shares.num_counters <= 2 + 256
