"""Connects the scheduler to stage 0, and collects the last stage's samples."""

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
from molink.wire.messages.codec import Buffer
from molink.wire.messages.data_plane import (
    MAX_SLICES,
    ForcedTokens,
    MtpDrafts,
    PooledRow,
    Release,
    SampledId,
    SamplerOutput,
    Tombstone,
    TopLogprobs,
)

#: Maximum alternatives and rows that wait for their ``SamplerOutput``, in case the last stage
#: misbehaves.
MAX_TOPS, MAX_POOLED = 4096, 512
#: Messages from the last stage to the scheduler.
LastStageMessage = SamplerOutput | TopLogprobs | PooledRow | Release | Tombstone
#: Maximum bytes of ids in a ``SamplerOutput``'s header, and bytes of each sampled id, failed
#: request, request with drafts, and draft. Probabilities take one byte each, and one more.
_BUDGET_BYTES, _SAMPLED_ID_BYTES, _FAILED_BYTES, _HINT_BYTES, _ID_BYTES = 4000, 25, 5, 7, 5
#: Drafts of the last stage for a request.
_Hint = ForcedTokens | MtpDrafts


class EmissionReceiver(Protocol):
    """Gets the scheduler's output (:class:`molinkd.worker.request_receiver.RequestReceiver`)."""

    def deliver_emissions(self, emissions: Iterable[Emission], now: float) -> None:
        """Send emissions to their endpoints."""

    def close(self) -> None:
        """End the epoch."""


class SchedulerBridge:
    """Feeds micro-batches to stage 0, and the output of the last stage to the scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        receiver: EmissionReceiver,
        vocabulary: int,
        draft_model: DraftRunner | None = None,
    ) -> None:
        """Token ids are below ``vocabulary``; ``draft_model`` runs the scheduler's drafts."""
        self.scheduler = scheduler
        self.receiver = receiver
        self._draft_model = draft_model
        self._vocabulary = vocabulary
        self._reports: dict[tuple[int, int], TopLogprobs | bytes] = {}
        #: Ids outside the vocabulary.
        self.num_invalid_ids = 0

    def feed_batch(self, scoreboard: Scoreboard, now: float) -> bool:
        """Give stage 0 the next micro-batch if it is idle; return whether there was one.

        Decode rows are also fed while only started prefill volumes are queued; they run together
        with the sub-chunks.
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
        """Pass the scheduler's next draft batch to the model; ``on_done`` follows its results."""
        batch = None if self._draft_model is None else self.scheduler.pop_draft_batch()
        if self._draft_model is None or batch is None:
            return

        def on_results(results: DraftResults) -> None:
            self.scheduler.on_draft_results(results)
            on_done()

        self._draft_model.request_drafts(batch, on_results)

    def on_last_stage_message(
        self, body: LastStageMessage, now: float, data: Buffer | None = None
    ) -> None:
        """Handle a message of the last stage; ``data`` is its payload."""
        match body:
            case TopLogprobs():
                if len(self._reports) < MAX_TOPS:
                    self._reports[body.request, body.position] = body
            case PooledRow():
                if len(self._reports) < MAX_POOLED and data and body.payload.dtype == "f32":
                    self._reports[body.request, body.position] = bytes(data)
            case SamplerOutput():
                emissions = self.scheduler.on_sampled(
                    self._drop_invalid_ids(body), self._reports, now
                )
                for each in body.sampled:
                    self._reports.pop((each.request, each.position), None)
                self.receiver.deliver_emissions(emissions, now)
            case Tombstone():
                self.receiver.deliver_emissions(self.scheduler.on_tombstone(body.seq, now), now)
            case Release():
                self.scheduler.on_released(body.seq, now)
                for key in [key for key in self._reports if key[0] == body.request]:
                    del self._reports[key]

    def _drop_invalid_ids(self, output: SamplerOutput) -> SamplerOutput:
        """Drop ids outside the vocabulary, which would make all requests of a later step fail."""
        sampled_ids = tuple(each for each in output.sampled if each.token < self._vocabulary)
        forced = tuple(each for each in output.forced if max(each.tokens) < self._vocabulary)
        mtp_drafts = tuple(
            each for each in output.mtp_drafts if max(each.tokens) < self._vocabulary
        )
        kept = len(sampled_ids) + len(forced) + len(mtp_drafts)
        num_invalid = len(output.sampled) + len(output.forced) + len(output.mtp_drafts) - kept
        if not num_invalid:
            return output
        self.num_invalid_ids += num_invalid
        return msgspec.structs.replace(
            output, sampled=sampled_ids, forced=forced, mtp_drafts=mtp_drafts
        )


def _enqueue_batch(batch: MicroBatch, scoreboard: Scoreboard, now: float) -> None:
    for control in batch.controls:
        scoreboard.on_message(control.body, control.payload, now)
    for volume in batch.volumes:
        scoreboard.on_message(volume.header, volume.tokens, now)


class SampleCollector:
    """Collects a volume's samples at the last stage, sub-chunk by sub-chunk.

    One :class:`SamplerOutput` per volume goes to the scheduler, with the last sub-chunk.
    """

    def __init__(self) -> None:
        self._sampled: dict[int, list[SampledId]] = {}
        #: Ordered set: a failed request fails again in each later sub-chunk.
        self._failed: dict[int, dict[int, None]] = {}
        self._hints: dict[int, list[_Hint]] = {}

    def add_output(
        self, sampled: SamplerOutput, result: StepOutput, *, last: bool
    ) -> list[TopLogprobs | SamplerOutput]:
        """Add the output of a sub-chunk; returns the messages to the scheduler."""
        seq = sampled.seq
        sampled_ids = self._sampled.setdefault(seq, [])
        failed = self._failed.setdefault(seq, {})
        hints = self._hints.setdefault(seq, [])
        sampled_ids += sampled.sampled
        failed.update(dict.fromkeys(sampled.failed))
        hints += (*sampled.forced, *sampled.mtp_drafts)
        if not last:
            return [*result.tops]
        del self._sampled[seq], self._failed[seq], self._hints[seq]
        fitting = _fit_hints(hints, len(sampled_ids), len(failed))
        forced = tuple(each for each in fitting if isinstance(each, ForcedTokens))
        mtp_drafts = tuple(each for each in fitting if isinstance(each, MtpDrafts))
        output = SamplerOutput(seq, tuple(sampled_ids), tuple(failed), forced, mtp_drafts)
        return [*result.tops, output]

    def __len__(self) -> int:
        """Number of volumes with sub-chunks still to come."""
        return len(self._sampled)


def _fit_hints(hints: Sequence[_Hint], sampled: int, failed: int) -> list[_Hint]:
    """Return the first hints that fit the header together with ``sampled`` and ``failed`` entries.

    They must also fit a volume, with one row before each.
    """
    room, rows = _BUDGET_BYTES - _SAMPLED_ID_BYTES * sampled - _FAILED_BYTES * failed, 0
    found = list[_Hint]()
    for each in hints:
        room -= _HINT_BYTES + _ID_BYTES * len(each.tokens)
        if isinstance(each, MtpDrafts):
            room -= 1 + len(each.percents)
        rows += 1 + len(each.tokens)
        if room < 0 or rows > MAX_SLICES:
            break
        found.append(each)
    return found
