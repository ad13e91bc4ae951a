"""Fair shares of peers and clients: exact order, and the bound of the deficit."""

from collections import Counter, deque
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from molink.scheduler.fair_shares import (
    MAX_IDLE_COUNTERS,
    W_INPUT,
    W_OUTPUT,
    FairShares,
    VirtualTokenCounters,
)
from molink.scheduler.prefix_tree import PrefixMatch
from molink.scheduler.request_state import RequestState
from molink.wire.messages.data_plane import SamplingParams
from tests.support.request_states import arrived, make_state


def state_of(
    key: str, client: str = "", peer: str = "d", tokens: int = 1, priority: int = 0
) -> RequestState:
    prompt = (1,) * tokens
    return arrived(
        make_state(
            peer, key, prompt, tokens, 99, SamplingParams(), client=client, priority=priority
        )
    )


def admit(shares: FairShares, state: RequestState) -> None:
    state.start_admission(0, [], PrefixMatch())
    shares.on_admitted(state)


def end(shares: FairShares, state: RequestState) -> None:
    shares.on_removed(state)
    state.phase = "gone"


def arrive(shares: FairShares, *states: RequestState) -> list[RequestState]:
    for state in states:
        shares.on_arrived(state)
    return list(states)


def keys(states: list[RequestState]) -> list[str]:
    return [state.key for state in states]


def test_the_least_served_client_goes_first() -> None:
    shares = FairShares()
    a0, a1, b0, b1 = arrive(
        shares,
        state_of("a0", "a", tokens=3),
        state_of("a1", "a"),
        state_of("b0", "b"),
        state_of("b1", "b"),
    )
    assert keys(shares.order_waiting([a0, a1, b0, b1])) == ["a0", "a1", "b0", "b1"]
    admit(shares, a0)
    assert keys(shares.order_waiting([a1, b0, b1])) == ["b0", "b1", "a1"]
    admit(shares, b0)
    shares.on_token(b0)
    shares.on_token(b0)
    assert keys(shares.order_waiting([a1, b1])) == ["a1", "b1"], (
        "3 prompt tokens, or 1 and 2 generated"
    )


def test_invented_clients_share_their_peers_share() -> None:
    shares = FairShares()
    crowd = arrive(shares, *(state_of(f"c{i}", f"name {i}", "crowd") for i in range(3)))
    (other,) = arrive(shares, state_of("o", "", "other"))
    admit(shares, crowd[0])
    assert keys(shares.order_waiting([*crowd[1:], other])) == ["o", "c1", "c2"]


def test_idle_clients_earn_no_credit() -> None:
    shares = FairShares()
    for number in range(10):
        (state,) = arrive(shares, state_of(f"a{number}", "a", tokens=100))
        admit(shares, state)
        end(shares, state)
    (a,) = arrive(shares, state_of("a", "a"))
    (b,) = arrive(shares, state_of("b", "b"))
    admit(shares, b)
    assert keys(shares.order_waiting([a])) == ["a"]
    (later,) = arrive(shares, state_of("b1", "b"))
    assert keys(shares.order_waiting([later, a])) == ["a", "b1"]


def test_counters_above_the_floor_survive_idle_periods() -> None:
    shares = FairShares()
    (a,) = arrive(shares, state_of("a0", "a", tokens=100))
    admit(shares, a)
    end(shares, a)
    b, back = arrive(shares, state_of("b", "b"), state_of("a1", "a"))
    assert keys(shares.order_waiting([back, b])) == ["b", "a1"]


def test_priorities_order_the_requests_of_one_client_only() -> None:
    shares = FairShares()
    requests = arrive(
        shares,
        state_of("a0", "a"),
        state_of("b", "b", priority=9),
        state_of("a1", "a", priority=-1),
    )
    assert keys(shares.order_waiting(requests)) == ["a1", "a0", "b"]
    admit(shares, requests[2])
    assert keys(shares.order_waiting(requests[:2])) == ["b", "a0"], (
        "priorities count within a client"
    )


def test_preempted_requests_keep_their_rank_and_pay_once() -> None:
    shares = FairShares()
    (a,) = arrive(shares, state_of("a", "a", tokens=5))
    admit(shares, a)
    shares.on_preempted(a)
    a.phase = "waiting"
    admit(shares, a)
    b0, a1 = arrive(shares, state_of("b0", "b", tokens=6), state_of("a1", "a"))
    admit(shares, b0)
    (b1,) = arrive(shares, state_of("b1", "b"))
    assert keys(shares.order_waiting([b1, a1])) == ["a1", "b1"], "5 units, not 10"


def test_idle_counters_are_bounded() -> None:
    shares = FairShares()
    for number in range(3 * MAX_IDLE_COUNTERS):
        (state,) = arrive(shares, state_of(f"k{number}", f"name {number}", f"peer {number}", 50))
        admit(shares, state)
        end(shares, state)
    assert shares.num_clients == 0
    assert shares.num_counters <= 2 * MAX_IDLE_COUNTERS
    for number in range(3 * MAX_IDLE_COUNTERS):
        (state,) = arrive(shares, state_of(f"k{number}", f"name {number}", "one", 50))
        end(shares, state)
    assert shares.num_counters <= 2 * MAX_IDLE_COUNTERS


LONGEST, ANSWER, SLOTS = 20, 15, 3
#: The documented bound for one client's running requests.
U = W_INPUT * LONGEST + W_OUTPUT * SLOTS * ANSWER
SIZES = st.tuples(st.integers(1, LONGEST), st.integers(1, ANSWER))


class Load:
    """Clients ``peer/name`` with waiting requests; their service is counted separately."""

    def __init__(self, plans: dict[str, tuple[int, list[tuple[int, int]]]]) -> None:
        """``plans``: each client's first step, and (prompt, answer) lengths of its requests."""
        self._plans = plans
        self._shares = FairShares()
        self._queues: dict[str, deque[RequestState]] = {name: deque() for name in plans}
        self._left: dict[RequestState, int] = {}
        self._count = 0
        self.served = Counter[str]()

    def peers(self, step: int) -> list[tuple[str, str]]:
        """Pairs of peers, or of clients of one peer, that have started."""
        clients = sorted(name for name, (start, _) in self._plans.items() if step >= start)
        peers = sorted({name[0] for name in clients})
        pairs = list(combinations(peers, 2))
        return pairs + [(a, b) for a, b in combinations(clients, 2) if a[0] == b[0]]

    def step(self, step: int) -> None:
        for name, (start, sizes) in self._plans.items():
            while step >= start and len(self._queues[name]) <= SLOTS:
                tokens, answer = sizes[self._count % len(sizes)]
                state = state_of(f"{self._count}.{answer}", name, name[0], tokens)
                self._count += 1
                self._queues[name].append(state)
                self._shares.on_arrived(state)
        while len(self._left) < SLOTS and any(self._queues.values()):
            self._admit()
        for state in list(self._left):
            self._shares.on_token(state)
            self._serve(state, W_OUTPUT)
            self._left[state] -= 1
            if not self._left[state]:
                del self._left[state]
                end(self._shares, state)

    def _admit(self) -> None:
        state = self._shares.order_waiting(
            state for queue in self._queues.values() for state in queue
        )[0]
        self._queues[state.request.client].remove(state)
        admit(self._shares, state)
        self._left[state] = int(state.key.split(".")[1])
        self._serve(state, W_INPUT * len(state.tokens))

    def _serve(self, state: RequestState, units: int) -> None:
        self.served[state.request.client] += units
        self.served[state.peer] += units


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["a/1", "a/2", "b/1", "c/1"]),
        st.tuples(st.integers(0, 200), st.lists(SIZES, min_size=1, max_size=5)),
        min_size=2,
    )
)
def test_backlogged_clients_stay_within_the_bound(
    plans: dict[str, tuple[int, list[tuple[int, int]]]],
) -> None:
    """Each client always has requests waiting from its first step on."""
    load = Load(plans)
    gaps: dict[tuple[str, str], list[int]] = {}
    for step in range(400):
        load.step(step)
        for one, two in load.peers(step):
            gap = load.served[one] - load.served[two]
            seen = gaps.setdefault((one, two), [gap, gap])
            seen[:] = min(gap, seen[0]), max(gap, seen[1])
            assert seen[1] - seen[0] <= 2 * U, "from any moment on"


def test_active_names_are_counted() -> None:
    counters = VirtualTokenCounters()
    counters.on_arrived("a")
    assert "a" in counters
    assert counters.on_removed("a", waited=True) == ["a"]
    assert "a" not in counters
