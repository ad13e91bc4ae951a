"""The two ends of the ring: what the first stage has with the head, and the last by sampling."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from molink.facts.drafts import DraftResults
from molink.ring.scoreboard import Scoreboard
from molink.ring.stage import DraftRunner
from molink.ring.step import StepOutput
from molink.scheduler.batch import MicroBatch
from molink.scheduler.request_state import Emission
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.data_plane import (
    MAX_SLICES,
    ForcedTokens,
    Release,
    SampledId,
    SamplerOutput,
    Tombstone,
    TopLogprobs,
)

#: Tops that wait for their ``SamplerOutput``: a bound against a tail that sends nothing but tops.
MAX_TOPS = 4096
#: Most bytes of a ``SamplerOutput``'s header that choices, failed and forced tokens may take, and
#: of each choice and failed request, each with forced tokens, and each of these.
_SAMPLED_BYTES, _CHOICE_BYTES, _FAILED_BYTES, _FORCED_BYTES, _ID_BYTES = 4000, 25, 5, 7, 5


class EmissionReceiver(Protocol):
    """Where the head's words to daemons go;
    :class:`molinkd.worker.request_receiver.RequestReceiver` is one."""

    def deliver_emissions(self, emissions: Iterable[Emission], now: float) -> None:
        """Tell them."""

    def close(self) -> None:
        """The epoch is over."""


class SchedulerBridge:
    """Feeds the head's micro-batches to stage 0, and to the head what comes out of the tail."""

    def __init__(
        self,
        scheduler: Scheduler,
        receiver: EmissionReceiver,
        vocabulary: int,
        draft_model: DraftRunner | None = None,
    ) -> None:
        """Token ids are below ``vocabulary``; the head may ask ``draft_model`` for drafts."""
        self.scheduler = scheduler
        self.receiver = receiver
        self._draft_model = draft_model
        self._vocabulary = vocabulary
        self._tops: dict[tuple[int, int], TopLogprobs] = {}
        #: Tokens that don't exist.
        self.num_invalid_ids = 0

    def feed_batch(self, scoreboard: Scoreboard, now: float) -> bool:
        """Give stage 0 the next micro-batch if nothing waits there; whether there was one.

        A large prefill volume of which a piece has run waits for nobody: decode rows go beside each
        of its pieces.
        """
        if scoreboard.num_queued == 0:
            batch = self.scheduler.next_batch(now)
        else:
            batch = (
                self.scheduler.next_batch(now, prefill=False)
                if scoreboard.has_only_remainders
                else None
            )
        if batch is not None:
            _enqueue_batch(batch, scoreboard, now)
        return batch is not None

    def request_drafts(self, on_done: Callable[[], None]) -> None:
        """Have the draft model do what the head wants of it; ``then`` is called once it has."""
        batch = None if self._draft_model is None else self.scheduler.pop_draft_batch()
        if self._draft_model is None or batch is None:
            return

        def guessed(found: DraftResults) -> None:
            self.scheduler.on_draft_results(found)
            on_done()

        self._draft_model.request_drafts(batch, guessed)

    def on_last_stage_message(
        self, body: SamplerOutput | TopLogprobs | Release | Tombstone, now: float
    ) -> None:
        """Something arrived at the head from the tail."""
        match body:
            case TopLogprobs():
                if len(self._tops) < MAX_TOPS:
                    self._tops[body.request, body.position] = body
            case SamplerOutput():
                emissions = self.scheduler.on_sampled(self._drop_invalid_ids(body), self._tops, now)
                for choice in body.sampled:
                    self._tops.pop((choice.request, choice.position), None)
                self.receiver.deliver_emissions(emissions, now)
            case Tombstone():
                self.receiver.deliver_emissions(self.scheduler.on_tombstone(body.seq, now), now)
            case Release():
                self.scheduler.on_released(body.seq, now)
                for key in [key for key in self._tops if key[0] == body.request]:
                    del self._tops[key]

    def _drop_invalid_ids(self, sampled: SamplerOutput) -> SamplerOutput:
        """Without tokens that don't exist: a step with one would fail all requests in it."""
        choices = tuple(each for each in sampled.sampled if each.token < self._vocabulary)
        forced = tuple(each for each in sampled.forced if max(each.tokens) < self._vocabulary)
        strays = len(sampled.sampled) - len(choices) + len(sampled.forced) - len(forced)
        if not strays:
            return sampled
        self.num_invalid_ids += strays
        return msgspec.structs.replace(sampled, sampled=choices, forced=forced)


def _enqueue_batch(batch: MicroBatch, scoreboard: Scoreboard, now: float) -> None:
    for control in batch.controls:
        scoreboard.on_message(control.body, control.payload, now)
    for volume in batch.volumes:
        scoreboard.on_message(volume.header, volume.tokens, now)


class SampleCollector:
    """What the tail samples from a volume, piece by piece, until it can be reported.

    There is one :class:`SamplerOutput` per volume, with the last piece; the head waits for that.
    """

    def __init__(self) -> None:
        self._sampled: dict[int, list[SampledId]] = {}
        #: In order and without doubles: a request that has failed does so in every later piece.
        self._failed: dict[int, dict[int, None]] = {}
        self._forced: dict[int, list[ForcedTokens]] = {}

    def add_output(
        self, sampled: SamplerOutput, result: StepOutput, *, last: bool
    ) -> list[TopLogprobs | SamplerOutput]:
        """A piece's ``result`` came with ``sampled``: what goes to the head now."""
        seq = sampled.seq
        choices = self._sampled.setdefault(seq, [])
        failed = self._failed.setdefault(seq, {})
        forced = self._forced.setdefault(seq, [])
        choices += sampled.sampled
        failed.update(dict.fromkeys(sampled.failed))
        forced += sampled.forced
        if not last:
            return [*result.tops]
        del self._sampled[seq], self._failed[seq], self._forced[seq]
        told = _fit_forced(forced, len(choices), len(failed))
        return [*result.tops, SamplerOutput(seq, tuple(choices), tuple(failed), told)]

    def __len__(self) -> int:
        """Volumes of which more pieces are to come."""
        return len(self._sampled)


def _fit_forced(
    forced: Sequence[ForcedTokens], choices: int, failed: int
) -> tuple[ForcedTokens, ...]:
    """As many of the first as a header has room for, beside so many choices and failed requests.

    And as a volume has for them and a row before each.
    """
    room, rows, found = _SAMPLED_BYTES - _CHOICE_BYTES * choices - _FAILED_BYTES * failed, 0, []
    for each in forced:
        room -= _FORCED_BYTES + _ID_BYTES * len(each.tokens)
        rows += 1 + len(each.tokens)
        if room < 0 or rows > MAX_SLICES:
            break
        found.append(each)
    return tuple(found)
