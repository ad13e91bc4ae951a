"""Micro-batches of a scheduler that return at once."""

from molink.scheduler.batch import MicroBatch
from molink.scheduler.request_state import Emission
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.data_plane import Release, SampledId, SamplerOutput


def run_micro_batches(head: Scheduler, batch: MicroBatch | None, now: float) -> list[Emission]:
    """All of ``batch`` is back: each row that samples has brought a token, releases are through."""
    if batch is None:
        return []
    emissions = []
    for volume in batch.volumes:
        choices = tuple(
            SampledId(rows.request, rows.start + rows.count, 7)
            for rows in volume.header.slices
            if rows.sample
        )
        emissions += head.on_sampled(SamplerOutput(volume.header.seq, choices), {}, now)
    for each in batch.controls:
        if isinstance(each.body, Release):
            head.on_released(each.body.seq, now)
    return emissions
