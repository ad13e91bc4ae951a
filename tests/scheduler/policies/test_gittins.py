"""The Gittins index: ranking by estimated answer lengths."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.facts.profile import Profile
from molink.facts.ring_times import RingTimes
from molink.scheduler.blocks import HostCopy
from molink.scheduler.policies.answer_lengths import MAX_SIMILAR, AnswerLengths
from molink.scheduler.policies.gittins import Gittins
from molink.scheduler.policies.mlfq import ALPHA, PROMOTION_QUANTA
from molink.scheduler.prefix_tree import PrefixMatch
from molink.scheduler.request_state import RequestState
from molink.wire.messages.data_plane import SamplingParams
from tests.support.request_states import arrived, make_state

#: An iteration takes 1 s, each prompt row 1 s.
STAGE = Profile(decode=((1, 1.0), (64, 1.0)), prefill=((1, 1.0), (8, 8.0)))
TIMES = RingTimes((STAGE,), (), 0)


def gittins(*answers: tuple[int, int], room: int = 64, places: int = 1) -> Gittins:
    """A policy that knows enough answers of each (prompt length, answer length)."""
    lengths = AnswerLengths()
    for prompt, answer in answers * MAX_SIMILAR:
        lengths.add_answer(prompt, answer)
    policy = Gittins()
    policy.set_answer_lengths(lengths)
    policy.set_capacity(room, places)
    policy.set_times(TIMES)
    return policy


def make(
    policy: Gittins,
    key: str,
    tokens: int = 1,
    now: float = 0.0,
    cached: int = 0,
    most: int = 1 << 12,
) -> RequestState:
    """A new waiting request."""
    prompt = tuple(range(tokens))
    state = arrived(make_state("d", key, prompt, tokens, most, SamplingParams()), now)
    state.num_uncached = tokens - cached
    policy.on_arrived(state, now)
    return state


def run(policy: Gittins, state: RequestState, now: float, tokens: int = 1) -> float:
    """Run iterations of 1 s, the first with the prompt; returns the time after them."""
    if state.phase == "waiting":
        state.start_admission(0, [], PrefixMatch(num_tokens=len(state.tokens) - state.num_uncached))
    for _ in range(tokens):
        seconds = float(len(state.tokens) - state.num_issued)
        state.num_issued, state.phase = len(state.tokens), "decode"
        policy.on_issued(state, now)
        now += seconds
        policy.on_rows_returned(state, seconds, now)
        state.tokens.append(0)
    return now


def order(policy: Gittins, states: list[RequestState], now: float = 0.0) -> str:
    return "".join(state.key for state in policy.order_running(states, now))


def test_short_uncached_prompts_go_first() -> None:
    policy = gittins()
    requests = [make(policy, "a", 16), make(policy, "b", 4), make(policy, "c", 16, cached=15)]
    assert order(policy, requests) == "cba"


def test_similar_prompts_predict_short_answers() -> None:
    policy = gittins((3, 100), (4, 2))
    assert order(policy, [make(policy, "long", 3), make(policy, "s", 4)]) == "slong"


def test_max_tokens_bounds_the_estimate() -> None:
    policy = gittins((4, 100))
    requests = [make(policy, "any", 4), make(policy, "short", 4, most=2)]
    assert order(policy, requests) == "shortany"
    now = run(policy, requests[1], 0.0)
    assert order(policy, requests, now) == "shortany"


def test_answers_are_learned_as_requests_end() -> None:
    policy = gittins()
    for _ in range(MAX_SIMILAR):
        for tokens, answer in ((3, 40), (4, 2)):
            state = make(policy, "", tokens)
            run(policy, state, 0.0, answer)
            policy.on_answered(state)
            policy.on_removed(state, 0.0)
    assert order(policy, [make(policy, "long", 3), make(policy, "s", 4)]) == "slong"


def test_cancelled_answers_are_not_learned() -> None:
    policy = gittins((4, 2))
    for _ in range(999):
        state = make(policy, "", 4)
        run(policy, state, 0.0)
        policy.on_removed(state, 0.0)
    assert policy._answer_lengths.longer_answers(0, 4) == [2] * MAX_SIMILAR


def test_least_attained_service_without_data() -> None:
    policy = gittins()
    old, new = make(policy, "o"), make(policy, "n")
    now = run(policy, old, 0.0, 8)
    run(policy, new, now, 1)
    assert order(policy, [old, new], now) == "no"


def test_nearly_finished_requests_precede_new_ones() -> None:
    policy = gittins((1, 8))
    old, new = make(policy, "o"), make(policy, "n")
    now = run(policy, old, 0.0, 7)
    run(policy, new, now, 1)
    assert order(policy, [old, new], now) == "on"


def test_requests_beyond_the_usual_length_go_last() -> None:
    policy = gittins((1, 8))
    old, new = make(policy, "o"), make(policy, "n")
    now = run(policy, old, 0.0, 9)
    run(policy, new, now, 1)
    assert order(policy, [old, new], now) == "no"


@pytest.mark.parametrize(("prompt", "gives_way"), [(1, True), (32, False)])
def test_preemption_accounts_for_the_restore_cost(prompt: int, gives_way: bool) -> None:
    """The running request has 30 tokens left; the waiting one is expected to have 3."""
    policy = gittins((prompt, 32), (2000, 3), places=32, room=1 << 20)
    runs, waits = make(policy, "r", prompt), make(policy, "w", 2000, cached=1999)
    now = run(policy, runs, 0.0, 2)
    found = policy.choose_preempted(waits, [runs], 1, now)
    assert (found is not None) == gives_way


def test_host_memory_makes_preemption_cheaper() -> None:
    policy = gittins((32, 32), (2000, 3), places=32, room=1 << 20)
    policy.set_restore_cost(
        lambda state: 0.01 if state.host_copy or state.phase != "waiting" else None
    )
    runs, waits = make(policy, "r", 32), make(policy, "w", 2000, cached=1999)
    now = run(policy, runs, 0.0, 2)
    found = policy.choose_preempted(waits, [runs], 1, now)
    assert found is not None
    # Restoring it from host memory is quicker than recomputing it.
    runs.phase = "waiting"
    recomputed = policy.rank_request(runs, now)
    runs.host_copy = HostCopy((0,), 33)
    assert policy.rank_request(runs, now) < recomputed


def test_a_partial_host_copy_leaves_the_rest_to_compute() -> None:
    """Otherwise a waiting request would seem nearer to its end than it is after its readmission."""
    policy = gittins((32, 4), places=32, room=1 << 20)
    policy.set_restore_cost(lambda state: 0.5 if state.host_copy is not None else None)
    state = make(policy, "a", 32)
    policy.on_issued(state, 0.0)
    state.start_admission(0, [], PrefixMatch())
    state.num_issued = 12
    assert policy._next_token_s(state) == pytest.approx(19)
    assert policy._restore_s(state) == pytest.approx(12)
    state.phase = "waiting"
    assert policy._next_token_s(state) == pytest.approx(32)
    state.host_copy = HostCopy((0,), 12)
    assert policy._next_token_s(state) == pytest.approx(0.5 + 19)


def test_a_single_early_end_does_not_set_the_index() -> None:
    """Of 64 similar requests, one ends next, and the others after 270 more tokens."""
    lengths = AnswerLengths()
    for answer in (31, *[300] * (MAX_SIMILAR - 1)):
        lengths.add_answer(1, answer)
    for _ in range(MAX_SIMILAR):
        lengths.add_answer(2000, 100)
    policy = Gittins()
    policy.set_answer_lengths(lengths)
    policy.set_capacity(1 << 20, 1)
    policy.set_times(TIMES)
    old, new = make(policy, "o"), make(policy, "n", 2000, cached=1999)
    now = run(policy, old, 0.0, 30)
    assert order(policy, [old, new], now) == "no"


def test_memory_share_sets_the_ring_share() -> None:
    policy = gittins((32, 10), (1, 10), places=64)
    large, small = make(policy, "l", 32, cached=31), make(policy, "s")
    assert order(policy, [large, small]) == "sl"


def test_promoted_requests_preempt_others() -> None:
    policy = gittins()
    runs, waits = make(policy, "r"), make(policy, "w", 32)
    run(policy, runs, 0.0)
    assert policy.choose_preempted(waits, [runs], 1, 1.0) is None
    now = run(policy, runs, 1.0, PROMOTION_QUANTA * 33)
    found = policy.choose_preempted(waits, [runs], 1, now)
    assert found is runs


def test_a_long_idle_request_is_promoted_for_its_service_time() -> None:
    policy = gittins()
    a, b = make(policy, "a", 4), make(policy, "b")
    patience = PROMOTION_QUANTA * 5.0  # a prompt of four rows and one token
    assert order(policy, [a, b], patience - 0.1) == "ba"
    now = patience + 32.0
    c = make(policy, "c", now=now)
    assert order(policy, [a, c], now) == "ac"
    now = run(policy, a, now)  # four seconds
    assert order(policy, [a, c], now) == "ac"
    now = run(policy, a, now)
    assert order(policy, [a, c], now) == "ca"


def test_stalled_requests_are_not_promoted() -> None:
    policy = gittins()
    a, b = make(policy, "a", 4), make(policy, "b")
    a.num_credited = -(1 << 20)
    assert a.is_stalled
    assert order(policy, [a, b], 1e3) == "ba"


def test_next_scheduled_is_when_earlier_requests_are_done() -> None:
    """Four slots and six requests; a token costs a quarter of a second of the ring."""
    policy = gittins((1, 4), places=4, room=1 << 20)
    requests = [make(policy, key) for key in "abcdef"]
    scheduled = policy.estimate_next_scheduled(requests[3:], 4, 0.0)
    # e is the first that doesn't fit; a row and four tokens precede f.
    assert [scheduled[state] for state in requests[3:]] == [0.0, 0.0, 2.0]


def test_next_scheduled_is_at_most_the_promotion() -> None:
    policy = gittins((1, 4), (50, 400), places=1, room=1 << 20)
    make(policy, "a", 50)
    last = make(policy, "b", 50)
    short = make(policy, "c")
    assert policy.estimate_next_scheduled([last], 1, 0.0)[last] > 400
    rested = PROMOTION_QUANTA * policy._current_state(last).wall_s - 3
    assert policy.estimate_next_scheduled([last, short], 1, rested) == {
        last: pytest.approx(3),
        short: 0.0,
    }


def test_a_token_costs_the_mean_memory_share() -> None:
    """Of 64 tokens' memory, a request that grows from 1 to 18 tokens holds 9.5."""
    policy = gittins((1, 17), places=64)
    state = make(policy, "a")
    standing = policy._current_state(state)
    assert standing.wall_s == pytest.approx(1 + 17)
    assert standing.work_s == pytest.approx(1 + 17 * 9.5 / 64)


def test_tokens_of_earlier_epochs_count_as_answer() -> None:
    """6 of the expected 100 tokens exist, and at most 2 more are allowed."""
    policy = gittins((4, 100))
    tokens = tuple(range(10))
    state = arrived(make_state("d", "resumed", tokens, 4, 2, SamplingParams()))
    state.num_uncached = len(tokens)
    policy.on_arrived(state, 0.0)
    assert policy._current_state(state).wall_s == 10 + 2


def test_promotion_takes_at_least_alpha() -> None:
    """Sixteen iterations of a fast ring take much less time than ``ALPHA``."""
    policy = gittins()
    quick = Profile(decode=((1, 1e-3), (64, 1e-3)), prefill=((1, 1e-3), (8, 8e-3)))
    policy.set_times(RingTimes((quick,), (), 0))
    a, b = make(policy, "a", 4), make(policy, "b")
    assert order(policy, [a, b], ALPHA - 0.01) == "ba"
    assert order(policy, [a, b], ALPHA) == "ab"


def test_changed_costs_re_evaluate_all_requests() -> None:
    """A long running prompt, and a short one with a longer answer."""
    policy = gittins((64, 2), (1, 20))
    long, short = make(policy, "l", 64), make(policy, "s", 1)
    long.start_admission(0, [], PrefixMatch())
    assert order(policy, [long, short]) == "ls"
    slow = Profile(decode=STAGE.decode, prefill=((1, 1000.0), (2, 2000.0)))
    policy.set_times(RingTimes((slow,), (), 0))
    assert order(policy, [long, short]) == "sl"


def test_each_chunk_reduces_the_remaining_prompt() -> None:
    policy = gittins((64, 2), (32, 2))
    a, b = make(policy, "a", 64), make(policy, "b", 32)
    a.start_admission(0, [], PrefixMatch())
    assert order(policy, [a, b]) == "ba"
    a.num_issued = 48
    policy.on_issued(a, 0.0)
    assert order(policy, [a, b]) == "ab"


@given(
    prompts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    answers=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 20)), max_size=4),
    every=st.integers(1, 2),
)
@settings(max_examples=12, deadline=None)
def test_no_request_starves(prompts: list[int], answers: list[tuple[int, int]], every: int) -> None:
    """After that time, it waits only for earlier promotions, each for one service time."""
    policy, now = gittins(*answers), 0.0
    requests = [make(policy, str(number), tokens) for number, tokens in enumerate(prompts)]
    watched, came = list(requests), [0.0] * len(requests)
    since, longest = dict.fromkeys(requests, 0.0), dict.fromkeys(requests, 0.0)
    waits: list[tuple[RequestState, float, float]] = []
    for number in range(300):
        if number % every == 0:
            came.append(now)
            requests.append(make(policy, "new", now=now))
            since[requests[-1]] = longest[requests[-1]] = now * 0
        for state in requests:
            longest[state] = max(longest[state], policy._current_state(state).wall_s)
        state = policy.order_running(requests, now)[0]
        waits.append((state, since[state], now))
        now = since[state] = run(policy, state, now)
    waits += [(state, since[state], now) for state in watched]
    most = max(longest.values())
    for state, start, end in waits:
        if state in watched:
            over = start + PROMOTION_QUANTA * longest[state]
            before = sum(1 for each in came if each <= over)
            assert end <= max(over, start + 1) + before * (most + 8)
