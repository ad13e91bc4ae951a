"""A draft model: a small one that guesses how requests go on, on the device of the first stage."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from molink.facts.drafts import DraftAsk, DraftOrder, Guess, Guesses
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage

log = logging.getLogger(__name__)

#: New rows of a request up to which each is a decode row, and so part of a CUDA graph; and those of
#: a pass.
_FEW, _MOST = 4, 512
#: A chance is at least this: they are multiplied and divided.
_LEAST = 0.01


@dataclass(slots=True, eq=False)
class _Known:
    """A request: its tokens and the guesses after them, of which the first have their KV."""

    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    #: Whether it has a token that the model doesn't have.
    is_strange: bool = False


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is asked for; what was guessed, and how likely it is right as a whole."""

    ask: DraftAsk
    known: _Known
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    chance: float = 1.0
    is_over: bool = False


class Drafter:
    """All layers of a small model with KV blocks of its own. Not thread-safe.

    Guesses are the likeliest tokens, whatever the request's sampling: they are verified as other
    drafts are. Where tokens are not what it has guessed, it goes on from the last that was right,
    and what it has computed beyond is written over. If blocks run out, who has not been asked about
    for longest is computed anew when it is.
    """

    def __init__(self, stage: Stage, blocks: int, block_size: int, vocabulary: int) -> None:
        """Ids below ``vocabulary`` are tokens of the model that it drafts for."""
        stage.allocate(blocks, block_size)
        self._stage = stage
        self._size = block_size
        self._vocabulary = min(vocabulary, stage.config.vocab_size)
        self._free = list(range(blocks))
        #: By number; who was asked about last comes last.
        self._known: dict[int, _Known] = {}
        self._longest = min(stage.config.context, blocks * block_size)

    @property
    def held(self) -> int:
        """KV blocks that requests hold."""
        return sum(len(known.blocks) for known in self._known.values())

    @torch.inference_mode()
    def answer(self, order: DraftOrder) -> list[Guess]:
        """What may follow the tokens of each ask; nothing where it can't tell."""
        for number in order.over:
            known = self._known.pop(number, None)
            if known is not None:
                self._free += known.blocks
        asked = [self._take(ask) for ask in order.asks]
        active = [each for each in asked if self._make_room(each, asked)]
        active = self._catch_up(active)
        while active:
            active = self._go_on(active)
        return [Guess(each.ask.request, tuple(each.tokens), tuple(each.chances)) for each in asked]

    def _take(self, ask: DraftAsk) -> _Asked:
        """What it is told of a request; guesses that were right stay."""
        known = self._known.pop(ask.request, None) or _Known()
        self._known[ask.request] = known
        right, guessed = 0, known.tokens[ask.known :]
        for token, guess in zip(ask.tokens, guessed, strict=False):
            if token != guess:
                break
            right += 1
        known.tokens[ask.known :] = ask.tokens
        known.is_strange |= any(token >= self._stage.config.vocab_size for token in ask.tokens)
        known.computed = min(known.computed, ask.known + right)
        if ask.wanted:  # the logits after the last one are wanted
            known.computed = min(known.computed, len(known.tokens) - 1)
        return _Asked(ask, known)

    def _make_room(self, asked: _Asked, beside: Sequence[_Asked]) -> bool:
        """Blocks for all of its tokens and guesses; whether there are enough."""
        known = asked.known
        upto = len(known.tokens) + asked.ask.wanted
        if upto > self._longest or known.is_strange:
            return False
        lacking = -(-upto // self._size) - len(known.blocks)
        if lacking > len(self._free):
            kept = {id(each.known) for each in beside}
            for other in self._known.values():
                if lacking <= len(self._free):
                    break
                if id(other) not in kept:
                    self._free += other.blocks
                    other.blocks, other.computed = [], 0
        if lacking > len(self._free):
            return False
        if lacking > 0:
            known.blocks += self._free[-lacking:]
            del self._free[-lacking:]
        return True

    def _catch_up(self, asked: Sequence[_Asked]) -> list[_Asked]:
        """Compute what is known, and guess the first token of those that are asked for.

        In one pass: who lacks more than that, its blocks having been given to others, has no guess.
        """
        batch, parts, room = list[_Asked](), list[int](), _MOST
        for each in asked:
            count = min(len(each.known.tokens) - each.known.computed, room)
            if count:
                batch.append(each)
                parts.append(count)
                room -= count
        if not batch:
            return []
        logits = self._run(batch, parts)
        wanted = [
            index
            for index, each in enumerate(batch)
            if each.ask.wanted and each.known.computed == len(each.known.tokens)
        ]
        return self._guess([batch[index] for index in wanted], logits[wanted])

    def _go_on(self, active: Sequence[_Asked]) -> list[_Asked]:
        """A row of each, the last guess."""
        logits = self._run(active, [1] * len(active))
        return self._guess(active, logits)

    def _run(self, batch: Sequence[_Asked], parts: Sequence[int]) -> Tensor:
        """Compute the next rows of each; logits ``[len(batch), vocabulary]`` after them."""
        ids, ends, sequences = list[int](), list[int](), list[SequenceRows]()
        for each, count in zip(batch, parts, strict=True):
            known = each.known
            first = known.computed
            ids += known.tokens[first : first + count]
            ends.append(len(ids) - 1)
            rows = 1 if count <= _FEW else count
            sequences += [
                SequenceRows(start, rows, known.blocks)
                for start in range(first, first + count, rows)
            ]
            known.computed += count
        tokens = torch.tensor(ids, dtype=torch.int64)
        logits = self._stage.forward(StageInput(tokens, None, tuple(sequences), tuple(ends)))
        return logits[:, : self._vocabulary]

    def _guess(self, asked: Sequence[_Asked], logits: Tensor) -> list[_Asked]:
        """The likeliest token of each; who is to go on from there."""
        likeliest = logits.max(dim=1)
        chances = (likeliest.values - logits.logsumexp(dim=1)).exp().tolist()
        for each, token, chance in zip(asked, likeliest.indices.tolist(), chances, strict=True):
            if not math.isfinite(chance):
                each.is_over = True
                continue
            each.tokens.append(token)
            each.known.tokens.append(token)
            each.chances.append(max(_LEAST, chance))
            each.chance *= chance
            each.is_over = len(each.tokens) == each.ask.wanted or each.chance < each.ask.least
        return [each for each in asked if not each.is_over]


class DraftThread:
    """Asks a drafter between the steps of a stage, on the thread that runs these."""

    def __init__(
        self,
        make: Callable[[], Drafter],
        between: Callable[[Callable[[], None]], None],
        hand_over: Callable[..., object],
    ) -> None:
        """``between(task)`` has a task run after the steps that are queued.

        ``make`` is the first of them. ``hand_over(function, argument)`` calls a function on the
        ring's thread.
        """
        self._drafter: Drafter | None = None
        self._make = make
        self._between = between
        self._hand_over = hand_over
        between(self._begin)

    def ask(self, order: DraftOrder, done: Callable[[Guesses], None]) -> None:
        """As :class:`molink.ring.stage.Guesser` says."""

        def task() -> None:
            began = time.perf_counter()
            try:
                drafter = self._drafter
                found = Guesses(failed=True) if drafter is None else Guesses(drafter.answer(order))
            except Exception:
                log.exception("the draft model failed: there are no drafts of it any more")
                found = Guesses(failed=True)
            self._hand_over(done, found._replace(seconds=time.perf_counter() - began))

        self._between(task)

    def _begin(self) -> None:
        try:
            self._drafter = self._make()
        except Exception:
            log.exception("the draft model has no KV pool: there are no drafts of it")
