"""Token buckets: bursts up to a bound, a steady rate in the long run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Up to ``burst`` operations at once and ``per_second`` on average."""

    burst: int
    per_second: float


class TokenBucket:
    """Holds up to ``limit.burst`` tokens and refills at ``limit.per_second``. Times in seconds."""

    __slots__ = ("_limit", "_refilled_at", "_tokens")

    def __init__(self, limit: RateLimit, now: float) -> None:
        self._limit = limit
        self._tokens = float(limit.burst)
        self._refilled_at = now

    def wait_time(self, now: float) -> float:
        """Return the seconds until a token is available; 0 if one is."""
        gained = max(0.0, now - self._refilled_at) * self._limit.per_second
        self._tokens = min(float(self._limit.burst), self._tokens + gained)
        self._refilled_at = max(self._refilled_at, now)
        return max(0.0, 1.0 - self._tokens) / self._limit.per_second

    def take_token(self) -> None:
        """Take a token that :meth:`wait_time` has just reported as available."""
        self._tokens -= 1.0

    def try_take(self, now: float) -> bool:
        """Take a token if one is available; return whether it was."""
        if self.wait_time(now) > 0.0:
            return False
        self.take_token()
        return True


class KeyedTokenBuckets:
    """One token bucket per key, created on first use. The caller drops keys that are gone."""

    __slots__ = ("_buckets", "_limit")

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._buckets: dict[str, TokenBucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def bucket_for(self, key: str, now: float) -> TokenBucket:
        """Return the bucket of ``key``."""
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(self._limit, now)
        return bucket

    def try_take(self, key: str, now: float) -> bool:
        """Take a token of ``key`` if one is available; return whether it was."""
        return self.bucket_for(key, now).try_take(now)

    def drop_key(self, key: str) -> None:
        """Drop the bucket of ``key``."""
        self._buckets.pop(key, None)
