"""How fast PCs may join: a flood of invented ones would cost all others, who are told of each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """So many at once, and so many each second in the long run."""

    burst: int
    per_second: float


#: A class-room of PCs that are started together has joined within a few seconds.
PER_INVITATION = Rate(8, 2.0)
OVERALL = Rate(16, 4.0)


class TokenBucket:
    """Holds up to ``burst`` tokens and gains ``per_second``. Times are in seconds."""

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._tokens = float(rate.burst)
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until there is a token; 0 if there is one."""
        gained = max(0.0, now - self._at) * self._rate.per_second
        self._tokens = min(float(self._rate.burst), self._tokens + gained)
        self._at = max(self._at, now)
        return max(0.0, 1.0 - self._tokens) / self._rate.per_second

    def take(self) -> None:
        """Take one; :meth:`wait` has just said that there is one."""
        self._tokens -= 1.0


class JoinRate:
    """Bounds how fast members come in, by one invitation and in all."""

    def __init__(
        self, now: float, per_invitation: Rate = PER_INVITATION, overall: Rate = OVERALL
    ) -> None:
        self._per_invitation = per_invitation
        self._overall = TokenBucket(overall, now)
        self._buckets: dict[str, TokenBucket] = {}

    def admit(self, invitation: str, now: float) -> float:
        """Somebody joins: 0 if that is well, else the seconds after which to try again."""
        own = self._buckets.setdefault(invitation, TokenBucket(self._per_invitation, now))
        wait = max(own.wait(now), self._overall.wait(now))
        if wait == 0.0:
            own.take()
            self._overall.take()
        return wait

    def forget(self, invitation: str) -> None:
        """That invitation has ended."""
        self._buckets.pop(invitation, None)
