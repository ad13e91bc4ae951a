"""Detects noticeable changes of a figure."""


def differs(one: float, other: float, relative: float, absolute: float = 0.0) -> bool:
    """Return whether two figures differ by more than both thresholds.

    ``relative`` is a share of the larger figure, ``absolute`` has the figures' unit.
    """
    return abs(one - other) > max(relative * max(abs(one), abs(other)), absolute)
