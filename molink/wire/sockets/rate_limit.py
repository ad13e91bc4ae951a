"""How often one user may do something: so many times at once, and at a steady rate after that."""


class PeerRateLimit:
    """A token bucket for each user."""

    def __init__(self, burst: float, rate: float) -> None:
        """``rate`` is per second."""
        self._burst, self._rate = burst, rate
        #: User → (times left, when that was so in seconds). As many as there are members at most.
        self._tokens: dict[str, tuple[float, float]] = {}

    def try_acquire(self, peer_id: str, now: float) -> bool:
        """Whether the user may do it (once more) now."""
        left, at = self._tokens.get(peer_id, (self._burst, now))
        left = min(self._burst, left + self._rate * (now - at))
        allowed = left >= 1
        self._tokens[peer_id] = (left - allowed, now)
        return allowed

    def drop_peer(self, peer_id: str) -> None:
        """The user is no more."""
        self._tokens.pop(peer_id, None)
