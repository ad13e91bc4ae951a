"""When a member that misbehaves has done so too often."""

#: Misdeeds in a row that end it: another version may make a few, an attacker makes thousands.
_LIMIT = 16
#: Seconds without an offence after which the count starts anew.
_FORGIVE_AFTER = 60.0


class MisbehaviourScore:
    """Counts misdeeds by user."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        #: User → (misdeeds in a row, time of the last).
        self._counts: dict[str, tuple[int, float]] = {}

    def add_offence(self, peer_id: str, now: float) -> bool:
        """Note one; ``True`` when it is the last that is tolerated."""
        count, last = self._counts.get(peer_id, (0, now))
        count = 1 if now - last > _FORGIVE_AFTER else count + 1
        if count >= self._limit:
            self._counts.pop(peer_id, None)
            return True
        self._counts[peer_id] = (count, now)
        return False
