"""Predicts the time to first token (TTFT) of a lone request from its ring's times."""

from collections.abc import Sequence

from molink.facts.ring_times import RingTimes
from molink.scheduler.chunk_size import ChunkSize


def predict_ttft(times: RingTimes, prompt: int, slowdowns: Sequence[float] = ()) -> float:
    """Seconds to the first token of a ``prompt`` (in tokens); 0 if a stage is not measured.

    Uses the scheduler's own chunks: a stage computes a chunk once it has finished the one before,
    and a link sends likewise. Overlap within a chunk is ignored, so slow links are faster than
    this. ``slowdowns``: current step time of each stage relative to its profile.
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
