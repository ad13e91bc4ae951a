"""When a member that misbehaves has done so too often."""

#: Misdeeds in a row that end it: another version may make a few, an attacker makes thousands.
_LIMIT = 16
#: Seconds without an offence after which the count starts anew.
_FORGIVEN = 60.0


class Offences:
    """Counts misdeeds by user."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        #: User → (misdeeds in a row, time of the last).
        self._counts: dict[str, tuple[int, float]] = {}

    def count(self, user_id: str, now: float) -> bool:
        """Note one; ``True`` when it is the last that is tolerated."""
        count, last = self._counts.get(user_id, (0, now))
        count = 1 if now - last > _FORGIVEN else count + 1
        if count >= self._limit:
            self._counts.pop(user_id, None)
            return True
        self._counts[user_id] = (count, now)
        return False
