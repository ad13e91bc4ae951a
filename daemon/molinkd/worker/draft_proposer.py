"""A draft model: a small one that guesses how requests go on, on the device of the first stage."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from molink.facts.drafts import DraftBatch, DraftRequest, DraftResults, DraftTokens
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage

log = logging.getLogger(__name__)

#: New rows of a request up to which each is a decode row, and so part of a CUDA graph; and those of
#: a pass.
_FEW, _MOST = 4, 512
#: A chance is at least this: they are multiplied and divided.
_MIN_PROBABILITY = 0.01


@dataclass(slots=True, eq=False)
class _DraftSequence:
    """A request: its tokens and the guesses after them, of which the first have their KV."""

    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    #: Whether it has a token that the model doesn't have.
    has_unknown_tokens: bool = False


@dataclass(slots=True, eq=False)
class _DraftState:
    """A request that is asked for; what was guessed, and how likely it is right as a whole."""

    ask: DraftRequest
    sequence: _DraftSequence
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    probability: float = 1.0
    is_finished: bool = False


class DraftProposer:
    """All layers of a small model with KV blocks of its own. Not thread-safe.

    Guesses are the likeliest tokens, whatever the request's sampling: they are verified as other
    drafts are. Where tokens are not what it has guessed, it goes on from the last that was right,
    and what it has computed beyond is written over. If blocks run out, who has not been asked about
    for longest is computed anew when it is.
    """

    def __init__(self, stage: Stage, blocks: int, block_size: int, vocab_size: int) -> None:
        """Ids below ``vocab_size`` are tokens of the model that it drafts for."""
        stage.allocate_kv_pool(blocks, block_size)
        self._stage = stage
        self._block_size = block_size
        self._vocab_size = min(vocab_size, stage.config.vocab_size)
        self._free_blocks = list(range(blocks))
        #: By number; who was asked about last comes last.
        self._sequences: dict[int, _DraftSequence] = {}
        self._max_positions = min(stage.config.max_model_len, blocks * block_size)

    @property
    def num_held_blocks(self) -> int:
        """KV blocks that requests hold."""
        return sum(len(sequence.blocks) for sequence in self._sequences.values())

    @torch.inference_mode()
    def propose_drafts(self, command: DraftBatch) -> list[DraftTokens]:
        """What may follow the tokens of each ask; nothing where it can't tell."""
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
        """What it is told of a request; guesses that were right stay."""
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
        if ask.max_drafts:  # the logits after the last one are wanted
            sequence.num_computed = min(sequence.num_computed, len(sequence.tokens) - 1)
        return _DraftState(ask, sequence)

    def _reserve_blocks(self, requested: _DraftState, beside: Sequence[_DraftState]) -> bool:
        """Blocks for all of its tokens and guesses; whether there are enough."""
        sequence = requested.sequence
        upto = len(sequence.tokens) + requested.ask.max_drafts
        if upto > self._max_positions or sequence.has_unknown_tokens:
            return False
        lacking = -(-upto // self._block_size) - len(sequence.blocks)
        if lacking > len(self._free_blocks):
            kept = {id(each.sequence) for each in beside}
            for other in self._sequences.values():
                if lacking <= len(self._free_blocks):
                    break
                if id(other) not in kept:
                    self._free_blocks += other.blocks
                    other.blocks, other.num_computed = [], 0
        if lacking > len(self._free_blocks):
            return False
        if lacking > 0:
            sequence.blocks += self._free_blocks[-lacking:]
            del self._free_blocks[-lacking:]
        return True

    def _prefill_sequences(self, requested: Sequence[_DraftState]) -> list[_DraftState]:
        """Compute what is known, and guess the first token of those that are asked for.

        In one pass: who lacks more than that, its blocks having been given to others, has no guess.
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
        """A row of each, the last guess."""
        logits = self._forward(active, [1] * len(active))
        return self._pick_drafts(active, logits)

    def _forward(self, batch: Sequence[_DraftState], parts: Sequence[int]) -> Tensor:
        """Compute the next rows of each; logits ``[len(batch), vocabulary]`` after them."""
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
        """The likeliest token of each; who is to go on from there."""
        likeliest = logits.max(dim=1)
        probabilities = (likeliest.values - logits.logsumexp(dim=1)).exp().tolist()
        for each, token, probability in zip(
            requested, likeliest.indices.tolist(), probabilities, strict=True
        ):
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
    """Asks a drafter between the steps of a stage, on the thread that runs these."""

    def __init__(
        self,
        make: Callable[[], DraftProposer],
        submit_task: Callable[[Callable[[], None]], None],
        hand_over: Callable[..., object],
    ) -> None:
        """``between(task)`` has a task run after the steps that are queued.

        ``make`` is the first of them. ``hand_over(function, argument)`` calls a function on the
        ring's thread.
        """
        self._proposer: DraftProposer | None = None
        self._create = make
        self._submit_task = submit_task
        self._hand_over = hand_over
        submit_task(self._create_proposer)

    def request_drafts(self, command: DraftBatch, done: Callable[[DraftResults], None]) -> None:
        """As :class:`molink.ring.stage.DraftRunner` says."""

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
                log.exception("the draft model failed: there are no drafts of it any more")
                found = DraftResults(failed=True)
            self._hand_over(done, found._replace(seconds=time.perf_counter() - began))

        self._submit_task(task)

    def _create_proposer(self) -> None:
        try:
            self._proposer = self._create()
        except Exception:
            log.exception("the draft model has no KV pool: there are no drafts of it")
