"""FastServe's worked example (§4.1): three requests on a server with one slot, by every policy.

The prompts of a, b and c take 5, 1 and 2 seconds, each further token 1; all generate two tokens and
arrive at once, in this order. The queues' quanta are 1, 2, 4 and 8 seconds. Iterations are not
interrupted.
"""

import pytest

from molink.facts.profile import Profile
from molink.facts.ring_times import RingTimes
from molink.scheduler.policies.answer_lengths import MIN_ANSWERS, AnswerLengths
from molink.scheduler.policies.base import SchedulingPolicy
from molink.scheduler.policies.create import SCHEDULING_POLICIES, create_scheduling_policy
from molink.scheduler.policies.gittins import Gittins
from molink.scheduler.prefix_tree import PrefixMatch
from molink.wire.messages.data_plane import SamplingParams
from tests.support.request_states import arrived, make_state

SECOND_PER_ROW = Profile(decode=((1, 1.0),), prefill=((1, 1.0), (8, 8.0)))
PROMPTS = {"a": 5, "b": 1, "c": 2}
ANSWER = 2

#: Schedules: (request, start, end) of each iteration.
FCFS = [("a", 0, 5), ("a", 5, 6), ("b", 6, 7), ("b", 7, 8), ("c", 8, 10), ("c", 10, 11)]
# All start in queue 1 and move to queue 2 after their prompts, a first.
MLFQ = [("a", 0, 5), ("b", 5, 6), ("c", 6, 8), ("a", 8, 9), ("b", 9, 10), ("c", 10, 11)]
# a joins queue 4, b queue 1, c queue 2. b moves to queue 2 at 1, behind c; c to queue 3 at 3.
SKIP_JOIN = [("b", 0, 1), ("c", 1, 3), ("b", 3, 4), ("c", 4, 5), ("a", 5, 10), ("a", 10, 11)]
# a stays in queue 4, b in queue 1, c in queue 2.
FIXED = [("b", 0, 1), ("b", 1, 2), ("c", 2, 4), ("c", 4, 5), ("a", 5, 10), ("a", 10, 11)]
# 6, 2 and 3 seconds remain.
SRPT = FIXED
# With a limit of two tokens, answers are assumed to be that long: the same as known lengths.
LIMITED = FIXED
# An answer of unknown length is expected to have one token, and then to double. The expected
# seconds per token are 5, 1 and 2 at first. After one token, two more are expected at a second
# each.
UNKNOWN = [("b", 0, 1), ("c", 1, 3), ("a", 3, 8), ("a", 8, 9), ("b", 9, 10), ("c", 10, 11)]
# Known answers of two tokens take 6, 2 and 3 seconds for the first, then one.
KNOWN = FIXED


def schedule(policy: SchedulingPolicy, most: int = ANSWER) -> list[tuple[str, float, float]]:
    """The schedule if clients allow at most ``most`` tokens."""
    now = 0.0
    policy.set_times(RingTimes((SECOND_PER_ROW,), (), 0))
    requests = []
    for number, (key, tokens) in enumerate(PROMPTS.items()):
        prompt = tuple(range(tokens))
        state = arrived(make_state("d", key, prompt, tokens, most, SamplingParams()))
        state.num_uncached = tokens
        policy.on_arrived(state, now)
        state.start_admission(number, [], PrefixMatch())
        requests.append(state)
    bars = []
    while requests:
        state = policy.order_running(requests, now)[0]
        policy.on_issued(state, now)
        seconds = float(len(state.tokens) - state.num_issued)
        state.num_issued, state.phase = len(state.tokens), "decode"
        bars.append((state.key, now, now + seconds))
        now += seconds
        policy.on_rows_returned(state, seconds, now)
        state.tokens.append(0)
        if state.num_generated == ANSWER:
            policy.on_removed(state, now)
            requests.remove(state)
    return bars


SCHEDULES = {
    "fcfs": (FCFS, 25 / 3),
    "cached-share": (FCFS, 25 / 3),  # nothing is cached
    "gittins": (LIMITED, 18 / 3),
    "mlfq": (MLFQ, 30 / 3),
    "skip-join-mlfq": (SKIP_JOIN, 20 / 3),
    "fixed-priority": (FIXED, 18 / 3),
    "srpt": (SRPT, 18 / 3),
}


def test_every_policy_has_a_worked_example() -> None:
    assert SCHEDULES.keys() >= set(SCHEDULING_POLICIES)


@pytest.mark.parametrize(
    ("name", "bars", "mean"), [(name, *found) for name, found in SCHEDULES.items()]
)
def test_worked_example(name: str, bars: list[tuple[str, float, float]], mean: float) -> None:
    assert schedule(create_scheduling_policy(name)) == bars
    ends = {key: end for key, _, end in bars}
    assert sum(ends.values()) / len(ends) == mean


def test_worked_example_of_srpt() -> None:
    lengths = AnswerLengths()
    for _ in range(MIN_ANSWERS):
        lengths.add_answer(2, ANSWER)
    policy = Gittins()
    policy.set_answer_lengths(lengths)
    assert schedule(policy, 16) == KNOWN


def test_worked_example_of_gittins() -> None:
    assert schedule(Gittins(), 16) == UNKNOWN
