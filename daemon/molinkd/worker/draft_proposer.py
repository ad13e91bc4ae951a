"""Draft model: a small model on the first stage's device that proposes speculative tokens."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from molink.facts.drafts import DraftBatch, DraftRequest, DraftResults, DraftTokens
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.sampling.greedy import find_likeliest
from molink.stage.stage import Stage

log = logging.getLogger(__name__)

#: A request with at most ``_FEW`` new rows runs them as decode rows, which CUDA graphs can replay;
#: a pass has at most ``_MOST`` rows.
_FEW, _MOST = 4, 512
#: Lower bound of a probability: probabilities are multiplied and divided.
_MIN_PROBABILITY = 0.01


@dataclass(slots=True, eq=False)
class _DraftSequence:
    """Tokens and drafts of one request; the KV of the first ``num_computed`` is in ``blocks``."""

    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    #: Whether a token is outside the draft model's vocabulary.
    has_unknown_tokens: bool = False


@dataclass(slots=True, eq=False)
class _DraftState:
    """One request's drafts in progress; ``probability`` is that of all drafts together."""

    ask: DraftRequest
    sequence: _DraftSequence
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    probability: float = 1.0
    is_finished: bool = False


class DraftProposer:
    """Runs all layers of a draft model in a KV pool that is separate from the stage's. Not
    thread-safe.

    Drafts are greedy regardless of the request's sampling parameters: verification corrects them.
    After a rejection the sequence continues from the last accepted token. When blocks run out, the
    least recently drafted sequence is evicted and recomputed on its next use.
    """

    def __init__(self, stage: Stage, blocks: int, block_size: int, vocab_size: int) -> None:
        """``vocab_size`` is the target model's."""
        stage.allocate_kv_pool(blocks, block_size)
        self._stage = stage
        self._block_size = block_size
        self._vocab_size = min(vocab_size, stage.config.vocab_size)
        self._free_blocks = list(range(blocks))
        #: By request id, least recently used first.
        self._sequences: dict[int, _DraftSequence] = {}
        self._max_positions = min(stage.config.max_model_len, blocks * block_size)

    @property
    def num_held_blocks(self) -> int:
        return sum(len(sequence.blocks) for sequence in self._sequences.values())

    @torch.inference_mode()
    def propose_drafts(self, command: DraftBatch) -> list[DraftTokens]:
        """Propose up to ``max_drafts`` tokens per request; none where drafting is impossible."""
        for number in command.finished:
            sequence = self._sequences.pop(number, None)
            if sequence is not None:
                self._free_blocks += sequence.blocks
        requested = [self._sync_sequence(ask) for ask in command.requests]
        active = [each for each in requested if self._reserve_blocks(each, requested)]
        active = self._prefill_sequences(active)
        while active:
            active = self._decode_next(active)
        return [
            DraftTokens(each.ask.request, tuple(each.tokens), tuple(each.probabilities))
            for each in requested
        ]

    def _sync_sequence(self, ask: DraftRequest) -> _DraftState:
        """Take over the request's new tokens; KV of correct drafts stays valid."""
        sequence = self._sequences.pop(ask.request, None) or _DraftSequence()
        self._sequences[ask.request] = sequence
        right, guessed = 0, sequence.tokens[ask.position :]
        for token, guess in zip(ask.tokens, guessed, strict=False):
            if token != guess:
                break
            right += 1
        sequence.tokens[ask.position :] = ask.tokens
        sequence.has_unknown_tokens |= any(
            token >= self._stage.config.vocab_size for token in ask.tokens
        )
        sequence.num_computed = min(sequence.num_computed, ask.position + right)
        if ask.max_drafts:  # the logits after the last token are needed
            sequence.num_computed = min(sequence.num_computed, len(sequence.tokens) - 1)
        return _DraftState(ask, sequence)

    def _reserve_blocks(self, requested: _DraftState, beside: Sequence[_DraftState]) -> bool:
        """Reserve blocks for all tokens and drafts; return whether there are enough."""
        sequence = requested.sequence
        upto = len(sequence.tokens) + requested.ask.max_drafts
        if upto > self._max_positions or sequence.has_unknown_tokens:
            return False
        lacking = -(-upto // self._block_size) - len(sequence.blocks)
        if lacking > len(self._free_blocks):
            in_use = {id(each.sequence) for each in beside}
            for other in self._sequences.values():
                if lacking <= len(self._free_blocks):
                    break
                if id(other) not in in_use:
                    self._free_blocks += other.blocks
                    other.blocks, other.num_computed = [], 0
        if lacking > len(self._free_blocks):
            return False
        if lacking > 0:
            sequence.blocks += self._free_blocks[-lacking:]
            del self._free_blocks[-lacking:]
        return True

    def _prefill_sequences(self, requested: Sequence[_DraftState]) -> list[_DraftState]:
        """Compute missing KV in one pass and draft the first token of each request.

        A request that needs more than one pass, after an eviction, gets no drafts this time.
        """
        batch, parts, room = list[_DraftState](), list[int](), _MOST
        for each in requested:
            count = min(len(each.sequence.tokens) - each.sequence.num_computed, room)
            if count:
                batch.append(each)
                parts.append(count)
                room -= count
        if not batch:
            return []
        logits = self._forward(batch, parts)
        wanted = [
            index
            for index, each in enumerate(batch)
            if each.ask.max_drafts and each.sequence.num_computed == len(each.sequence.tokens)
        ]
        return self._pick_drafts([batch[index] for index in wanted], logits[wanted])

    def _decode_next(self, active: Sequence[_DraftState]) -> list[_DraftState]:
        logits = self._forward(active, [1] * len(active))
        return self._pick_drafts(active, logits)

    def _forward(self, batch: Sequence[_DraftState], parts: Sequence[int]) -> Tensor:
        """Compute the next rows of each sequence; logits ``[len(batch), vocab_size]`` of the last
        ones.
        """
        ids, ends, sequences = list[int](), list[int](), list[SequenceRows]()
        for each, count in zip(batch, parts, strict=True):
            sequence = each.sequence
            first = sequence.num_computed
            ids += sequence.tokens[first : first + count]
            ends.append(len(ids) - 1)
            rows = 1 if count <= _FEW else count
            sequences += [
                SequenceRows(start, rows, sequence.blocks)
                for start in range(first, first + count, rows)
            ]
            sequence.num_computed += count
        tokens = torch.tensor(ids, dtype=torch.int64)
        logits = self._stage.forward(StageInput(tokens, None, tuple(sequences), tuple(ends)))
        return logits[:, : self._vocab_size]

    def _pick_drafts(self, requested: Sequence[_DraftState], logits: Tensor) -> list[_DraftState]:
        """Append the likeliest token of each; return the requests that continue."""
        for each, token, probability in zip(requested, *find_likeliest(logits), strict=True):
            if not math.isfinite(probability):
                each.is_finished = True
                continue
            each.tokens.append(token)
            each.sequence.tokens.append(token)
            each.probabilities.append(max(_MIN_PROBABILITY, probability))
            each.probability *= probability
            each.is_finished = (
                len(each.tokens) == each.ask.max_drafts
                or each.probability < each.ask.min_probability
            )
        return [each for each in requested if not each.is_finished]


class DraftModelThread:
    """Runs a draft proposer between a stage's steps, on the stage's compute thread."""

    def __init__(
        self,
        make: Callable[[], DraftProposer],
        submit_task: Callable[[Callable[[], None]], None],
        hand_over: Callable[..., object],
    ) -> None:
        """``submit_task(task)`` runs a task after the queued steps; ``create`` is the first task.

        ``hand_over(function, argument)`` calls a function on the ring's thread.
        """
        self._proposer: DraftProposer | None = None
        self._create = make
        self._submit_task = submit_task
        self._hand_over = hand_over
        submit_task(self._create_proposer)

    def request_drafts(self, command: DraftBatch, done: Callable[[DraftResults], None]) -> None:
        """See :meth:`molink.ring.stage.DraftRunner.request_drafts`."""

        def task() -> None:
            began = time.perf_counter()
            try:
                drafter = self._proposer
                found = (
                    DraftResults(failed=True)
                    if drafter is None
                    else DraftResults(drafter.propose_drafts(command))
                )
            except Exception:
                log.exception("the draft model failed; it proposes no more drafts")
                found = DraftResults(failed=True)
            self._hand_over(done, found._replace(seconds=time.perf_counter() - began))

        self._submit_task(task)

    def _create_proposer(self) -> None:
        try:
            self._proposer = self._create()
        except Exception:
            log.exception("the draft model has no KV pool and proposes no drafts")
