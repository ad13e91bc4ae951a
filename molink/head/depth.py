"""How many prefill volumes are in flight where chunks go unpaired.

A chunk beside a decode volume costs the least (:mod:`molink.head.chunk`), but then a prompt moves
on by ``K`` chunks in a turn of the ring. Where a turn is mostly latency, stages and links would
idle in between: at 400 Mbps and 30 ms one way ``K`` = 3 chunks of 128 rows take 45 ms of the 110
that a turn does. So where those who decode hardly notice, chunks go whenever stage 0 is idle, until
as many are in flight as keep the slowest stage or link busy.
"""

import math

from molink.facts.ringtimes import RingTimes
from molink.head.chunk import STRETCH
from molink.wire.messages.data import MAX_MICRO_BATCHES

#: Quotients that differ by less are the same.
_ROUNDING = 1e-6


def prefill_depth(
    times: RingTimes, rows: int, before: int, riding: int, count: int, context: float = 0
) -> int:
    """Up to how many prefill volumes of ``rows`` rows may be in flight, unpaired or not.

    The first row comes after ``before`` tokens of its prompt. ``riding`` decode rows are in each of
    ``count`` micro-batches, 0 if nobody decodes, after ``context`` tokens on average. 0 = none may
    go unpaired: a decode volume that waits for a chunk at each stage, or stages that compute one by
    itself for every decode volume, would take more than :data:`~molink.head.chunk.STRETCH` times
    the turn without chunks. (That a decode volume then runs with the next chunk is left out.)
    """
    chunks = [profile.prefill_s(rows, before) for profile in times.profiles]
    sends = [times.send_s(index, rows) for index in range(len(times.links))]
    slowest = max([*chunks, *sends], default=0.0)
    if not slowest or (riding and not _hardly_noticed(times, chunks, riding, count, context)):
        return 0
    turn = sum(chunks) + times.transfer_s(rows)
    return min(math.ceil(turn / slowest - _ROUNDING), MAX_MICRO_BATCHES)


def _hardly_noticed(
    times: RingTimes, chunks: list[float], riding: int, count: int, context: float
) -> bool:
    steps = [profile.decode_s(riding, context) for profile in times.profiles]
    turn = times.turn_s(riding, context)
    beside = [step + chunk for step, chunk in zip(steps, chunks, strict=True)]
    without = max(turn, count * max(steps))
    return max(turn + sum(chunks), count * max(beside)) <= STRETCH * without
