"""Groups by cached share: proportional service without starvation."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from molink.scheduler.policies.cached_share import GROUPS, CachedShare
from molink.scheduler.request_state import RequestState
from molink.wire.messages.data_plane import SamplingParams
from tests.support.request_states import arrived, make_state


class Queue:
    """Waiting requests, admitted one by one."""

    def __init__(self) -> None:
        self.policy = CachedShare()
        self.waiting: list[RequestState] = []
        self.count = 0

    def arrive(self, cached: int, peer: str = "d") -> RequestState:
        """Add a request with ``cached`` of its 100 tokens."""
        state = arrived(make_state(peer, str(self.count), (1,) * 100, 100, 9, SamplingParams()))
        state.num_uncached = 100 - cached
        self.count += 1
        self.waiting.append(state)
        self.policy.on_arrived(state, 0.0)
        return state

    def admit(self) -> RequestState:
        state = self.policy.choose_admitted(self.waiting, 0.0)
        assert state is not None
        assert self.policy.choose_admitted(self.waiting, 0.0) is state  # a query changes no state
        self.waiting.remove(state)
        self.policy.on_issued(state, 0.0)
        self.policy.on_issued(state, 0.0)
        return state

    def end(self, state: RequestState) -> None:
        self.policy.on_removed(state, 0.0)


def test_groups_are_served_in_proportion() -> None:
    queue = Queue()
    for _ in range(400):
        for cached in (63, 5):  # groups 6 and 0
            queue.arrive(cached)
    served = Counter(queue.admit().num_uncached for _ in range(400))
    assert served == {37: 350, 95: 50}


def test_a_group_is_first_come_first_served() -> None:
    queue = Queue()
    first = queue.arrive(61)
    queue.arrive(69)
    assert queue.admit() is first


def test_another_client_comes_by_its_share() -> None:
    """Neither its cached prompts nor its preempted requests overtake the first client."""
    queue = Queue()
    preempted = queue.arrive(90, "other")
    queue.policy.on_issued(preempted, 0.0)
    first = queue.arrive(0)
    queue.arrive(95, "other")
    queue.waiting.sort(key=lambda state: state.peer)  # an order that fair shares may give
    assert queue.admit() is first


def test_preempted_requests_go_first() -> None:
    queue = Queue()
    state = queue.arrive(0)
    queue.admit()
    queue.arrive(99)
    queue.waiting.insert(0, state)
    assert queue.admit() is state


def test_an_idle_group_earns_no_credit() -> None:
    queue = Queue()
    for _ in range(300):
        queue.arrive(99)
    for _ in range(200):
        queue.admit()
    late = [queue.arrive(0) for _ in range(20)]
    served = [queue.admit() for _ in range(22)]
    assert sum(state in late for state in served) == 2


def test_ended_requests_are_dropped() -> None:
    queue = Queue()
    requests = [queue.arrive(50), queue.arrive(0)]
    queue.end(queue.admit())
    queue.end(requests[1])
    assert not queue.policy._groups
    assert not queue.policy._admitted


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.integers(0, 100))
def test_no_request_starves(before: list[int], cached: int) -> None:
    """Under any later arrivals."""
    queue = Queue()
    for each in before:
        queue.arrive(each)
    mine = queue.arrive(cached)
    group = min(GROUPS - 1, GROUPS * cached // 100)
    ahead = sum(min(GROUPS - 1, GROUPS * each // 100) == group for each in before)
    # While it waits, group g gets at most g + 1 admissions for each one of its own group, plus one.
    most = sum((other + 1) / (group + 1) * (ahead + 1) + 1 for other in range(GROUPS))
    for _ in range(int(most) + 1):
        for other in (99, 85, 0, 35):
            queue.arrive(other)
        if queue.admit() is mine:
            return
    raise AssertionError(f"not within {most} admissions")
