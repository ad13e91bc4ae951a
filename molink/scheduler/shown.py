"""What people are shown of a request."""

from collections.abc import Mapping
from typing import Literal

from molink.scheduler.job import Job
from molink.wire.messages.load import MAX_OWNER, RequestNow

#: Longest time until a turn that people are told of.
MAX_TURN_MS = 3_600_000


def shown(job: Job, turns: Mapping[Job, float], now: float) -> RequestNow:
    """Until its first token a request is in prefill for people, though all its rows are issued."""
    assert job.state != "gone", "a job that is over is in no roster"
    state: Literal["waiting", "swapped", "prefill", "decode"]
    state = "prefill" if job.state == "decode" and not job.generated else job.state
    if job in turns:
        state = "swapped"
    taken, prompt = now - job.first_at, job.request.prompt_tokens
    return RequestNow(
        job.request.owner[:MAX_OWNER],
        state,
        prompt,
        0 if job.state == "waiting" else job.computed,
        len(job.tokens) - prompt,
        round(1000 * (job.generated - 1) / taken) if job.generated > 1 and taken > 0 else 0,
        max(0, int(now - job.since)),
        min(MAX_TURN_MS, round(1000 * turns.get(job, 0.0))),
    )
