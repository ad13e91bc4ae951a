"""When chunks of prompts may go without decode rows beside them, and how many.

A chunk beside a decode volume costs the least (:mod:`molink.scheduler.chunk_size`), but then a
prompt moves on by ``K`` chunks in a turn of the ring. Where a turn is mostly latency, stages and
links would idle in between: at 400 Mbps and 30 ms one way ``K`` = 3 chunks of 128 rows take 45 ms
of the 110 that a turn does. So stage 0 has chunks for that time, of which no stream notices
anything: each is over at every stage before the next decode volume comes there. There are as many
in flight as keep the slowest stage or link busy.
"""

import math
from dataclasses import dataclass

from molink.facts.ring_times import RingTimes
from molink.wire.messages.data_plane import MAX_MICRO_BATCHES

#: Quotients that differ by less are the same.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class PrefillOnlyWindow:
    """Of chunks that go unpaired: up to how many prefill volumes, and when.

    Up to ``max_volumes`` may be in flight, unpaired or not; 0 if nothing is known of the stages. A
    chunk may go while the oldest volume that streams wait for has been under way for ``window_s``
    seconds at most; never if that is negative.
    """

    max_volumes: int
    window_s: float


#: Seconds for which the slowest link is busy with the prompts' rows in flight, about. A prompt that
#: goes before the rest of another one waits for these. And rows of a chunk that are not too many on
#: any link.
MAX_LINK_BACKLOG_S = 0.75
MIN_LINK_ROWS = 64

#: None goes unpaired.
NO_WINDOW = PrefillOnlyWindow(0, 0.0)


def prefill_only_window(
    times: RingTimes, rows: int, before: int, piggybacked: int, context: float = 0
) -> PrefillOnlyWindow:
    """What holds for chunks of ``rows`` rows after ``before`` tokens of their prompt.

    ``riding`` decode rows are in a micro-batch, after ``context`` tokens on average.

    A chunk that stage 0 begins right before a decode volume comes back stays ahead of it all the
    way: by how much its step is longer than theirs at one stage, the decode volume waits at the
    next. (On a link it passes the chunk; where that changes who comes first, it is late by the rest
    of one step.)
    """
    chunks = [profile.prefill_s(rows, before) for profile in times.profiles]
    sends = [times.send_s(index, rows) for index in range(len(times.links))]
    slowest = max([*chunks, *sends], default=0.0)
    if not slowest:
        return NO_WINDOW
    round_trip = sum(chunks) + times.transfer_s(rows)
    depth = min(math.ceil(round_trip / slowest - _ROUNDING), MAX_MICRO_BATCHES)
    steps = [profile.decode_s(piggybacked, context) for profile in times.profiles]
    ahead = [sum(chunks[: stage + 1]) - sum(steps[:stage]) for stage in range(len(chunks))]
    return PrefillOnlyWindow(depth, times.round_trip_s(piggybacked, context) - max(ahead))


def link_chunk_rows(times: RingTimes, volumes: int) -> int | None:
    """Rows of a chunk of which ``volumes`` are in flight; ``None``: no link bounds them."""
    slowest = max((times.send_s(index, 1) for index in range(len(times.links))), default=0.0)
    return max(MIN_LINK_ROWS, int(MAX_LINK_BACKLOG_S / (volumes * slowest))) if slowest else None
