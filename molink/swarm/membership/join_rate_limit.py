"""How fast PCs may join: a flood of invented ones would cost all others, who are told of each."""

from molink.util.token_bucket import RateLimit, TokenBucket

#: A class-room of PCs that are started together has joined within a few seconds.
PER_INVITATION_LIMIT = RateLimit(8, 2.0)
OVERALL_LIMIT = RateLimit(16, 4.0)


class JoinRateLimiter:
    """Bounds how fast members come in, by one invitation and in all."""

    def __init__(
        self,
        now: float,
        per_invitation: RateLimit = PER_INVITATION_LIMIT,
        overall: RateLimit = OVERALL_LIMIT,
    ) -> None:
        self._per_invitation = per_invitation
        self._overall = TokenBucket(overall, now)
        self._buckets: dict[str, TokenBucket] = {}

    def admit_join(self, invitation: str, now: float) -> float:
        """Somebody joins: 0 if that is well, else the seconds after which to try again."""
        own = self._buckets.setdefault(invitation, TokenBucket(self._per_invitation, now))
        wait = max(own.wait_time(now), self._overall.wait_time(now))
        if wait == 0.0:
            own.take_token()
            self._overall.take_token()
        return wait

    def drop_invitation(self, invitation: str) -> None:
        """That invitation has ended."""
        self._buckets.pop(invitation, None)
