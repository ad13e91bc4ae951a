"""What people are shown of a request."""

from collections.abc import Mapping
from typing import Literal

from molink.scheduler.request_state import RequestState
from molink.wire.messages.load import MAX_PEER_ID, RequestLoad

#: Longest time until a turn that people are told of.
MAX_SCHEDULED_MS = 3_600_000


def report_request(
    job: RequestState, turns: Mapping[RequestState, float], now: float
) -> RequestLoad:
    """Until its first token a request is in prefill for people, though all its rows are issued."""
    assert job.phase != "gone", "a job that is over is in no roster"
    phase: Literal["waiting", "swapped", "prefill", "decode"]
    phase = "prefill" if job.phase == "decode" and not job.num_generated else job.phase
    if job in turns:
        phase = "swapped"
    taken, prompt = now - job.first_token_at, job.request.prompt_tokens
    return RequestLoad(
        job.request.peer[:MAX_PEER_ID],
        phase,
        prompt,
        0 if job.phase == "waiting" else job.num_computed,
        len(job.tokens) - prompt,
        round(1000 * (job.num_generated - 1) / taken) if job.num_generated > 1 and taken > 0 else 0,
        max(0, int(now - job.arrived_at)),
        min(MAX_SCHEDULED_MS, round(1000 * turns.get(job, 0.0))),
    )
