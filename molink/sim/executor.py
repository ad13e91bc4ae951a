"""Simulated stage executor and draft model, which take virtual time but compute nothing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from molink.facts.drafts import MAX_DRAFTS, DraftBatch, DraftRequest, DraftResults, DraftTokens
from molink.facts.images import ImageSpan
from molink.ring.stage import StageShape
from molink.ring.step import BlockCopy, StepInput, StepOutput, StepResult
from molink.sim.event_queue import EventQueue, ScheduledCallback
from molink.sim.known_text import KnownText
from molink.sim.pc import SimPc
from molink.sim.roofline import Roofline, StepRows
from molink.wire.messages.data_plane import (
    Admit,
    ForcedTokens,
    RequestSlice,
    SampledId,
    SamplerOutput,
    Volume,
)

#: Called with the begin, seconds, decode rows and prefill rows of each step.
OnStep = Callable[[float, float, int, int], None]
#: Returns the token of a request at a position.
TokenAt = Callable[[int, int], int]
#: Returns the forced tokens of a request from a position on.
ForcedAt = Callable[[int, int], Sequence[int]]


class SimStageRequests:
    """Live requests of a stage, with the seeds that identify their texts."""

    def __init__(self) -> None:
        #: Seeds by request.
        self._live: dict[int, int] = {}
        #: Position and token last sampled, by request.
        self.last_sampled: dict[int, tuple[int, int]] = {}

    def admit_request(self, message: Admit) -> None:
        self._live[message.request] = message.sampling_params.seed

    def seed_of(self, request: int) -> int:
        return self._live[request]

    def add_history(self, request: int, first: int, ids: memoryview) -> None:
        """Do nothing."""

    def set_grammar(self, request: int, text: bytes) -> None:
        """Do nothing."""

    def set_images(self, request: int, spans: Sequence[ImageSpan], rows: object) -> None:
        """Do nothing."""

    def append_blocks(self, request: int, blocks: Sequence[int]) -> None:
        """Do nothing."""

    def release_request(self, request: int) -> None:
        self._live.pop(request, None)
        self.last_sampled.pop(request, None)

    def __len__(self) -> int:
        return len(self._live)


def step_rows(volumes: Iterable[Volume], is_last: bool) -> StepRows:
    """Count the rows of a step over ``volumes``; only the last stage samples."""
    decode = decode_context = prefill = prefill_context = sampled = 0
    for volume in volumes:
        for request_slice in volume.slices:
            count = request_slice.count
            if volume.prefill:
                prefill += count
                prefill_context += count * request_slice.start + count * (count + 1) // 2
            else:
                decode += count
                decode_context += count * request_slice.start
            sampled += (1 + len(request_slice.verified_drafts)) * (request_slice.sample and is_last)
    return StepRows(decode, decode_context, prefill, prefill_context, sampled)


@dataclass(slots=True)
class RunningChunk:
    """A running step of prefill rows. Decode rows that run between its layers postpone its end."""

    #: Begin and end in seconds; a step between its layers moves both by its duration.
    began_at: float
    end_at: float
    layer_s: float
    end: Callable[[], None]
    scheduled: ScheduledCallback

    def postpone(self, seconds: float, event_queue: EventQueue) -> None:
        """Postpone the end by ``seconds``."""
        self.scheduled.cancel()
        self.began_at += seconds
        self.end_at += seconds
        self.scheduled = event_queue.call_at(self.end_at, self.end)

    def next_layer_s(self, now: float) -> float:
        """Seconds until its current layer ends."""
        return self.layer_s - (now - self.began_at) % self.layer_s


class SimExecutor:
    """Executes each step in the time that the roofline and the PC predict.

    Rows are views of ``zeros``, which must hold the largest volume. ``token`` returns the token to
    sample for a request at a position, ``forced`` the forced tokens that follow. Copies to and from
    host memory take ``block_s`` seconds per block; they run one after another, concurrently with
    steps, and a step waits for copies of its blocks. If the device interleaves, a step submitted
    during a step of prefill rows runs between its layers.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        stage: StageShape,
        roofline: Roofline,
        zeros: memoryview,
        pc: SimPc,
        requests: SimStageRequests,
        token: TokenAt = lambda request, position: 0,
        forced: ForcedAt = lambda request, position: (),
        block_s: float = 0.0,
    ) -> None:
        self._event_queue = event_queue
        self._is_last = stage.is_last
        self._row_bytes = stage.row_bytes
        self._roofline = roofline
        self._zeros = zeros
        self._pc = pc
        self._requests = requests
        self._token_at = token
        self._forced_at = forced
        self._block_s = block_s
        #: End of the current step, and of all copies submitted.
        self._step_end = self._copies_end = 0.0
        self._chunk: RunningChunk | None = None
        #: End of each request's swap-in, and of each block's swap-out.
        self._swap_in_ends: dict[int, float] = {}
        self._swap_out_ends: dict[int, float] = {}
        #: Seconds that steps have waited for copies.
        self.waited_s = 0.0
        self.on_step: OnStep | None = None

    def submit_copy(self, copy: BlockCopy) -> None:
        """Schedule a copy after the current step and earlier copies."""
        begin = max(self._event_queue.now, self._step_end, self._copies_end)
        self._copies_end = end = begin + self._block_s * len(copy.blocks)
        if copy.is_swap_out:
            self._swap_out_ends.update(dict.fromkeys(copy.blocks, end))
        else:
            self._swap_in_ends[copy.request] = end

    def submit_step(
        self, step_inputs: Sequence[StepInput], done: Callable[[StepResult], None]
    ) -> None:
        if self._chunk is not None and self._event_queue.now < self._chunk.end_at:
            self._interleave_step(self._chunk, step_inputs, done)
            return
        size = step_rows([step_input.volume for step_input in step_inputs], self._is_last)
        now = self._event_queue.now
        wait = self._wait_s(step_inputs, now)
        self.waited_s += wait
        seconds = wait + self._pc.reserve_device(self._roofline.step_s(size), now + wait)
        self._step_end = now + seconds
        if self.on_step is not None:
            self.on_step(now, seconds, size.decode, size.prefill)
        end = partial(self._end_step, step_inputs, done, seconds)
        scheduled = self._event_queue.call_at(self._step_end, end)
        layer_s = seconds / self._roofline.layers
        self._chunk = (
            None
            if size.decode or not self._roofline.interleaves
            else RunningChunk(now, self._step_end, layer_s, end, scheduled)
        )

    def _interleave_step(
        self,
        chunk: RunningChunk,
        step_inputs: Sequence[StepInput],
        done: Callable[[StepResult], None],
    ) -> None:
        """Run a step after the current layer of ``chunk``."""
        size = step_rows([each.volume for each in step_inputs], self._is_last)
        begin = self._event_queue.now + chunk.next_layer_s(self._event_queue.now)
        wait = self._wait_s(step_inputs, begin)
        self.waited_s += wait
        seconds = wait + self._pc.prolong_step(self._roofline.step_s(size))
        chunk.postpone(seconds, self._event_queue)
        self._step_end = chunk.end_at
        if self.on_step is not None:
            self.on_step(begin, seconds, size.decode, size.prefill)
        self._event_queue.schedule_at(begin + seconds, self._end_step, step_inputs, done, seconds)

    def _wait_s(self, step_inputs: Sequence[StepInput], now: float) -> float:
        """Return the seconds until all blocks of a step are copied."""
        if self._copies_end <= now:
            self._swap_in_ends.clear()
            self._swap_out_ends.clear()
            return 0.0
        slices = [
            request_slice
            for step_input in step_inputs
            for request_slice in step_input.volume.slices
        ]
        ends = [self._swap_in_ends.get(request_slice.request, now) for request_slice in slices]
        ends += [
            self._swap_out_ends.get(block, now)
            for request_slice in slices
            for block in request_slice.blocks
        ]
        return max(0.0, max(ends, default=now) - now)

    def _end_step(
        self, step_inputs: Sequence[StepInput], done: Callable[[StepResult], None], seconds: float
    ) -> None:
        done(
            StepResult([self._make_result(step_input) for step_input in step_inputs], seconds, None)
        )

    def _make_result(self, step_input: StepInput) -> StepOutput:
        volume = step_input.volume
        if not self._is_last:
            return StepOutput(volume, self._zeros[: volume.count * self._row_bytes], None)
        choices = [
            choice
            for request_slice in volume.slices
            if request_slice.sample
            for choice in self._sample_tokens(request_slice)
        ]
        forced = tuple(self._forced_tokens(choices))
        return StepOutput(volume, None, SamplerOutput(volume.seq, tuple(choices), (), forced))

    def _sample_tokens(self, request_slice: RequestSlice) -> Iterator[SampledId]:
        """Sample after the last row; with drafts, after each row up to the first mismatch."""
        last = self._requests.last_sampled
        if not request_slice.continues_from(*last.get(request_slice.request, (-1, -1))):
            return
        first = request_slice.start + request_slice.count - len(request_slice.verified_drafts)
        for position, draft in enumerate((*request_slice.verified_drafts, None), first):
            token = self._token_at(request_slice.request, position)
            last[request_slice.request] = position, token
            yield SampledId(request_slice.request, position, token)
            if token != draft:
                return

    def _forced_tokens(self, choices: Sequence[SampledId]) -> Iterator[ForcedTokens]:
        """Yield the forced tokens after the last sampled token of each request."""
        for request, position in {each.request: each.position for each in choices}.items():
            tokens = self._forced_at(request, position + 1)[:MAX_DRAFTS]
            if tokens:
                yield ForcedTokens(request, tuple(tokens))


class SimDrafter:
    """A draft model on the first stage's device, whose steps it delays.

    It proposes the known drafts of the request's text, as long as they are probable enough.
    """

    def __init__(
        self, event_queue: EventQueue, roofline: Roofline, pc: SimPc, texts: Sequence[KnownText]
    ) -> None:
        self._event_queue = event_queue
        self._roofline = roofline
        self._pc = pc
        self._texts = texts
        #: Tokens read, by request.
        self._tokens: dict[int, list[int]] = {}

    def request_drafts(self, batch: DraftBatch, done: Callable[[DraftResults], None]) -> None:
        """Propose drafts for each request, after the predicted time."""
        for number in batch.finished:
            self._tokens.pop(number, None)
        drafts = [self._draft_tokens(request) for request in batch.requests]
        seconds = self._order_s(batch.requests, drafts)
        wait = self._pc.reserve_device(seconds, self._event_queue.now)
        self._event_queue.schedule_at(
            self._event_queue.now + wait, done, DraftResults(drafts, seconds * self._pc.slowdown)
        )

    def _draft_tokens(self, request: DraftRequest) -> DraftTokens:
        known = self._tokens.setdefault(request.request, [])
        known[request.position :] = request.tokens
        text = next((text for text in self._texts if text.has_prefix(known)), None)
        if not request.max_drafts or text is None:
            return DraftTokens(request.request)
        tokens, probabilities = text.model_drafts_at(len(known))
        upto, probability = 0, 1.0
        while (
            upto < min(request.max_drafts, len(tokens)) and probability >= request.min_probability
        ):
            probability *= probabilities[upto]
            upto += 1
        return DraftTokens(request.request, tokens[:upto], probabilities[:upto])

    def _order_s(self, requests: Sequence[DraftRequest], drafts: Sequence[DraftTokens]) -> float:
        """Return the seconds of a pass over the new tokens plus one pass for each further draft."""
        if not requests:
            return 0.0
        new, before = (
            sum(len(request.tokens) for request in requests),
            sum(request.position for request in requests),
        )
        few = new <= 2 * len(requests)
        first = StepRows(
            decode=new if few else 0,
            decode_context=before if few else 0,
            prefill=0 if few else new,
            prefill_context=0 if few else new * before // len(requests),
            sampled=sum(request.max_drafts > 0 for request in requests),
        )
        seconds = self._roofline.step_s(first)
        for num_passes in range(1, max(len(draft.tokens) for draft in drafts)):
            active = [
                a for a, g in zip(requests, drafts, strict=True) if len(g.tokens) > num_passes
            ]
            context = sum(request.position for request in active)
            rows = StepRows(decode=len(active), decode_context=context, sampled=len(active))
            seconds += self._roofline.step_s(rows)
        return seconds
