"""All jobs of a head, by what can be done with them."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence

from molink.errors import InvariantError
from molink.facts.ring_times import RingTimes
from molink.scheduler.fair_shares import FairShares
from molink.scheduler.in_flight import RoundTripCounter
from molink.scheduler.pending_release import PendingRelease
from molink.scheduler.policies.base import RestoreCost, SchedulingPolicy
from molink.scheduler.prefix_tree import ROOT, PrefixMatch
from molink.scheduler.request_state import RequestState


class RequestQueues:
    """Keeps jobs in exactly one place each: waiting, admitted, or gone.

    It knows which jobs could be admitted, run or preempted; whose turn it is among them, ``policy``
    decides.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._requests: dict[tuple[str, str], RequestState] = {}
        self.fair_shares = FairShares()
        #: Those that were preempted, the last one first, then the others as they arrived.
        self._waiting: OrderedDict[RequestState, None] = OrderedDict()
        #: Tokens of them all, but for those whose KV is in host memory.
        self.num_waiting_tokens = 0
        #: By request id, which rises with each admission.
        self._running: dict[int, RequestState] = {}
        #: Admitted jobs with known tokens whose rows have still to be issued, oldest first.
        self._prefilling: dict[int, RequestState] = {}
        #: Decoding jobs that wait for no rows, in the order in which their tokens came back.
        self._decode_ready: dict[int, RequestState] = {}
        self._pending_releases: list[PendingRelease] = []
        self._next_id = 0
        #: Who is to be admitted next, once that has been asked.
        self._next_waiting: tuple[RequestState | None] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._requests.values())

    @property
    def num_running(self) -> int:
        """How many jobs are admitted."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many jobs wait."""
        return len(self._waiting)

    @property
    def waiting_requests(self) -> Collection[RequestState]:
        """The jobs that wait: those that were preempted, then the others as they arrived."""
        return self._waiting.keys()

    @property
    def running_requests(self) -> Collection[RequestState]:
        """The jobs that are admitted."""
        return self._running.values()

    @property
    def max_preemptors(self) -> int:
        """For how many that wait others may give way in one iteration."""
        return self._policy.max_preemptors

    @property
    def has_prefills(self) -> bool:
        """Whether an admitted job has rows of known tokens to be issued."""
        return bool(self._prefilling)

    @property
    def pending_releases(self) -> Sequence[PendingRelease]:
        """The admissions whose release has still to be issued."""
        return self._pending_releases

    @property
    def queue_lengths(self) -> Sequence[int]:
        """How many jobs are in each queue of the policy, if it has queues; the best first."""
        return self._policy.queue_lengths()

    def find_request(self, peer: str, key: str) -> RequestState | None:
        """The job of a daemon's request."""
        return self._requests.get((peer, key))

    def get_by_id(self, request_id: int) -> RequestState | None:
        """The job that stages know as ``request_id``, unless that admission is over."""
        return self._running.get(request_id)

    def requests_of_peer(self, peer: str) -> list[RequestState]:
        """All jobs of a daemon."""
        return [state for (name, _), state in self._requests.items() if name == peer]

    # --- whose turn it is -------------------------------------------------------------------------

    def decode_order(self, now: float) -> Sequence[RequestState]:
        """Jobs that take part in decoding, in flight or not, first to be run first.

        Those that wait for their client are not among them.
        """
        requests = [*self._decode_ready.values(), *self.decodes_in_flight()]
        return self._policy.order_running(
            [state for state in requests if not state.is_stalled], now
        )

    def prefill_order(self, now: float, *, closed: bool = False) -> Sequence[RequestState]:
        """Jobs with rows of known tokens to be issued, first to be run first.

        Among them is the one to be admitted next, unless nobody is to be (``closed``).
        """
        requests = list(self._prefilling.values())
        new = None if closed else self.next_waiting(now)
        if new is not None:
            requests.append(new)
        return self._policy.order_running(requests, now) if requests else requests

    def decodes_in_flight(self) -> Iterator[RequestState]:
        """Decoding jobs that wait for rows."""
        return (
            state
            for state in self._running.values()
            if state.phase == "decode" and state.awaited_seqs
        )

    def next_waiting(self, now: float) -> RequestState | None:
        """The job to be admitted next; those that wait for their client are passed over."""
        if self._next_waiting is None:
            able = [state for state in self._waiting if not state.is_stalled]
            admitted = self._running.values()
            ordered = self.fair_shares.order_waiting(able)
            self._next_waiting = (
                self._policy.choose_admitted(ordered, admitted, now) if able else None,
            )
        return self._next_waiting[0]

    def next_preemptors(self, now: float) -> Iterator[RequestState]:
        """Those of the client whose turn it is for whom others may give way, in order."""
        count = self._policy.max_preemptors
        if count == 1:
            first = self.next_waiting(now)
            yield from (first,) if first is not None else ()
            return
        able = self.fair_shares.order_waiting(
            [state for state in self._waiting if not state.is_stalled]
        )
        theirs = [state for state in able if state.client_key == able[0].client_key]
        ordered = self._policy.order_running(theirs, now)
        yield from sorted(ordered, key=lambda state: state.request.priority)[:count]

    def next_swapped(self, now: float) -> RequestState | None:
        """The job to be admitted next, if it comes back from host memory.

        Not the one whose turn the policy estimates to come soonest: one that has given way to
        another would come back in its place, and give way again, for ever.
        """
        first = self.next_waiting(now)
        return first if first is not None and first.host_copy is not None else None

    def latest_scheduled(self, now: float) -> list[RequestState]:
        """Admitted jobs that others go before, the one whose turn comes last first."""
        admitted = list(self._running.values())
        turns = self._policy.estimate_next_scheduled(admitted, len(admitted), now)
        later = [state for state in self._policy.order_running(admitted, now) if turns[state] > 0]
        later.reverse()
        return sorted(later, key=turns.__getitem__, reverse=True)

    def estimate_swapped(self, now: float) -> Mapping[RequestState, float]:
        """Jobs in host memory, and seconds until the turn of each, as the policy estimates."""
        requests = [state for state in self._waiting if state.host_copy is not None]
        return (
            self._policy.estimate_next_scheduled(requests, len(self._running), now)
            if requests
            else {}
        )

    @property
    def num_swapped(self) -> int:
        """How many jobs are in host memory."""
        return sum(1 for state in self._waiting if state.host_copy is not None)

    def clear_next_waiting(self) -> None:
        """Time has gone on: what the policy has answered holds no longer."""
        self._next_waiting = None

    def preemption_candidates(self, preemptor: RequestState, now: float) -> Iterator[RequestState]:
        """Who is to give way to ``needy``, which lacks a block or waits to be admitted, in order.

        First those at rest, then those that would give way once their rows have come back. To one
        that waits nobody gives way who would be admitted before it, by shares or priority: he would
        be back at once, and give way again. Nor does anybody who has just been admitted, so that
        whoever is admitted goes on by a row at least.

        Raises:
            InvariantError: the policy names a job that can't be preempted.
        """
        stay = list(self._running.values())
        idle_requests = [state for state in self._idle_requests() if state is not preemptor]
        yield from self._select_candidates(preemptor, idle_requests, stay, now)
        flying = [state for state in stay if state is not preemptor and state.in_flight]
        yield from self._select_candidates(preemptor, flying, stay, now)

    def _select_candidates(
        self,
        preemptor: RequestState,
        requests: list[RequestState],
        stay: list[RequestState],
        now: float,
    ) -> Iterator[RequestState]:
        """Those of ``jobs``, and of ``stay``, from which they are taken."""
        while (found := self._policy.choose_preempted(preemptor, requests, stay, now)) is not None:
            if found.state not in requests:
                key = found.state.key
                raise InvariantError(f"job {key} is to be preempted but can't give way")
            requests.remove(found.state)
            waits = preemptor.phase == "waiting"
            if waits and (
                found.state.is_fresh or self._would_be_readmitted(found.state, preemptor, now)
            ):
                continue
            stay.remove(found.state)
            yield found.state

    def _would_be_readmitted(
        self, state: RequestState, preemptor: RequestState, now: float
    ) -> bool:
        """Whether ``job``, if it gave way, would be admitted before ``needy``, which waits."""
        two = self.fair_shares.order_waiting((state, preemptor))
        first = self._policy.choose_admitted(two, self._running.values(), now)
        return not state.is_stalled and first is state

    def can_be_preempted(self, state: RequestState, preemptor: RequestState, now: float) -> bool:
        """Whether ``job`` would be preempted for ``needy`` if only it could be."""
        return (
            self._policy.choose_preempted(preemptor, [state], self._running.values(), now)
            is not None
        )

    def is_idle(self, state: RequestState) -> bool:
        """Whether it has no rows in flight or in a volume that is being composed."""
        return not state.in_flight and (
            state.id in self._decode_ready or state.id in self._prefilling
        )

    def _idle_requests(self) -> Iterator[RequestState]:
        for requests in (self._decode_ready, self._prefilling):
            yield from (state for state in requests.values() if not state.in_flight)

    # --- the queue --------------------------------------------------------------------------------

    def enqueue_request(self, state: RequestState, now: float) -> None:
        """A new job waits."""
        self._requests[state.peer, state.key] = state
        self.clear_next_waiting()
        self._waiting[state] = None
        self.num_waiting_tokens += _tokens_to_compute(state)
        self.fair_shares.on_arrived(state)
        self._policy.on_arrived(state, now)

    def admit_request(
        self, state: RequestState, blocks: list[int], found: PrefixMatch, restored: int = 0
    ) -> None:
        """A waiting job gets an id and blocks for all its tokens, the first of them found.

        The next ``restored`` ones come from host memory.
        """
        self._remove_waiting(state)
        state.start_admission(self._next_id, blocks, found, restored)
        self._next_id += 1
        self._running[state.id] = state
        (self._decode_ready if state.phase == "decode" else self._prefilling)[state.id] = state
        self.fair_shares.on_admitted(state)

    def set_restore_cost(self, seconds: RestoreCost) -> None:
        """What it takes until a job that gave way is where it was."""
        self._policy.set_restore_cost(seconds)

    def set_times(self, times: RingTimes) -> None:
        """What stages and links take is known anew."""
        self._policy.set_times(times)

    def on_issued(self, state: RequestState, now: float) -> None:
        """The latest rows of ``job`` have gone into a volume."""
        self._policy.on_issued(state, now)
        self._decode_ready.pop(state.id, None)
        if state.num_issued == len(state.tokens):
            self._prefilling.pop(state.id, None)
            state.phase = "decode"

    def on_rows_returned(self, state: RequestState, seconds: float, now: float) -> None:
        """Rows of ``job`` have come back, ``seconds`` after they were issued."""
        self._policy.on_rows_returned(state, seconds, now)

    def on_token(self, state: RequestState) -> None:
        """A token of ``job`` has come."""
        self.fair_shares.on_token(state)

    def on_answered(self, state: RequestState) -> None:
        """The answer of ``job`` is whole; it is over next."""
        self._policy.on_answered(state)

    def mark_decode_ready(self, state: RequestState) -> None:
        """A sampled token has come back: the job can go on."""
        self._decode_ready[state.id] = state

    def preempt_request(self, state: RequestState) -> None:
        """Take an admitted job's blocks; it waits with its tokens so far."""
        self._remove_running(state, None)
        self.fair_shares.on_preempted(state)
        state.phase = "waiting"
        self._waiting[state] = None
        self._waiting.move_to_end(state, last=False)
        self.num_waiting_tokens += _tokens_to_compute(state)

    def remove_request(
        self, state: RequestState, now: float, counter: RoundTripCounter | None = None
    ) -> None:
        """The job is over, at whatever point it is."""
        del self._requests[state.peer, state.key]
        self.fair_shares.on_removed(state)
        if state.phase == "waiting":
            self._remove_waiting(state)
        else:
            self._remove_running(state, counter)
        state.phase = "gone"
        self._policy.on_removed(state, now)

    def pop_pending_releases(self) -> list[PendingRelease]:
        """The admissions whose release is to be issued now."""
        pending, self._pending_releases = self._pending_releases, []
        return pending

    def _remove_waiting(self, state: RequestState) -> None:
        self.clear_next_waiting()
        del self._waiting[state]
        self.num_waiting_tokens -= _tokens_to_compute(state)

    def _remove_running(self, state: RequestState, counter: RoundTripCounter | None) -> None:
        self.clear_next_waiting()
        del self._running[state.id]
        self._prefilling.pop(state.id, None)
        self._decode_ready.pop(state.id, None)
        self._pending_releases.append(PendingRelease.from_state(state, counter))
        state.blocks = []
        state.in_flight = {}
        state.clear_draft_path()
        state.copy_source = -1
        state.tree_node = ROOT

    def validate(self) -> None:
        """Every job is where its state says.

        Raises:
            InvariantError: one is not.
        """
        for state in self:
            inside, waits = self._running.get(state.id) is state, state in self._waiting
            if (state.phase == "waiting") != waits or inside == waits:
                raise InvariantError(f"job {state.key} is {state.phase} but not kept as such")
            if inside:
                self._validate_running(state)
        if self.num_waiting_tokens != sum(map(_tokens_to_compute, self._waiting)):
            raise InvariantError(f"{self.num_waiting_tokens} are not the tokens of those that wait")
        if len(self._waiting) + len(self._running) != len(self._requests):
            raise InvariantError("a job is kept that nobody owns")
        if not self._decode_ready.keys() | self._prefilling.keys() <= self._running.keys():
            raise InvariantError("a job that is over could still be run")

    def _validate_running(self, state: RequestState) -> None:
        prefilling = state.phase == "prefill"
        if prefilling != (state.id in self._prefilling) or prefilling != (
            state.num_issued < len(state.tokens) and state.id not in self._decode_ready
        ):
            raise InvariantError(
                f"request {state.id} is in {state.phase} with {state.num_issued} issued"
            )
        if state.phase == "decode" and (state.id in self._decode_ready) == bool(state.awaited_seqs):
            raise InvariantError(f"request {state.id} is idle and waits for rows, or neither")
        if not state.in_flight.keys() >= set(state.awaited_seqs) or (
            state.draft_path and not state.awaited_seqs
        ):
            raise InvariantError(f"request {state.id} waits for rows that are not in flight")
        if state.num_announced > len(state.blocks):
            raise InvariantError(f"request {state.id} announced blocks that it doesn't have")


def _tokens_to_compute(state: RequestState) -> int:
    """Tokens that are to be computed before it can go on."""
    return len(state.tokens) - (state.host_copy.num_tokens if state.host_copy is not None else 0)
