"""A whole ring without I/O: the real scheduler, real scoreboards, and stages that check their KV.

What a real stage keeps of a position depends on all tokens up to it. So each simulated one keeps
in every slot of every block the tokens up to and including that position: those that it reads in
the slot before, and the row's. It reads all positions of a request when it runs a row. A block
reused, shared or copied too early or wrongly, a row run too early, twice or after its request's
release, or a block table out of order shows as a wrong entry. The last stage computes tokens from
what it reads, so a request's text proves the rest.

A state of a recurrent layer is kept the same way, but without a history: a row that runs twice, out
of order or in another request's slot shows there.

Prefill rows may travel and run in sub-chunks of any size: a stage is told of some while others are
still on their way.
"""

import random
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from molink.errors import Overloaded
from molink.facts.drafts import (
    AUTO_DRAFTS,
    MAX_DRAFTS,
    MAX_LOOKAHEAD,
    DraftBatch,
    DraftModelFacts,
    DraftTokens,
)
from molink.facts.drafts import DraftResults as Answers
from molink.facts.profile import Profile
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.facts.settings import PREEMPTION_MODES, PreemptionMode
from molink.ring.scheduler_bridge import SampleCollector
from molink.ring.scoreboard import Scoreboard, ScoreboardLimits
from molink.ring.step import Step, StepOutput, parse_block_copy
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.policies.create import SCHEDULING_POLICIES, create_scheduling_policy
from molink.scheduler.request_state import ABANDONED_AFTER_S, Emission, RequestState
from molink.scheduler.scheduler import Scheduler
from molink.scheduler.speculation.base import DraftProposal
from molink.wire.messages.data_plane import (
    Admit,
    BlockTable,
    ForcedTokens,
    History,
    Release,
    RequestSlice,
    SampledId,
    SamplerOutput,
    SamplingParams,
    SwapIn,
    SwapOut,
    Tombstone,
    Volume,
)
from molink.wire.messages.serving import OutputToken, Rejected
from tests.support.request_states import make_state

STOP = 7
VOCABULARY = 40
#: Blocks of host memory per stage: enough for several requests.
HOST_BLOCKS = 40
#: Requests with seed ``FAILING`` fail at the last stage once they have ``FAILS_AT`` tokens.
FAILING, FAILS_AT = 13, 6
#: A row in flight: request, position, and the expected tokens up to that position.
Row = tuple[int, int, tuple[int, ...]]


def model(tokens: list[int], seed: int) -> int:
    """The deterministic next token."""
    return crc32(repr((tokens, seed)).encode()) % VOCABULARY


def reference(state: RequestState) -> list[int]:
    """The answer that a new request should get."""
    tokens, request = list(state.tokens), state.request
    for _ in range(state.max_remaining):
        tokens.append(model(tokens, request.sampling_params.seed))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[len(state.tokens) :]


@dataclass(frozen=True)
class AnyPieces:
    """Cuts sub-chunks of varying sizes, and sometimes waits for more rows."""

    salt: int

    def next_rows(self, here: int, coming: int, piggybacked: int, slowdown: float) -> int:
        dice = crc32(repr((self.salt, here, coming, piggybacked)).encode())
        return 0 if coming and dice % 3 == 0 else 1 + dice // 3 % here


@dataclass(frozen=True)
class More:
    """A message with further rows of a volume."""

    seq: int


@dataclass
class State:
    """A request at a stage, which may still have to copy the state that it continues from."""

    admit: Admit
    is_copied: bool = False
    blocks: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    last: tuple[int, int] = (-1, -1)


class Stage:
    """A scoreboard, and a KV pool that records the tokens behind each slot."""

    def __init__(
        self,
        index: int,
        last: bool,
        limits: SchedulerConfig,
        sub_chunk_policy: AnyPieces | None = None,
    ) -> None:
        self.index, self.last, self.block_size = index, last, limits.block_size
        self.has_states = limits.state_slots > 0
        bounds = ScoreboardLimits(
            blocks=limits.num_blocks, block_size=limits.block_size, host_blocks=HOST_BLOCKS
        )
        self.scoreboard = Scoreboard(bounds, sub_chunk_policy)
        #: Volumes of which only some rows have arrived.
        self.incoming: dict[int, list[Row]] = {}
        self.collector = SampleCollector()
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}
        #: The same for host blocks, and all swaps in order.
        self.host: dict[tuple[int, int], tuple[int, ...]] = {}
        self.swaps: list[tuple[type, bytes]] = []
        self.requests: dict[int, State] = {}
        #: Tokens that each state slot has processed, and the number of those that are no drafts.
        self.states: dict[int, tuple[tuple[int, ...], int]] = {}
        self.num_copies = 0
        self.running: list[Step] = []

    def arrive(
        self,
        body: Any,
        data: bytes | list[tuple[int, int, tuple[int, ...]]] | tuple[int, ...] | None,
    ) -> list[tuple[int, object, object]]:
        if isinstance(body, Admit):
            self.requests[body.request] = State(body)
        elif isinstance(body, History):
            state = self.requests[body.request]
            assert body.first == len(state.history)
            state.history += data
        elif isinstance(body, BlockTable):
            self.requests[body.request].blocks += memoryview(data).cast("i")
        if isinstance(body, More):
            self.incoming[body.seq] += data
            self.scoreboard.extend_volume(body.seq, len(self.incoming[body.seq]), 0.0)
        elif isinstance(body, Volume):
            self.incoming[body.seq] = rows = list(data)
            self.scoreboard.on_message(body, rows, 0.0, len(rows))
        else:
            self.scoreboard.on_message(body, data, 0.0)
        return self.forward(())

    def forward(self, seqs: tuple[int, ...]) -> list[tuple[int, object, object]]:
        """Controls to forward on the next stage's decode channel."""
        out = []
        for control in self.scoreboard.complete_volumes(seqs, 0.0):
            if isinstance(control.body, Release):
                del self.requests[control.body.request]
            if isinstance(control.body, SwapOut | SwapIn):
                self._swap(control.body, control.data)
            out.append((0, control.body, control.data))
        return out

    def take(self) -> list[tuple[int, object, object]]:
        work = self.scoreboard.next_step(0.0)
        if work is not None:
            self.running.append(work)
        return self.forward(())

    def finish(self, which: int) -> list[tuple[int, object, object]]:
        """End a running step: copies, then writes, then reads; rows are sent before controls."""
        work = self.running.pop(which)
        out = []
        parts = []
        for part in work.inputs:
            self._copy(part.volume)
        for part in work.inputs:
            rows = list(part.data)
            if part.row_indices is not None:
                rows = [rows[index] for index in part.row_indices]
            assert all(request_slice.count for request_slice in part.volume.slices)
            assert len(rows) == part.volume.count
            parts.append((part, rows))
            self._write(part.volume, rows)
        for part, rows in parts:
            volume = part.volume
            choices, failed = self._read(volume)
            if self.last:
                forced = tuple(self._forced(choices))
                sampled = SamplerOutput(volume.seq, tuple(choices), tuple(failed), forced)
                result = StepOutput(volume, None, sampled)
                bodies = self.collector.add_output(sampled, result, last=part.is_last)
                out += [(0, body, None) for body in bodies]
            else:
                body = More(volume.seq) if part.first_row else part.full_volume
                out.append((int(volume.prefill), body, rows))
        return out + self.forward(work.seqs)

    def _swap(self, order: SwapOut | SwapIn, data: bytes) -> None:
        self.swaps.append((type(order), bytes(data)))
        copy = parse_block_copy(order, data)
        tables = [self.requests[order.request].blocks]
        assert set(copy.blocks) <= set(tables[0])
        if not copy.is_swap_out:
            tables = [state.blocks for state in self.requests.values()]
            assert all(sum(table.count(block) for table in tables) == 1 for block in copy.blocks)
        for block, host in zip(copy.blocks, copy.host_blocks, strict=True):
            pairs = [((block, offset), (host, offset)) for offset in range(self.block_size)]
            for here, there in pairs:
                if copy.is_swap_out:
                    self.host[there] = self.kv.get(here, ())
                else:
                    self.kv[here] = self.host[there]

    def _slot(self, state: State, position: int) -> tuple[int, int]:
        return state.blocks[position // self.block_size], position % self.block_size

    def _copy(self, volume: Volume) -> None:
        for request_slice in volume.slices:
            state = self.requests[request_slice.request]
            state.blocks += request_slice.blocks
            if state.admit.copy_from_state >= 0 and not state.is_copied:
                state.is_copied = True
                seen, certain = self.states[state.admit.copy_from_state]
                assert certain <= request_slice.start <= len(seen)
                self.states[state.admit.state_slot] = seen, certain
                self.num_copies += 1
            if request_slice.copy_from_block >= 0:
                target, end = self._slot(state, request_slice.start)
                assert end
                for offset in range(self.block_size):
                    self.kv.pop((target, offset), None)
                for offset in range(end):
                    self.kv[target, offset] = self.kv[request_slice.copy_from_block, offset]

    def _write(self, volume: Volume, rows: list[Row]) -> None:
        first = 0
        for request_slice in volume.slices:
            state = self.requests[request_slice.request]
            assert request_slice.start + request_slice.count <= len(state.blocks) * self.block_size
            for offset in range(request_slice.count):
                request, position, tokens = rows[first + offset]
                assert (request, position) == (request_slice.request, request_slice.start + offset)
                before = self.kv[self._slot(state, position - 1)] if position else ()
                self.kv[self._slot(state, position)] = (*before, tokens[-1])
                assert (*before, tokens[-1]) == tokens
                if self.has_states:
                    is_draft = offset >= request_slice.count - len(request_slice.drafts)
                    self._change_state(state.admit.state_slot, tokens, is_draft)
            for copy in volume.state_copies:
                if (copy.request, copy.end) == (request_slice.request, len(tokens)):
                    self.states[copy.target] = tokens, len(tokens)
                    self.num_copies += 1
            first += request_slice.count

    def _change_state(self, slot: int, tokens: tuple[int, ...], is_draft: bool) -> None:
        """Add the last of ``tokens`` to a state; only drafts can be taken back."""
        seen, certain = self.states[slot] if len(tokens) > 1 else ((), 0)
        assert certain <= len(tokens) - 1 <= len(seen)
        assert seen[: len(tokens) - 1] == tokens[:-1]
        assert not is_draft or len(seen) == len(tokens) - 1
        self.states[slot] = tokens, certain if is_draft else len(tokens)

    def _read(self, volume: Volume) -> tuple[list[SampledId], list[int]]:
        choices, failed = [], []
        for request_slice in volume.slices:
            state, end = (
                self.requests[request_slice.request],
                request_slice.start + request_slice.count,
            )
            tokens = list(self.kv[self._slot(state, end - 1)])
            for position in range(end):
                assert self.kv[self._slot(state, position)] == tuple(tokens[: position + 1])
            tokens = tokens[: end - len(request_slice.verified_drafts)]
            if not request_slice.continues_from(*state.last):
                continue
            if self._fails(state, tokens):
                failed.append(request_slice.request)
            elif self.last and request_slice.sample:
                choices += self._sample(state, request_slice, tokens)
        return choices, failed

    def _forced(self, choices: list[SampledId]) -> Iterator[ForcedTokens]:
        """Forced tokens after each request's last choice; some of them are wrong."""
        for choice in {each.request: each for each in choices}.values():
            if choice.position % 3 == 0:
                state = self.requests[choice.request]
                tokens = [*self.kv[self._slot(state, choice.position - 1)], choice.token]
                for _ in range(choice.position % 4 + 1):
                    tokens.append(model(tokens, state.admit.sampling_params.seed))
                wrong = choice.position % 5 == 0
                tokens[-1] = (tokens[-1] + wrong) % VOCABULARY
                yield ForcedTokens(choice.request, tuple(tokens[choice.position + 1 :]))

    def _fails(self, state: State, tokens: list[int]) -> bool:
        return state.admit.sampling_params.seed == FAILING and len(tokens) >= FAILS_AT

    def _sample(
        self, state: State, request_slice: RequestSlice, tokens: list[int]
    ) -> Iterator[SampledId]:
        for draft in (*request_slice.verified_drafts, None):
            if self._fails(state, tokens):
                return
            token = model(tokens, state.admit.sampling_params.seed)
            if state.admit.sampling_params.needs_history:
                assert state.history == tokens
                state.history.append(token)
            state.last = len(tokens), token
            yield SampledId(request_slice.request, len(tokens), token)
            if token != draft:
                return
            tokens = [*tokens, token]


@dataclass
class Guesses:
    """Drafts whose number of right tokens is random, from none to all."""

    ring: "Ring"
    rng: random.Random

    def propose_drafts(self, tokens: Sequence[int], count: int) -> DraftProposal:
        return DraftProposal(self.told(tokens, count), self.rng.choice([1, 3, 9]))

    def told(self, tokens: Sequence[int], count: int) -> list[int]:
        known: Sequence[int] = next(
            (
                (*client.submitted, *client.expected)
                for client in self.ring.clients.values()
                if list(tokens) == [*client.submitted, *client.got]
            ),
            (),
        )
        drafts = list(known[len(tokens) : len(tokens) + count])
        drafts += [self.rng.randrange(VOCABULARY) for _ in range(count - len(drafts))]
        right = self.rng.choice([0, 1, 2, 40])
        drafts[right:] = [(draft + 1) % VOCABULARY for draft in drafts[right:]]
        return drafts[: self.rng.randint(0, count)]


class SmallModel:
    """A draft model that checks its input, and drafts as :class:`Guesses`."""

    def __init__(self, guesses: Guesses) -> None:
        self._guesses = guesses
        self.orders: deque[DraftBatch] = deque()
        #: Tokens that it knows of each request.
        self.known: dict[int, list[int]] = {}

    def answer(self) -> Answers:
        order, rng = self.orders.popleft(), self._guesses.rng
        for number in order.finished:
            self.known.pop(number, None)
        found = []
        for ask in order.requests:
            known = self.known.setdefault(ask.request, [])
            assert len(known) == ask.position
            known += ask.tokens
            tokens = self._guesses.told(known, ask.max_drafts) if rng.random() < 0.9 else []
            chances = [rng.choice([0.1, 0.5, 0.9]) for _ in tokens]
            if rng.random() < 0.95:
                found.append(DraftTokens(ask.request, tokens, chances))
        return Answers(found, 0.001 * rng.random(), failed=rng.random() < 0.01)


@dataclass
class Client:
    """A request as its daemon sees it."""

    state: RequestState
    submitted: tuple[int, ...]
    expected: list[int]
    got: list[int] = field(default_factory=list)
    over: bool = False

    @property
    def position(self) -> int:
        return len(self.submitted) + len(self.got)


class Ring:
    """Scheduler, stages and the two channels of each hop; the caller chooses the next event."""

    def __init__(
        self,
        stages: int,
        limits: SchedulerConfig,
        sub_chunk_policy: AnyPieces | None = None,
        rng: random.Random | None = None,
        policy: str = "fcfs",
        host_blocks: int = HOST_BLOCKS,
    ) -> None:
        self.limits = limits
        scheduling = create_scheduling_policy(policy)
        guesses = Guesses(self, rng or random.Random(0))
        self.scheduler = Scheduler(limits, 3, scheduling, lambda: guesses)
        self.model = SmallModel(guesses)
        self.scheduler.set_host_memory(host_blocks, 1e-4)
        self.sub_chunk_policy = sub_chunk_policy
        self.stages = [Stage(i, i == stages - 1, limits, sub_chunk_policy) for i in range(stages)]
        self.channels = {(i, channel): deque() for i in range(stages) for channel in (0, 1)}
        self.clients: dict[str, Client] = {}
        self.now = 0.0
        #: Number of lookahead slices whose tokens turned out right or wrong.
        self.ahead: Counter[str] = Counter()

    # --- events ----------------------------------------------------------------------------------

    def submit(self, request: RequestState) -> bool:
        try:
            displaced = self.scheduler.submit_request(request, self.now)
        except Overloaded:
            return False
        self.clients[request.key] = Client(request, tuple(request.tokens), reference(request))
        self._emit(displaced)
        return True

    def cancel(self, key: str) -> None:
        self.clients[key].over = True
        self.scheduler.cancel_request(self.clients[key].state.peer, key, self.now)

    def credit(self, key: str) -> None:
        client = self.clients[key]
        self.scheduler.grant_credit(client.state.peer, key, client.position)

    def next(self, prefill: bool = True) -> bool:
        batch = self.scheduler.next_batch(self.now, prefill=prefill)
        order = self.scheduler.pop_draft_batch()
        if order is not None:
            self.model.orders.append(order)
        if batch is None:
            return False
        assert batch.controls or batch.volumes
        seqs = [control.body.seq for control in batch.controls]
        seqs += [volume.header.seq for volume in batch.volumes]
        assert seqs == sorted(seqs)
        for control in batch.controls:
            data = control.ids
            if isinstance(control.body, BlockTable | SwapOut | SwapIn):
                data = array("i", control.ids).tobytes()
            self._send(0, self.stages[0].arrive(control.body, data))
        for volume in batch.volumes:
            rows = self._rows(volume.header)
            assert [tokens[-1] for _, _, tokens in rows] == list(volume.tokens)
            self._send(0, self.stages[0].arrive(volume.header, rows))
        return True

    def _rows(self, volume: Volume) -> list[Row]:
        rows = []
        for request_slice in volume.slices:
            state = self.scheduler._queues.get_by_id(request_slice.request)
            client = self.clients[state.key]
            tokens = (*client.submitted, *client.got, *state.draft_path)
            for position in range(request_slice.start, request_slice.start + request_slice.count):
                rows.append((request_slice.request, position, tokens[: position + 1]))
        return rows

    def deliver(self, hop: int, channel: int) -> None:
        body, data = self.channels[hop, channel].popleft()
        if hop + 1 < len(self.stages):
            self._send(hop + 1, self.stages[hop + 1].arrive(body, data))
        elif isinstance(body, SamplerOutput):
            said = {choice.request for choice in body.sampled}
            for request_slice in self.scheduler._in_flight._volumes[body.seq].slices:
                if request_slice.is_lookahead:
                    self.ahead["right" if request_slice.request in said else "wrong"] += 1
            self._emit(self.scheduler.on_sampled(body, {}, self.now))
        elif isinstance(body, Release):
            self.scheduler.on_released(body.seq, self.now)
        elif isinstance(body, Tombstone):
            self._emit(self.scheduler.on_tombstone(body.seq, self.now))

    def part(self, hop: int, count: int) -> None:
        """Deliver only the first ``count`` of the rows that are next on a bulk channel."""
        body, rows = self.channels[hop, 1].popleft()
        self.channels[hop, 1].appendleft((More(body.seq), rows[count:]))
        self._send(hop + 1, self.stages[hop + 1].arrive(body, rows[:count]))

    def guess(self) -> None:
        self.scheduler.on_draft_results(self.model.answer())

    def take(self, index: int) -> None:
        self._send(index, self.stages[index].take())

    def finish(self, index: int, which: int = 0) -> None:
        self._send(index, self.stages[index].finish(which))

    def _send(self, hop: int, messages: list[Any]) -> None:
        for channel, body, data in messages:
            self.channels[hop, channel].append((body, data))

    def _emit(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            token = emission.message
            client = self.clients[token.key]
            assert not client.over
            if isinstance(token, Rejected) and token.reason == "overloaded":
                client.over = True
                continue
            if isinstance(token, Rejected):
                assert token.reason == "failed"
                assert client.state.request.sampling_params.seed == FAILING
                assert client.position >= FAILS_AT
                client.over = True
                continue
            assert token.position == client.position
            client.got.append(token.token)
            assert client.got == client.expected[: len(client.got)]
            if token.finish_reason is not None:
                client.over = True
                stopped = token.token in client.state.request.stop_token_ids
                assert token.finish_reason == ("stop" if stopped else "length")
                assert client.got == client.expected

    # --- possible events -------------------------------------------------------------------------

    def events(self) -> list[tuple]:
        """All events that could happen next inside the ring."""
        found: list[tuple] = [
            ("deliver", *key) for key, channel in self.channels.items() if channel
        ]
        found += [("guess",)] * bool(self.model.orders)
        for (hop, kind), channel in self.channels.items():
            if self.sub_chunk_policy and kind and channel and len(channel[0][1]) > 1:
                found += [("part", hop, count) for count in {1, len(channel[0][1]) // 2}]
        for stage in self.stages:
            if stage.scoreboard.num_queued > len(stage.running) and len(stage.running) < 2:
                found.append(("take", stage.index))
            found += [("finish", stage.index, which) for which in range(len(stage.running))]
        return found

    def do(self, event: tuple) -> None:
        getattr(self, event[0])(*event[1:])

    def drain(self, choose: Callable[..., Any], maximum: int = 20_000) -> None:
        """Run until all requests end, which must take at most ``maximum`` events."""
        for _ in range(maximum):
            for key, client in self.clients.items():
                if not client.over:
                    self.credit(key)
            issued = self.next()
            events = self.events()
            if events:
                self.do(choose(events))
            elif not issued:
                break
            self.validate()
        assert not self.scheduler.live_requests
        assert not self.scheduler.collect_stats()[1]["scheduler_blocks_used"]
        assert not self.scheduler.collect_stats()[1]["scheduler_host_blocks_used"]
        self.check_empty()

    def validate(self) -> None:
        self.scheduler.validate()
        for stage in self.stages:
            stage.scoreboard.validate()

    def check_empty(self) -> None:
        assert all(client.over for client in self.clients.values())
        assert not any(self.channels.values())
        assert self.scheduler.num_strays == 0
        assert not self.model.orders
        assert not self.scheduler._speculation.draft_queue._waiting
        assert not self.model.known or not self.scheduler._speculation.draft_queue.has_model
        for stage in self.stages:
            assert stage.swaps == self.stages[0].swaps
            assert not stage.requests
            assert not stage.running
            assert not stage.scoreboard.num_waiting
            assert not len(stage.collector)
            misbehaved = stage.scoreboard.counters.keys() - {"dropped_slices", "dropped_volumes"}
            assert not misbehaved


def make_prompt(rng: random.Random, ring: Ring, total: int) -> tuple[int, ...]:
    """A prompt of new tokens, often after an earlier request's prompt or answer."""
    tokens = [rng.randrange(VOCABULARY) for _ in range(total)]
    if ring.clients and rng.random() < 0.8:
        client = rng.choice(list(ring.clients.values()))
        known = [*client.submitted, *client.got]
        shared = rng.choice([len(known), rng.randint(0, len(known))])
        tokens[:shared] = known[: min(total, shared)]
    return tuple(tokens)


#: With these profiles long latencies cause prefill-only chunks, unless the number of micro-batches
#: is fixed.
STAGE = Profile(decode=((1, 0.01),), prefill=((16, 0.01),))
SMALL = DraftModelFacts(STAGE.scale_by(0.1), 30)


def make_request(rng: random.Random, ring: Ring, key: str, maximum: int) -> RequestState:
    """A request that fits into a KV pool of ``maximum`` tokens."""
    total = rng.randint(1, rng.choice([1, max(1, maximum // 4), max(1, maximum - 1)]))
    answer = rng.randint(1, max(1, min(maximum - total, 16)))
    tokens = make_prompt(rng, ring, total)
    penalty = rng.choice([0.0, 0.5])
    return make_state(
        peer=rng.choice(["one", "two", "two", "two"]),
        key=key,
        tokens=tokens,
        prompt_tokens=rng.randint(1, total),
        max_tokens=answer,
        sampling_params=SamplingParams(
            seed=rng.choice([FAILING, *range(20)]), presence_penalty=penalty
        ),
        stop_token_ids=(STOP,) if rng.random() < 0.3 else (),
        credit_window=rng.choice([1, 2, 5, 256]),
    )


def compose_at_random(
    rng: random.Random, ring: Ring, name: str, maximum: int, restless: float
) -> None:
    """Compose a batch at a later time, with random changes, requests, credits and cancels."""
    ring.now += rng.choice([0.0, 0.0, 0.1, 1.0, ABANDONED_AFTER_S / 3])
    live = [key for key, client in ring.clients.items() if not client.over]
    if rng.random() < 0.1:
        stages = len(ring.stages)
        links = [LinkFacts(rng.choice([0.0, 0.03, 10.0]), None)] * stages
        profile = STAGE.scale_by(rng.choice([0.2, 1.0, 1.0, 5.0]))
        ring.scheduler.set_times(RingTimes((profile,) * stages, links, 0))
    dice = rng.random()
    if dice < 0.2 and len(ring.clients) < 24:
        for number in range(rng.randrange(1, 5)):
            ring.submit(make_request(rng, ring, f"{name}.{number}", maximum))
    elif dice < 0.6 and live:
        ring.credit(rng.choice(live))
    ring.next(prefill=rng.random() < 0.9)
    if rng.random() < restless and live:
        ring.cancel(rng.choice(live))
        ring.next()
    ring.validate()


#: Settings of models with recurrent layers.
WITH_STATES: dict[str, Any] = {"lookahead_volumes": 0, "preemption_mode": "recompute"}
ANY_RING = given(
    stages=st.integers(1, 4),
    micro_batches=st.integers(0, 4),
    block_size=st.sampled_from([1, 2, 4, 16]),
    blocks=st.integers(2, 20),
    max_num_batched_tokens=st.sampled_from([2, 8, 64]),
    max_num_seqs=st.sampled_from([1, 4, 8]),
    prefix_cache=st.sampled_from([True, True, True, False]),
    sub_chunk_policy=st.none() | st.builds(AnyPieces, st.integers(0, 99)),
    num_speculative_tokens=st.sampled_from([0, AUTO_DRAFTS, 1, 3, MAX_DRAFTS]),
    policy=st.sampled_from(["fcfs", *SCHEDULING_POLICIES]),
    ahead=st.sampled_from([0, 1, 3, MAX_LOOKAHEAD]),
    draft_model=st.sampled_from([None, SMALL]),
    preemption_mode=st.sampled_from(["proactive-swap", *PREEMPTION_MODES]),
    host_blocks=st.sampled_from([HOST_BLOCKS, 8, 2, 0]),
    state_slots=st.sampled_from([0, 0, 0, 1, 2, 3, 8]),
    seed=st.integers(0, 1 << 32),
)


def every_request_gets_its_own_tokens(
    stages: int,
    micro_batches: int,
    block_size: int,
    blocks: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    prefix_cache: bool,
    sub_chunk_policy: AnyPieces | None,
    num_speculative_tokens: int,
    policy: str,
    ahead: int,
    draft_model: DraftModelFacts | None,
    preemption_mode: PreemptionMode,
    host_blocks: int,
    state_slots: int,
    seed: int,
) -> None:
    """Any order of deliveries, cancels, preemptions and credits gives the reference's text.

    Drafts, scheduling policy and swapping don't change it.
    """
    rng = random.Random(seed)
    limits = SchedulerConfig(
        blocks,
        block_size,
        micro_batches,
        max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_queue_len=8,
        prefix_cache=prefix_cache,
        profiles=(STAGE,) * stages,
        num_stages=stages,
        num_speculative_tokens=num_speculative_tokens,
        lookahead_volumes=ahead,
        draft_model=draft_model,
        preemption_mode=preemption_mode,
    )
    if state_slots:
        rows = rng.choice([1, 1, 2, 8])
        given = WITH_STATES | {"state_slots": state_slots, "min_snapshot_rows": rows}
        limits = replace(limits, **given)
    ring = Ring(stages, limits, sub_chunk_policy, rng, policy, host_blocks)
    maximum = min(blocks * block_size, 40)
    slowdown = rng.choice([2, 4, 2 * stages + 1, 6 * stages])
    restless = rng.choice([0.0, 0.05, 0.2])
    for step in range(rng.randrange(20, 120)):
        compose_at_random(rng, ring, f"r{step}", maximum, restless)
        for _ in range(rng.randrange(slowdown)):
            if events := ring.events():
                ring.do(rng.choice(events))
                ring.validate()
    ring.drain(rng.choice)


test_every_request_gets_its_own_tokens = settings(max_examples=25)(
    ANY_RING(every_request_gets_its_own_tokens)
)
test_every_request_gets_its_own_tokens_in_many_more_rings = pytest.mark.slow(
    settings(max_examples=2000)(ANY_RING(every_request_gets_its_own_tokens))
)


class RingMachine(RuleBasedStateMachine):
    """The same test as a state machine: hypothesis chooses each step, so that failures shrink."""

    def __init__(self) -> None:
        super().__init__()
        limits = SchedulerConfig(
            6,
            2,
            2,
            max_num_batched_tokens=5,
            max_num_seqs=3,
            max_queue_len=3,
            num_speculative_tokens=2,
            lookahead_volumes=2,
            preemption_mode="reactive-swap",
            draft_model=SMALL,
        )
        self.ring = Ring(3, limits, AnyPieces(1))
        self.count = 0

    def live(self) -> list[str]:
        return [key for key, client in self.ring.clients.items() if not client.over]

    @rule(
        tokens=st.integers(1, 8),
        shared=st.integers(0, 8),
        answer=st.integers(1, 4),
        window=st.integers(1, 3),
    )
    def submit(self, tokens: int, shared: int, answer: int, window: int) -> None:
        self.count += 1
        ids = tuple(i if i < shared else (self.count + i) % VOCABULARY for i in range(tokens))
        sampling = SamplingParams(seed=self.count)
        owner = f"owner {self.count % 2}"
        self.ring.submit(
            make_state(owner, f"r{self.count}", ids, tokens, answer, sampling, (STOP,), window)
        )

    @rule(seconds=st.sampled_from([1.0, ABANDONED_AFTER_S]))
    def wait(self, seconds: float) -> None:
        self.ring.now += seconds

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.ring.cancel(data.draw(st.sampled_from(self.live())))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def credit(self, data: st.DataObject) -> None:
        self.ring.credit(data.draw(st.sampled_from(self.live())))

    @rule()
    def next(self) -> None:
        self.ring.next()

    @precondition(lambda self: self.ring.events())
    @rule(data=st.data())
    def event(self, data: st.DataObject) -> None:
        self.ring.do(data.draw(st.sampled_from(self.ring.events())))

    @invariant()
    def valid(self) -> None:
        self.ring.validate()

    def teardown(self) -> None:
        self.ring.drain(lambda events: events[0])


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=25, stateful_step_count=60, deadline=None)


def advance(ring: Ring) -> None:
    """Deliver everything in the ring once, in order."""
    while events := ring.events():
        ring.do(events[-1])


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("when", ["waiting", "prefilling", "in flight", "between"])
def test_cancel_frees_blocks_within_one_iteration(stages: int, when: str) -> None:
    ring = Ring(stages, SchedulerConfig(64, 4, 2, max_num_batched_tokens=8))
    request = make_state("daemon", "a", tuple(range(20)), 20, 30, SamplingParams())
    ring.submit(request)
    ring.submit(make_state("daemon", "b", (1, 2, 3), 3, 30, SamplingParams()))
    rounds = {"waiting": 0, "prefilling": 1, "in flight": 5, "between": 5}[when]
    for _ in range(rounds):
        ring.next()
        advance(ring)
    if when in ("prefilling", "in flight"):
        ring.next()
    ring.cancel("a")
    ring.next()
    advance(ring)
    _, gauges = ring.scheduler.collect_stats()
    held = len(ring.scheduler._queues.find_request("daemon", "b").blocks)
    assert gauges["scheduler_blocks_used"] == held
    assert gauges["scheduler_cancel_iterations_max"] == (0 if when == "waiting" else 1)
    ring.drain(lambda events: events[0])


@pytest.mark.parametrize("seed", range(4))
def test_chats_continue_from_kept_states(seed: int) -> None:
    """Stages copy snapshots of states before they are overwritten, in any order of events."""
    rng = random.Random(seed)
    limits = SchedulerConfig(
        64, 4, 2, max_num_batched_tokens=8, **WITH_STATES, state_slots=6, min_snapshot_rows=4
    )
    ring = Ring(3, limits, AnyPieces(seed))
    system = tuple(rng.randrange(VOCABULARY) for _ in range(13))
    for turn in range(4):
        for chat in range(3):
            before = ring.clients.get(f"{turn - 1}.{chat}")
            known = system if before is None else (*before.submitted, *before.got)
            tokens = (*known, *(rng.randrange(VOCABULARY) for _ in range(4)))
            sampling = SamplingParams(seed=chat)
            ring.submit(make_state("daemon", f"{turn}.{chat}", tokens, len(tokens), 7, sampling))
        ring.drain(rng.choice)
    assert all(stage.num_copies >= 9 for stage in ring.stages)
    assert ring.scheduler.collect_stats()[1]["scheduler_prefix_hit_rate"] > 0.5


def test_rejected_row_ends_only_its_request() -> None:
    ring = Ring(2, SchedulerConfig(64, 4, 2))
    for key in "ab":
        ring.submit(make_state("daemon", key, (1, 2, 3), 3, 30, SamplingParams(seed=ord(key))))
    ring.next()
    events = []
    ring._emit = events.extend
    while not (channel := ring.channels[1, 0]) or not isinstance(channel[0][0], SamplerOutput):
        ring.do(ring.events()[-1])
    sampled, data = channel.popleft()
    first = sampled.sampled[0].request
    kept = tuple(choice for choice in sampled.sampled if choice.request != first)
    channel.appendleft((SamplerOutput(sampled.seq, kept, (first,)), data))
    ring.deliver(1, 0)
    rejected, token = (emission.message for emission in events)
    assert isinstance(rejected, Rejected)
    assert (rejected.key, rejected.reason) == ("a", "failed")
    assert isinstance(token, OutputToken)
    assert token.key == "b"


@pytest.mark.parametrize("seed", range(4))
def test_lookahead_does_not_change_answers(seed: int) -> None:
    """Few requests with many lookahead drafts, both right and wrong."""
    rng = random.Random(seed)
    limits = SchedulerConfig(
        64, 4, 2, max_num_batched_tokens=16, num_speculative_tokens=3, lookahead_volumes=4
    )
    ring = Ring(3, limits, rng=rng)
    for number in range(3):
        sampling = SamplingParams(seed=20 + number, presence_penalty=0.5 * (number % 2))
        ring.submit(make_state("d", str(number), (number, 1, 2), 3, 40, sampling))
    ring.drain(rng.choice)
    assert ring.ahead["right"] > 5
    assert ring.ahead["wrong"] > 5


@pytest.mark.parametrize("num_speculative_tokens", [3, AUTO_DRAFTS])
def test_draft_model_does_not_change_answers(num_speculative_tokens: int) -> None:
    rng = random.Random(6)
    stages = {"profiles": (STAGE,) * 3, "num_stages": 3}
    limits = SchedulerConfig(
        64,
        4,
        2,
        max_num_batched_tokens=16,
        num_speculative_tokens=num_speculative_tokens,
        draft_model=SMALL,
        **stages,
    )
    ring = Ring(3, limits, rng=rng)
    ring.scheduler.set_times(RingTimes((STAGE,) * 3, (LinkFacts(10.0, None),) * 3, 0))
    for number in range(6):
        request = make_state("d", str(number), (number, 1), 2, 24, SamplingParams(seed=20 + number))
        ring.submit(request)
    ring.drain(rng.choice)
    assert ring.scheduler.collect_stats()[0]["scheduler_draft_model_tokens_total"] > 20
