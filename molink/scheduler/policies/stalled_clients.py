"""Jobs whose clients take nothing hold blocks that nobody uses: all policies treat them alike."""

from collections.abc import Collection, Sequence

from molink.scheduler.request_state import RequestState


def choose_stalled(
    preemptor: RequestState,
    idle_requests: Sequence[RequestState],
    admitted: Collection[RequestState],
    now: float,
) -> RequestState | None:
    """Which of ``at_rest`` gives way to ``needy`` because it waits for its client, if any.

    To a job that decodes, the latest admitted. To one that waits, the one that has waited longest,
    if the client has abandoned it or if nobody who is admitted can go on before his client does.
    """
    stalled = [state for state in idle_requests if state.is_stalled]
    if preemptor.phase != "waiting":
        return max(stalled, key=lambda state: state.id, default=None)
    longest = min(stalled, key=lambda state: state.stalled_at, default=None)
    if longest is None:
        return None
    return longest if longest.is_abandoned(now) or len(stalled) == len(admitted) else None
