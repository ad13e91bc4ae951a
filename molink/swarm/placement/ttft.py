"""When the first token of a request comes that a ring serves alone, by the ring's times."""

from collections.abc import Sequence

from molink.facts.ring_times import RingTimes
from molink.scheduler.chunk_size import ChunkSize


def predict_ttft(times: RingTimes, prompt: int, slowdowns: Sequence[float] = ()) -> float:
    """Seconds until a prompt of ``prompt`` tokens has its first one; 0 if a stage isn't measured.

    In the head's own chunks: each is computed by a stage that is through with the one before, and
    sent by a link that has sent the one before. Rows are neither packed nor computed while others
    of their chunk come, so on slow links it takes less than this. ``paces``: how many times as long
    as its profile says each stage takes.
    """
    if not all(profile.prefill for profile in times.profiles):
        return 0.0
    stages = len(times.profiles)
    chunks = ChunkSize(0, times.profiles, stages)
    stage_free, link_free = [0.0] * stages, [0.0] * stages
    done, there = 0, 0.0
    while done < prompt:
        rows = min(prompt - done, chunks.choose_rows(0, prompt - done, done))
        there = 0.0
        for index, profile in enumerate(times.profiles):
            step = profile.prefill_s(rows, done) * (slowdowns[index] if slowdowns else 1.0)
            there = stage_free[index] = max(there, stage_free[index]) + step
            if index < stages - 1:
                link_free[index] = max(there, link_free[index]) + times.send_s(index, rows)
                there = link_free[index] + times.link_s(index, 0)
        done += rows
    return there + (times.link_s(stages - 1, 1) if times.links else 0.0)
