"""Tells whether a figure has changed noticeably."""


def differs(one: float, other: float, relative: float, absolute: float = 0.0) -> bool:
    """Whether two figures are further apart than both thresholds.

    ``relative`` is a share of the larger figure, ``absolute`` has the figures' unit.
    """
    return abs(one - other) > max(relative * max(abs(one), abs(other)), absolute)
