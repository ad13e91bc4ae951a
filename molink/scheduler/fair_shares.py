"""Fair shares of tokens and slots: between peers, and between the clients of each peer.

Virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language Models", 2024,
algorithm 2) sum up the service of each peer and client; the one with the least is served next. A
peer names its own clients, so client counters compete within their peer's share only: inventing
clients gains nothing.

*Bound* (theorem 4.4, with the scheduler's admission limit). Let ``U`` be ``W_INPUT`` times the
longest prompt plus ``W_OUTPUT`` times the tokens that the running requests of one peer or client
can still generate, at most ``max_num_seqs`` answers. Of two peers that always have waiting
requests, or two clients of one peer, neither is served more than ``2 U`` units more than the other,
provided that the policy keeps this order; a multi-level policy keeps it within each level.

*Slots.* Long answers could hold all slots, even if other clients are served least. So the next
request in this order may preempt a request of a peer, or of a client of its own peer, that holds at
least two slots more (:meth:`FairShares.exceeds_slots`). Equal holders never preempt each other, so
there are no preemption cycles.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from molink.scheduler.request_state import RequestState

#: Units of an uncached prompt token, and of a generated token, as in the paper.
W_INPUT, W_OUTPUT = 1, 2
#: Maximum counters above the floor that are kept without requests.
MAX_IDLE_COUNTERS = 256


@dataclass(slots=True)
class _Counter:
    #: Units served.
    units: int
    waiting: int = 0
    running: int = 0


class VirtualTokenCounters:
    """Virtual token counters of names with equal shares."""

    def __init__(self) -> None:
        #: Counters of names with requests.
        self._active: dict[str, _Counter] = {}
        #: Units of names without requests, in the order in which their last requests ended.
        self._idle: OrderedDict[str, int] = OrderedDict()
        #: The largest counter at an admission; new counters start here.
        self._floor = 0

    def __contains__(self, name: str) -> bool:
        return name in self._active or name in self._idle

    def __len__(self) -> int:
        return len(self._active) + len(self._idle)

    @property
    def num_active(self) -> int:
        """Names with requests."""
        return len(self._active)

    def units_of(self, name: str) -> int:
        """Units served to a name with requests."""
        return self._active[name].units

    def running_of(self, name: str) -> int:
        """Running requests of a name."""
        account = self._active.get(name)
        return 0 if account is None else account.running

    def units_on_arrival(self, name: str) -> int:
        """Return a name's units when another request arrives; idle time earns no credit."""
        account = self._active.get(name)
        if account is not None and account.waiting:
            return account.units
        others = [each.units for each in self._active.values() if each.waiting]
        own = self._idle.get(name, 0) if account is None else account.units
        return max(own, self._floor, min(others, default=0))

    def on_arrived(self, name: str) -> None:
        """Record a new waiting request."""
        units = self.units_on_arrival(name)
        account = self._active.setdefault(name, _Counter(units))
        self._idle.pop(name, None)
        account.units = units
        account.waiting += 1

    def units_before(self, name: str, backlog: Mapping[str, float]) -> float:
        """Return the units of ``backlog`` (by name) that precede a new request of ``name``."""
        own = backlog.get(name, 0.0)
        until = self.units_on_arrival(name) + own
        others = (
            min(units, max(0.0, until - self._active[other].units))
            for other, units in backlog.items()
            if other != name
        )
        return own + sum(others)

    def on_admitted(self, name: str) -> None:
        """Record that a waiting request runs."""
        account = self._active[name]
        account.units = self._floor = max(self._floor, account.units)
        account.waiting -= 1
        account.running += 1

    def on_preempted(self, name: str) -> None:
        """Record that a running request waits again."""
        account = self._active[name]
        account.running -= 1
        account.waiting += 1

    def add_units(self, name: str, units: int) -> None:
        """Add served units to a name with requests."""
        self._active[name].units += units

    def on_removed(self, name: str, *, waited: bool) -> list[str]:
        """Record the end of a request; return names whose counters are dropped."""
        account = self._active[name]
        account.waiting -= waited
        account.running -= not waited
        if account.waiting or account.running:
            return []
        del self._active[name]
        if account.units <= self._floor:  # the floor would lift a new counter as high
            return [name]
        self._idle[name] = account.units
        return [self._idle.popitem(last=False)[0]] if len(self._idle) > MAX_IDLE_COUNTERS else []


class FairShares:
    """Counters of peers, and of the clients of each peer."""

    def __init__(self) -> None:
        self._peers = VirtualTokenCounters()
        self._clients: dict[str, VirtualTokenCounters] = {}
        #: Units served in total, and tokens generated.
        self.total_units = self.generated_tokens = 0

    @property
    def num_clients(self) -> int:
        """Clients with requests."""
        return sum(counters.num_active for counters in self._clients.values())

    @property
    def num_counters(self) -> int:
        return len(self._peers) + sum(map(len, self._clients.values()))

    def order_waiting(self, waiting: Iterable[RequestState]) -> list[RequestState]:
        """Sort waiting requests by the shares of their peers and clients.

        A client's requests are sorted by :attr:`RequestState.queue_key`. Ties keep their order.
        """
        shared: dict[str, dict[str, list[RequestState]]] = {}
        for state in waiting:
            shared.setdefault(state.peer, {}).setdefault(state.request.client, []).append(state)
        ordered: list[RequestState] = []
        for peer in sorted(shared, key=self._peers.units_of):
            for client in sorted(shared[peer], key=self._clients[peer].units_of):
                ordered += sorted(shared[peer][client], key=lambda state: state.queue_key)
        return ordered

    def slot_surplus(self, holder: RequestState, other: RequestState) -> int:
        """Return how many more slots the peer of ``holder`` has than the peer of ``other``.

        Within one peer, compare their clients.
        """
        if holder.peer != other.peer:
            return self._peers.running_of(holder.peer) - self._peers.running_of(other.peer)
        counters = self._clients.get(holder.peer, VirtualTokenCounters())
        held = counters.running_of(holder.request.client)
        return held - counters.running_of(other.request.client)

    def exceeds_slots(
        self, holder: RequestState, other: RequestState, lost: int = 0, gained: int = 0
    ) -> bool:
        """Whether ``other`` may take the slot of the running ``holder``.

        The peer or client of ``holder`` must hold at least two slots more, after ``lost`` slots are
        subtracted and ``gained`` slots are added to the other side. A client without a slot may
        also take another client's only slot, once ``holder`` has received as much service since its
        admission as its preemption costs.
        """
        surplus = self.slot_surplus(holder, other) - lost - gained
        if surplus != 1:
            return surplus > 1
        counters = self._clients.get(other.peer, VirtualTokenCounters())
        has_none = not gained and not counters.running_of(other.request.client)
        return has_none and W_OUTPUT * holder.num_since_admission >= W_INPUT * len(holder.tokens)

    def units_before(
        self, new: RequestState, backlog: Iterable[tuple[RequestState, float]]
    ) -> float:
        """Return the units of ``backlog`` that are served before a new request."""
        shared: dict[str, dict[str, float]] = {new.peer: {}}
        for state, units in backlog:
            peer, client = state.peer, state.request.client
            if (peer, client) != new.client_key or state.queue_key <= new.queue_key:
                of_peer = shared.setdefault(peer, {})
                of_peer[client] = of_peer.get(client, 0.0) + units
        counters = self._clients.get(new.peer, VirtualTokenCounters())
        sums = {peer: sum(of_peer.values()) for peer, of_peer in shared.items()}
        sums[new.peer] = counters.units_before(new.request.client, shared[new.peer])
        return self._peers.units_before(new.peer, sums)

    def on_arrived(self, state: RequestState) -> None:
        """Record a new waiting request."""
        peer = state.peer
        self._peers.on_arrived(peer)
        self._clients.setdefault(peer, VirtualTokenCounters()).on_arrived(state.request.client)

    def on_admitted(self, state: RequestState) -> None:
        """Record an admission; the first one counts prompt tokens that are not cached."""
        peer, client = state.peer, state.request.client
        self._peers.on_admitted(peer)
        self._clients[peer].on_admitted(client)
        if state.num_admissions == 1:
            self._add_units(state, W_INPUT * (len(state.tokens) - state.num_reused))

    def on_token(self, state: RequestState) -> None:
        """Record a generated token."""
        self.generated_tokens += 1
        self._add_units(state, W_OUTPUT)

    def charge_idle_slot(self, state: RequestState, tokens: int) -> None:
        """Charge a stalled request's slot as ``tokens`` that another request would have generated.

        Otherwise a client that does not read would remain the least served one, and no other client
        would get a slot before its waiting requests.
        """
        units = W_OUTPUT * tokens
        self._peers.add_units(state.peer, units)
        self._clients[state.peer].add_units(state.request.client, units)

    def on_preempted(self, state: RequestState) -> None:
        """Record a preemption; recomputation is not counted."""
        self._peers.on_preempted(state.peer)
        self._clients[state.peer].on_preempted(state.request.client)

    def on_removed(self, state: RequestState) -> None:
        """Record the end of a request, while ``phase`` still says whether it was waiting."""
        peer, waited = state.peer, state.phase == "waiting"
        self._clients[peer].on_removed(state.request.client, waited=waited)
        for dropped in self._peers.on_removed(peer, waited=waited):
            del self._clients[dropped]

    def _add_units(self, state: RequestState, units: int) -> None:
        peer = state.peer
        self.total_units += units
        self._peers.add_units(peer, units)
        self._clients[peer].add_units(state.request.client, units)
