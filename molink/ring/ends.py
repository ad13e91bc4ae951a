"""The two ends of the ring: what the first stage has with the head, and the last by sampling."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from molink.facts.drafts import Guesses
from molink.ring.scoreboard import Scoreboard
from molink.ring.stage import Guesser
from molink.ring.work import SegmentResult
from molink.scheduler.batch import Batch
from molink.scheduler.head import Head
from molink.scheduler.request import Emission
from molink.wire.messages.data import (
    MAX_GROUPS,
    Choice,
    Forced,
    Release,
    Sampled,
    Tombstone,
    TopLogprobs,
)

#: Tops that wait for their ``Sampled``: a bound against a tail that sends nothing but tops.
MAX_TOPS = 4096
#: Most bytes of a ``Sampled``'s header that choices, failed and forced tokens may take, and of each
#: choice and failed request, each with forced tokens, and each of these.
_SAMPLED_BYTES, _CHOICE_BYTES, _FAILED_BYTES, _FORCED_BYTES, _ID_BYTES = 4000, 25, 5, 7, 5


class FrontDesk(Protocol):
    """Where the head's words to daemons go; :class:`molinkd.worker.desk.Desk` is one."""

    def deliver(self, emissions: Iterable[Emission], now: float) -> None:
        """Tell them."""

    def close(self) -> None:
        """The epoch is over."""


class Front:
    """Feeds the head's micro-batches to stage 0, and to the head what comes out of the tail."""

    def __init__(
        self, head: Head, desk: FrontDesk, vocabulary: int, model: Guesser | None = None
    ) -> None:
        """Token ids are below ``vocabulary``; the head may ask ``model`` for drafts."""
        self.head = head
        self.desk = desk
        self._model = model
        self._vocabulary = vocabulary
        self._tops: dict[tuple[int, int], TopLogprobs] = {}
        #: Tokens that don't exist.
        self.strays = 0

    def feed(self, board: Scoreboard, now: float) -> bool:
        """Give stage 0 the next micro-batch if nothing waits there; whether there was one.

        A large prefill volume of which a piece has run waits for nobody: decode rows go beside each
        of its pieces.
        """
        if board.queued == 0:
            batch = self.head.next(now)
        else:
            batch = self.head.next(now, prefill=False) if board.only_rests else None
        if batch is not None:
            _put(batch, board, now)
        return batch is not None

    def ask(self, then: Callable[[], None]) -> None:
        """Have the draft model do what the head wants of it; ``then`` is called once it has."""
        order = None if self._model is None else self.head.draft_order()
        if self._model is None or order is None:
            return

        def guessed(found: Guesses) -> None:
            self.head.guessed(found)
            then()

        self._model.ask(order, guessed)

    def came_round(self, body: Sampled | TopLogprobs | Release | Tombstone, now: float) -> None:
        """Something arrived at the head from the tail."""
        match body:
            case TopLogprobs():
                if len(self._tops) < MAX_TOPS:
                    self._tops[body.request, body.position] = body
            case Sampled():
                emissions = self.head.sampled(self._sensible(body), self._tops, now)
                for choice in body.choices:
                    self._tops.pop((choice.request, choice.position), None)
                self.desk.deliver(emissions, now)
            case Tombstone():
                self.desk.deliver(self.head.tombstone(body.tick, now), now)
            case Release():
                self.head.released(body.tick, now)
                for key in [key for key in self._tops if key[0] == body.request]:
                    del self._tops[key]

    def _sensible(self, sampled: Sampled) -> Sampled:
        """Without tokens that don't exist: a step with one would fail all requests in it."""
        choices = tuple(each for each in sampled.choices if each.token < self._vocabulary)
        forced = tuple(each for each in sampled.forced if max(each.tokens) < self._vocabulary)
        strays = len(sampled.choices) - len(choices) + len(sampled.forced) - len(forced)
        if not strays:
            return sampled
        self.strays += strays
        return msgspec.structs.replace(sampled, choices=choices, forced=forced)


def _put(batch: Batch, board: Scoreboard, now: float) -> None:
    for control in batch.control:
        board.arrive(control.body, control.payload, now)
    for volume in batch.volumes:
        board.arrive(volume.header, volume.tokens, now)


class Collector:
    """What the tail samples from a volume, piece by piece, until it can be reported.

    There is one :class:`Sampled` per volume, with the last piece; the head waits for that.
    """

    def __init__(self) -> None:
        self._choices: dict[int, list[Choice]] = {}
        #: In order and without doubles: a request that has failed does so in every later piece.
        self._failed: dict[int, dict[int, None]] = {}
        self._forced: dict[int, list[Forced]] = {}

    def add(
        self, sampled: Sampled, result: SegmentResult, *, last: bool
    ) -> list[TopLogprobs | Sampled]:
        """A piece's ``result`` came with ``sampled``: what goes to the head now."""
        tick = sampled.tick
        choices = self._choices.setdefault(tick, [])
        failed = self._failed.setdefault(tick, {})
        forced = self._forced.setdefault(tick, [])
        choices += sampled.choices
        failed.update(dict.fromkeys(sampled.failed))
        forced += sampled.forced
        if not last:
            return [*result.tops]
        del self._choices[tick], self._failed[tick], self._forced[tick]
        told = _that_fit(forced, len(choices), len(failed))
        return [*result.tops, Sampled(tick, tuple(choices), tuple(failed), told)]

    def __len__(self) -> int:
        """Volumes of which more pieces are to come."""
        return len(self._choices)


def _that_fit(forced: Sequence[Forced], choices: int, failed: int) -> tuple[Forced, ...]:
    """As many of the first as a header has room for, beside so many choices and failed requests.

    And as a volume has for them and a row before each.
    """
    room, rows, found = _SAMPLED_BYTES - _CHOICE_BYTES * choices - _FAILED_BYTES * failed, 0, []
    for each in forced:
        room -= _FORCED_BYTES + _ID_BYTES * len(each.tokens)
        rows += 1 + len(each.tokens)
        if room < 0 or rows > MAX_GROUPS:
            break
        found.append(each)
    return tuple(found)
