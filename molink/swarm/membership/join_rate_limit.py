"""How fast PCs may join: a flood of invented ones would cost all others, who are told of each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimit:
    """So many at once, and so many each second in the long run."""

    burst: int
    per_second: float


#: A class-room of PCs that are started together has joined within a few seconds.
PER_INVITATION_LIMIT = RateLimit(8, 2.0)
OVERALL_LIMIT = RateLimit(16, 4.0)


class TokenBucket:
    """Holds up to ``burst`` tokens and gains ``per_second``. Times are in seconds."""

    def __init__(self, rate: RateLimit, now: float) -> None:
        self._limit = rate
        self._tokens = float(rate.burst)
        self._updated_at = now

    def wait_time(self, now: float) -> float:
        """Seconds until there is a token; 0 if there is one."""
        gained = max(0.0, now - self._updated_at) * self._limit.per_second
        self._tokens = min(float(self._limit.burst), self._tokens + gained)
        self._updated_at = max(self._updated_at, now)
        return max(0.0, 1.0 - self._tokens) / self._limit.per_second

    def take_token(self) -> None:
        """Take one; :meth:`wait_time` has just said that there is one."""
        self._tokens -= 1.0


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
