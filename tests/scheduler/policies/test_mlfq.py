"""Multi-level feedback queues: positions, and bounds under any load."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.facts.profile import Profile
from molink.facts.ring_times import RingTimes
from molink.scheduler.policies.mlfq import (
    LEVELS,
    MIN_QUANTUM_RATIO,
    PROMOTION_QUANTA,
    FixedPriority,
    Mlfq,
    SkipJoinMlfq,
)
from molink.scheduler.prefix_tree import PrefixMatch
from molink.scheduler.request_state import RequestState
from molink.wire.messages.data_plane import SamplingParams
from tests.support.request_states import arrived, make_state

#: An iteration takes 1 s, each prompt row 1 s.
TIMES = RingTimes((Profile(decode=((1, 1.0),), prefill=((1, 1.0), (8, 8.0))),), (), 0)


def make(
    policy: Mlfq, key: str, now: float = 0.0, tokens: int = 1, cached: int = 0
) -> RequestState:
    """A new request with a position."""
    prompt = tuple(range(tokens))
    state = arrived(make_state("d", key, prompt, tokens, 1000, SamplingParams()), now)
    state.num_uncached = tokens - cached
    policy.on_arrived(state, now)
    state.start_admission(0, [], PrefixMatch(num_tokens=cached))
    return state


def run(policy: Mlfq, state: RequestState, now: float, seconds: float) -> None:
    """An iteration with all remaining rows."""
    state.num_issued = len(state.tokens)
    policy.on_issued(state, now)
    policy.on_rows_returned(state, seconds, now + seconds)
    state.tokens.append(0)


def order(policy: Mlfq, states: Sequence[RequestState], now: float) -> str:
    return "".join(state.key for state in policy.order_running(states, now))


def skip_join() -> SkipJoinMlfq:
    policy = SkipJoinMlfq()
    policy.set_times(TIMES)
    return policy


def test_a_used_quantum_demotes_the_request() -> None:
    policy = skip_join()
    a, b = make(policy, "a"), make(policy, "b")
    assert order(policy, [b, a], 0.0) == "ab"
    run(policy, a, 0.0, 0.75)
    assert order(policy, [a, b], 0.75) == "ab"
    run(policy, a, 0.75, 0.25)
    assert order(policy, [a, b], 1.0) == "ba"


def test_skip_join_covers_the_uncached_prompt() -> None:
    policy = skip_join()
    requests = [
        make(policy, "a", tokens=9),  # 9 s: the fifth queue, 16 s
        make(policy, "b", tokens=5),  # the fourth, 8 s
        make(policy, "c", tokens=9, cached=7),  # the second
        make(policy, "d", tokens=9, cached=6),  # the third
        make(policy, "e", tokens=1),  # the first
    ]
    assert order(policy, requests, 0.0) == "ecdba"


def test_demotion_covers_the_rest_of_the_prompt() -> None:
    policy = skip_join()
    a = make(policy, "a", tokens=9, cached=8)
    a.tokens += range(7)
    a.num_issued = 8
    policy.on_issued(a, 0.0)
    policy.on_rows_returned(a, 1.0, 1.0)  # 8 rows are left: the fourth queue
    assert policy.rank_request(a, 1.0)[0] == 3


def test_concurrent_rows_count_once() -> None:
    policy = skip_join()
    a = make(policy, "a", tokens=4)  # the third queue, 4 s
    a.num_issued = 4
    for seq in (1, 2):
        a.in_flight[seq] = 0
        policy.on_issued(a, 0.0)
    del a.in_flight[1]
    policy.on_rows_returned(a, 3.0, 3.0)
    del a.in_flight[2]
    policy.on_rows_returned(a, 3.5, 3.5)
    assert policy.rank_request(a, 3.5)[0] == 2
    run(policy, a, 3.5, 0.5)
    assert policy.rank_request(a, 4.0)[0] == 3


def test_a_waiting_request_is_promoted_for_its_own_quantum() -> None:
    policy = skip_join()
    a, b = make(policy, "a", tokens=2), make(policy, "b")
    patience = PROMOTION_QUANTA * 2.0  # quanta of its queue
    assert order(policy, [a, b], patience - 0.1) == "ba"
    c = make(policy, "c", now=patience + 0.5)
    now = patience + 1.0
    assert order(policy, [a, b, c], now) == "bac"
    run(policy, a, now, 1.5)  # longer than the first quantum
    now += 1.5
    d = make(policy, "d", now=now)
    assert order(policy, [a, b, c, d], now) == "bacd"
    run(policy, a, now, 0.5)
    assert order(policy, [a, b, c, d], now + 0.5) == "bcda"


def test_requests_in_flight_are_not_promoted() -> None:
    policy = skip_join()
    a, b = make(policy, "a", tokens=2), make(policy, "b")
    a.in_flight[1] = 0
    policy.on_issued(a, 0.0)
    assert order(policy, [a, b], 99.0) == "ba"


def test_stalled_requests_are_not_promoted() -> None:
    policy = skip_join()
    a, b = make(policy, "a", tokens=2), make(policy, "b")
    a.num_credited = -1000
    assert a.is_stalled
    assert order(policy, [a, b], 99.0) == "ba"


def test_plain_mlfq_ignores_prompts() -> None:
    policy = Mlfq()
    policy.set_times(TIMES)
    a, b = make(policy, "a", tokens=9), make(policy, "b", tokens=1)
    assert order(policy, [b, a], 0.0) == "ab"


def test_quanta_follow_measured_iterations_without_profiles() -> None:
    policy = SkipJoinMlfq()
    a = make(policy, "a", tokens=100)
    run(policy, a, 0.0, 0.5)
    run(policy, a, 0.5, 0.25)
    assert [policy.quantum_s(level) for level in (0, 1)] == [0.25, 0.5]


def test_the_last_queue_does_not_demote() -> None:
    policy = skip_join()
    a = make(policy, "a", tokens=1 << 20)
    assert policy.rank_request(a, 0.0)[0] == LEVELS - 1
    run(policy, a, 0.0, 1e6)
    assert policy.rank_request(a, 0.0)[0] == LEVELS - 1


class Server:
    """Runs one request at a time, each iteration to its end; answers are endless."""

    def __init__(self, policy: Mlfq) -> None:
        self.policy = policy
        self.now = 0.0
        self.states: list[RequestState] = []
        #: Since when each request has waited.
        self.since: dict[RequestState, float] = {}
        #: Each wait: the request, its begin and its end.
        self.waits: list[tuple[RequestState, float, float]] = []

    def add(self, state: RequestState) -> None:
        self.states.append(state)
        self.since[state] = self.now

    def step(self) -> None:
        state = self.policy.order_running(self.states, self.now)[0]
        self.waits.append((state, self.since[state], self.now))
        seconds = float(len(state.tokens) - state.num_issued)
        run(self.policy, state, self.now, seconds)
        self.now += seconds
        self.since[state] = self.now


@pytest.mark.parametrize("alpha", [0.3, 1e9])
def test_a_long_prompt_progresses_among_endless_short_ones(alpha: float) -> None:
    """Once promoted, it waits only for earlier promotions."""
    policy = SkipJoinMlfq(alpha)
    policy.set_times(TIMES)
    server = Server(policy)
    long = make(policy, "long", tokens=8)
    server.add(long)
    for number in range(400):
        server.add(make(policy, str(number), server.now))
        server.step()
    begun = [end for state, _, end in server.waits if state is long]
    patience = PROMOTION_QUANTA * 8.0
    if alpha < 1:  # another request waits every second; it is promoted after 32 s, for 2 s
        assert patience < begun[0] <= patience + 2 * (patience - 32)
    else:
        assert not begun


def test_a_freshly_computed_request_is_not_preempted() -> None:
    policy = skip_join()
    new, old = make(policy, "new"), make(policy, "old", tokens=8)
    new.phase, old.phase = "waiting", "decode"
    old.num_issued = 8
    assert policy.choose_preempted(new, [old], 1, 0.0) is None
    while policy.quantum_s(int(policy.rank_request(old, 0.0)[0])) < MIN_QUANTUM_RATIO * 8.0:
        assert policy.choose_preempted(new, [old], 1, 0.0) is None
        policy.on_issued(old, 0.0)
        policy.on_rows_returned(old, 1e3, 1e3)
    found = policy.choose_preempted(new, [old], 1, 0.0)
    assert found is old


def test_fixed_priority_preempts_for_any_shorter_prompt() -> None:
    policy = FixedPriority()
    policy.set_times(TIMES)
    new, old = make(policy, "new"), make(policy, "old", tokens=8)
    new.phase, old.phase = "waiting", "decode"
    found = policy.choose_preempted(new, [old], 1, 0.0)
    assert found is old
    old.phase, new.phase = "waiting", "decode"
    assert policy.choose_preempted(old, [new], 1, 0.0) is None


def test_the_first_decode_preempts_the_last() -> None:
    policy = skip_join()
    a, b = make(policy, "a"), make(policy, "b")
    a.phase = b.phase = "decode"
    found = policy.choose_preempted(a, [b], 2, 0.0)
    assert found is b
    assert policy.choose_preempted(b, [a], 2, 0.0) is None


@given(
    prompts=st.lists(st.integers(1, 2), min_size=1, max_size=6),
    alpha=st.sampled_from([0.0, 0.3, 5.0]),
    every=st.integers(1, 2),
    naive=st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_no_request_starves(prompts: list[int], alpha: float, every: int, naive: bool) -> None:
    """After a bounded wait only requests promoted earlier precede it, each once.

    The wait is ``alpha`` or :data:`PROMOTION_QUANTA` quanta of its queue; each promoted request
    runs for at most its own quantum and an iteration, while others keep arriving.
    """
    policy = Mlfq(alpha) if naive else SkipJoinMlfq(alpha)
    policy.set_times(TIMES)
    server = Server(policy)
    for number, tokens in enumerate(prompts):
        server.add(make(policy, str(number), 0.0, tokens))
    came = [0.0] * len(prompts)
    homes: dict[RequestState, list[int]] = {state: [] for state in server.states}
    for number in range(300):
        for state in homes:
            homes[state].append(policy._positions[state].home_level)
        if number % every == 0:
            came.append(server.now)
            server.add(make(policy, "new", server.now))
        server.step()
    waits = [(state, since, until) for state, since, until in server.waits if state in homes]
    waits += [(state, server.since[state], server.now) for state in homes]
    for state, since, until in waits:
        longest = policy.quantum_s(max(homes[state]))
        over = since + max(alpha, PROMOTION_QUANTA * longest)
        before = sum(1 for each in came if each <= over)
        assert until <= over + before * (longest + 2)
