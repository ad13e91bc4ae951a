"""Jobs whose clients take nothing hold blocks that nobody uses: all policies treat them alike."""

from collections.abc import Collection, Sequence

from molink.scheduler.job import Job


def waits_for_client(
    needy: Job, at_rest: Sequence[Job], admitted: Collection[Job], now: float
) -> Job | None:
    """Which of ``at_rest`` gives way to ``needy`` because it waits for its client, if any.

    To a job that decodes, the latest admitted. To one that waits, the one that has waited longest,
    if the client has abandoned it or if nobody who is admitted can go on before his client does.
    """
    stalled = [job for job in at_rest if job.stalled]
    if needy.state != "waiting":
        return max(stalled, key=lambda job: job.id, default=None)
    longest = min(stalled, key=lambda job: job.stalled_at, default=None)
    if longest is None:
        return None
    return longest if longest.abandoned(now) or len(stalled) == len(admitted) else None
