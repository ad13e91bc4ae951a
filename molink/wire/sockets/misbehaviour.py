"""Misbehaviour scores of peers."""

#: Consecutive violations that block a peer. A peer of another version may cause a few, an attacker
#: thousands.
_LIMIT = 16
#: Seconds without a violation that reset the score.
_FORGIVE_AFTER = 60.0


class MisbehaviourScore:
    """Counts violations by peer."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        #: Maps a peer to its consecutive violations and the time of the last one.
        self._counts: dict[str, tuple[int, float]] = {}

    def add_violation(self, peer_id: str, now: float) -> bool:
        """Count a violation; ``True`` if the peer has reached the limit."""
        count, last = self._counts.get(peer_id, (0, now))
        count = 1 if now - last > _FORGIVE_AFTER else count + 1
        if count >= self._limit:
            self._counts.pop(peer_id, None)
            return True
        self._counts[peer_id] = (count, now)
        return False
