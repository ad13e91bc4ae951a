"""Micro-batches of a head that go round at once."""

from molink.scheduler.batch import Batch
from molink.scheduler.head import Head
from molink.scheduler.request import Emission
from molink.wire.messages.data import Choice, Release, Sampled


def go_round(head: Head, batch: Batch | None, now: float) -> list[Emission]:
    """All of ``batch`` is back: each row that samples has brought a token, releases are through."""
    if batch is None:
        return []
    emissions = []
    for volume in batch.volumes:
        choices = tuple(
            Choice(rows.request, rows.start + rows.count, 7)
            for rows in volume.header.rows
            if rows.sample
        )
        emissions += head.sampled(Sampled(volume.header.tick, choices), {}, now)
    for each in batch.control:
        if isinstance(each.body, Release):
            head.released(each.body.tick, now)
    return emissions
