"""Requests of a scheduler by state: waiting, running, preempted."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy

from molink.errors import InvariantError
from molink.scheduler.fair_shares import FairShares
from molink.scheduler.in_flight import RoundTripCounter
from molink.scheduler.policies.base import SchedulingPolicy
from molink.scheduler.prefix_tree import ROOT, PrefixMatch
from molink.scheduler.request_state import PendingRelease, RequestState

#: Seconds that a request of a client with too few slots waits for a free slot before it preempts
#: another client's request. Usually a slot becomes free in that time, and no prompt is computed
#: twice.
PREEMPT_AFTER_S = 1.0


class RequestQueues:
    """Keeps each request in one queue, and selects requests to admit, run or preempt.

    The scheduling policy orders them.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self._requests: dict[tuple[str, str], RequestState] = {}
        self.fair_shares = FairShares()
        #: Preempted requests, latest first, then the others in order of arrival.
        self._waiting: OrderedDict[RequestState, None] = OrderedDict()
        #: Tokens to compute of all waiting requests; KV in host memory is not counted.
        self.num_waiting_tokens = 0
        #: By request id, which increases with each admission.
        self._running: dict[int, RequestState] = {}
        #: Running requests with prompt rows to issue, oldest first.
        self._prefilling: dict[int, RequestState] = {}
        #: Decoding requests without awaited rows, in the order in which their tokens came back.
        self._decode_ready: dict[int, RequestState] = {}
        self._pending_releases: list[PendingRelease] = []
        self._next_id = 0
        #: Fraction of a token, per stalled request's slot, that is not charged yet.
        self._idle_tokens = 0.0
        #: The cached result of :meth:`next_admitted`.
        self._next_admitted: tuple[RequestState | None] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._requests.values())

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_requests(self) -> Collection[RequestState]:
        """Waiting requests: preempted ones, then the others in order of arrival."""
        return self._waiting.keys()

    @property
    def running_requests(self) -> Collection[RequestState]:
        return self._running.values()

    @property
    def has_prefills(self) -> bool:
        """Whether a running request has prompt rows to issue."""
        return bool(self._prefilling)

    @property
    def pending_releases(self) -> Sequence[PendingRelease]:
        """Ended admissions whose release is not issued yet."""
        return self._pending_releases

    def find_request(self, peer: str, key: str) -> RequestState | None:
        return self._requests.get((peer, key))

    def get_by_id(self, request_id: int) -> RequestState | None:
        """Return the running request that stages know as ``request_id``."""
        return self._running.get(request_id)

    def requests_of_peer(self, peer: str) -> list[RequestState]:
        return [state for (name, _), state in self._requests.items() if name == peer]

    def decode_order(self, now: float) -> Sequence[RequestState]:
        """Return the decoding requests that are not stalled, in flight or not, in running order."""
        requests = [*self._decode_ready.values(), *self.decodes_in_flight()]
        return self.policy.order_running([state for state in requests if not state.is_stalled], now)

    def prefill_order(self, now: float, *, closed: bool = False) -> Sequence[RequestState]:
        """Return the requests with prompt rows to issue, in running order.

        The next request to admit is among them unless ``closed``.
        """
        requests = list(self._prefilling.values())
        new = None if closed else self.next_admitted(now)
        if new is not None:
            requests.append(new)
        return self.policy.order_running(requests, now) if requests else requests

    def decodes_in_flight(self) -> Iterator[RequestState]:
        """Decoding requests with awaited rows."""
        return (
            state
            for state in self._running.values()
            if state.phase == "decode" and state.awaited_seqs
        )

    def next_admitted(self, now: float) -> RequestState | None:
        """Return the request to admit next; stalled ones are skipped."""
        if self._next_admitted is None:
            able = [state for state in self._waiting if not state.is_stalled]
            ordered = self.fair_shares.order_waiting(able)
            self._next_admitted = (self.policy.choose_admitted(ordered, now) if able else None,)
        return self._next_admitted[0]

    def next_preemptors(self, now: float) -> Iterator[RequestState]:
        """Return the next client's requests for which others may be preempted, in order."""
        count = self.policy.max_preemptors
        if count == 1:
            first = self.next_admitted(now)
            yield from (first,) if first is not None else ()
            return
        able = self.fair_shares.order_waiting(
            [state for state in self._waiting if not state.is_stalled]
        )
        candidates = [state for state in able if state.client_key == able[0].client_key]
        ordered = self.policy.order_running(candidates, now)
        yield from sorted(ordered, key=lambda state: state.request.priority)[:count]

    def next_swapped(self, now: float) -> RequestState | None:
        """Return the request to admit next, if its KV is in host memory.

        Requests are not swapped in by estimated time to run: a preempted request would displace its
        preemptor and be preempted again, forever.
        """
        first = self.next_admitted(now)
        return first if first is not None and first.host_copy is not None else None

    def latest_scheduled(self, now: float) -> list[RequestState]:
        """Return running requests that are not scheduled now, the one scheduled last first."""
        admitted = list(self._running.values())
        scheduled = self.policy.estimate_next_scheduled(admitted, len(admitted), now)
        later = [
            state for state in self.policy.order_running(admitted, now) if scheduled[state] > 0
        ]
        later.reverse()
        return sorted(later, key=scheduled.__getitem__, reverse=True)

    def estimate_swapped(self, now: float) -> Mapping[RequestState, float]:
        """Estimate the seconds until each swapped-out request is scheduled."""
        requests = [state for state in self._waiting if state.host_copy is not None]
        return (
            self.policy.estimate_next_scheduled(requests, len(self._running), now)
            if requests
            else {}
        )

    @property
    def num_swapped(self) -> int:
        return sum(1 for state in self._waiting if state.host_copy is not None)

    def clear_next_admitted(self) -> None:
        """Forget the policy's last choice, since time has passed or queues have changed."""
        self._next_admitted = None

    def preemption_candidates(
        self, preemptor: RequestState, now: float, num_admitted: int = 0
    ) -> Iterator[RequestState]:
        """Yield requests to preempt for ``preemptor``, which lacks a block or waits for admission.

        Idle requests come first, then requests with rows in flight; in each group, requests that
        the policy selects come before requests of clients with too many slots. For a waiting
        preemptor, requests are skipped that would be readmitted before it, or that have not run
        since their admission, so that every admission makes progress. ``num_admitted`` requests of
        the preemptor's client have slots reserved, but are not admitted yet.

        Raises:
            InvariantError: the policy selects a request that can't be preempted.
        """
        num_running = len(self._running)
        selected: list[RequestState] = []
        idle = [state for state in self._idle_requests() if state is not preemptor]
        busy = [state for state in self._running.values() if state is not preemptor]
        busy = [state for state in busy if state.in_flight]
        for requests in (idle, busy):
            for state in self._select_candidates(
                preemptor, requests, num_running - len(selected), now
            ):
                selected.append(state)
                yield state
            while other := self._choose_by_share(preemptor, requests, now, selected, num_admitted):
                requests.remove(other)
                selected.append(other)
                yield other

    def charge_idle_slots(self, num_tokens: int) -> None:
        """Charge stalled requests for their slots while others wait for one.

        ``num_tokens`` were sampled; each stalled request is charged the mean of the others.
        """
        if not self._waiting or not num_tokens:
            return
        stalled = [state for state in self._running.values() if state.is_stalled]
        if stalled:
            self._idle_tokens += num_tokens / max(1, len(self._running) - len(stalled))
            whole = int(self._idle_tokens)
            self._idle_tokens -= whole
            for state in stalled:
                self.fair_shares.charge_idle_slot(state, whole)

    def is_owed_slot(self, new: RequestState) -> bool:
        """Whether a new request will soon have a slot, by preemption if necessary."""
        return any(self.fair_shares.exceeds_slots(state, new) for state in self._running.values())

    def _choose_by_share(
        self,
        preemptor: RequestState,
        requests: Collection[RequestState],
        now: float,
        selected: Sequence[RequestState],
        num_admitted: int,
    ) -> RequestState | None:
        """Choose a request of another client with too many slots to preempt for a waiting one.

        It belongs to the client with the most slots. A stalled request is preferred, otherwise the
        least urgent one that costs least to resume. It must have generated a token since its
        admission; otherwise it could be recomputed forever. ``selected`` requests are already being
        preempted.
        """
        shares = self.fair_shares
        if (
            preemptor.phase != "waiting"
            or now - preemptor.arrived_at < PREEMPT_AFTER_S
            or shares.num_clients == 1
        ):
            return None

        def has_too_many(state: RequestState) -> bool:
            peer, client = state.client_key
            crosses = peer != preemptor.peer
            gone = sum(
                each.peer == peer and (crosses or each.request.client == client)
                for each in selected
            )
            return shares.exceeds_slots(state, preemptor, gone, num_admitted)

        able = (
            state
            for state in requests
            if state.num_since_admission > 0
            and has_too_many(state)
            and not self._would_be_readmitted(state, preemptor, now)
        )
        return max(
            able,
            key=lambda state: (
                shares.slot_surplus(state, preemptor),
                state.is_stalled,
                state.request.priority,
                -len(state.tokens),
                state.id,
            ),
            default=None,
        )

    def _select_candidates(
        self, preemptor: RequestState, requests: list[RequestState], num_running: int, now: float
    ) -> Iterator[RequestState]:
        select = self.policy.choose_preempted
        while (state := select(preemptor, requests, num_running, now)) is not None:
            if state not in requests:
                raise InvariantError(f"the policy preempts {state.key}, which is not a candidate")
            requests.remove(state)
            if preemptor.phase != "waiting" or not (
                state.is_fresh or self._would_be_readmitted(state, preemptor, now)
            ):
                num_running -= 1
                yield state

    def _would_be_readmitted(
        self, state: RequestState, preemptor: RequestState, now: float
    ) -> bool:
        """Whether a preempted request would be admitted before the waiting ``preemptor``."""
        two = self.fair_shares.order_waiting((state, preemptor))
        first = self.policy.choose_admitted(two, now)
        return not state.is_stalled and first is state

    def can_be_preempted(self, state: RequestState, preemptor: RequestState, now: float) -> bool:
        """Whether the policy would preempt ``state`` for ``preemptor``."""
        selected = self.policy.choose_preempted(preemptor, [state], len(self._running), now)
        return selected is not None

    def is_idle(self, state: RequestState) -> bool:
        """Whether the request has no rows in flight or in the volume being composed."""
        return not state.in_flight and (
            state.id in self._decode_ready or state.id in self._prefilling
        )

    def _idle_requests(self) -> Iterator[RequestState]:
        for requests in (self._decode_ready, self._prefilling):
            yield from (state for state in requests.values() if not state.in_flight)

    def enqueue_request(self, state: RequestState, now: float) -> None:
        """Queue a new request."""
        self._requests[state.peer, state.key] = state
        self.clear_next_admitted()
        self._waiting[state] = None
        self.num_waiting_tokens += _tokens_to_compute(state)
        self.fair_shares.on_arrived(state)
        self.policy.on_arrived(state, now)

    def admit_request(
        self, state: RequestState, blocks: list[int], found: PrefixMatch, restored: int = 0
    ) -> None:
        """Admit a waiting request with blocks for all its tokens.

        The first ``found`` blocks come from the prefix cache, the next ``restored`` ones from host
        memory.
        """
        self._remove_waiting(state)
        state.start_admission(self._next_id, blocks, found, restored)
        self._next_id += 1
        self._running[state.id] = state
        (self._decode_ready if state.phase == "decode" else self._prefilling)[state.id] = state
        self.fair_shares.on_admitted(state)

    def on_issued(self, state: RequestState, now: float) -> None:
        """Record that rows of a request entered a volume."""
        self.policy.on_issued(state, now)
        self._decode_ready.pop(state.id, None)
        if state.num_issued == len(state.tokens):
            self._prefilling.pop(state.id, None)
            state.phase = "decode"

    def mark_decode_ready(self, state: RequestState) -> None:
        """Record that the sampled token is back, so that the request can decode further."""
        self._decode_ready[state.id] = state

    def preempt_request(self, state: RequestState) -> None:
        """Take a running request's blocks; it waits and keeps its tokens."""
        self._remove_running(state, None)
        self.fair_shares.on_preempted(state)
        state.phase = "waiting"
        self._waiting[state] = None
        self._waiting.move_to_end(state, last=False)
        self.num_waiting_tokens += _tokens_to_compute(state)

    def remove_request(
        self, state: RequestState, now: float, counter: RoundTripCounter | None = None
    ) -> None:
        """Remove a request in any phase."""
        del self._requests[state.peer, state.key]
        self.fair_shares.on_removed(state)
        if state.phase == "waiting":
            self._remove_waiting(state)
        else:
            self._remove_running(state, counter)
        state.phase = "gone"
        self.policy.on_removed(state, now)

    def pop_pending_releases(self) -> list[PendingRelease]:
        """Pop the ended admissions whose release must be issued now."""
        pending, self._pending_releases = self._pending_releases, []
        return pending

    def _remove_waiting(self, state: RequestState) -> None:
        self.clear_next_admitted()
        del self._waiting[state]
        self.num_waiting_tokens -= _tokens_to_compute(state)

    def _remove_running(self, state: RequestState, counter: RoundTripCounter | None) -> None:
        self.clear_next_admitted()
        del self._running[state.id]
        self._prefilling.pop(state.id, None)
        self._decode_ready.pop(state.id, None)
        self._pending_releases.append(PendingRelease(copy(state), counter))
        state.blocks = []
        state.in_flight = {}
        state.clear_draft_path()
        state.copy_source = state.state_slot = state.snapshot = state.kept_slot = -1
        state.snapshot_end = 0
        state.tree_node = ROOT

    def validate(self) -> None:
        """Check that every request is in the queue of its phase.

        Raises:
            InvariantError: one is not.
        """
        for state in self:
            inside, waits = self._running.get(state.id) is state, state in self._waiting
            if (state.phase == "waiting") != waits or inside == waits:
                raise InvariantError(f"request {state.key} is {state.phase} but not queued as such")
            if inside:
                self._validate_running(state)
        if self.num_waiting_tokens != sum(map(_tokens_to_compute, self._waiting)):
            raise InvariantError(
                f"{self.num_waiting_tokens} are not the tokens of waiting requests"
            )
        if len(self._waiting) + len(self._running) != len(self._requests):
            raise InvariantError("a request is queued that is not registered")
        if not self._decode_ready.keys() | self._prefilling.keys() <= self._running.keys():
            raise InvariantError("an ended request could still run")

    def _validate_running(self, state: RequestState) -> None:
        prefilling = state.phase == "prefill"
        if prefilling != (state.id in self._prefilling) or prefilling != (
            state.num_issued < len(state.tokens) and state.id not in self._decode_ready
        ):
            raise InvariantError(
                f"request {state.id} is in {state.phase} with {state.num_issued} issued"
            )
        if state.phase == "decode" and (state.id in self._decode_ready) == bool(state.awaited_seqs):
            raise InvariantError(f"request {state.id} is both idle and awaiting rows, or neither")
        if not state.in_flight.keys() >= set(state.awaited_seqs) or (
            state.draft_path and not state.awaited_seqs
        ):
            raise InvariantError(f"request {state.id} waits for rows that are not in flight")
        if state.num_announced > len(state.blocks):
            raise InvariantError(f"request {state.id} announced blocks that it doesn't have")


def _tokens_to_compute(state: RequestState) -> int:
    """Return the number of tokens to compute before the request can decode further."""
    return len(state.tokens) - (state.host_copy.num_tokens if state.host_copy is not None else 0)
