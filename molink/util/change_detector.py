"""Suppresses reports of figures that have hardly changed."""


def differs(one: float, other: float, relative: float, absolute: float = 0.0) -> bool:
    """Whether two figures are further apart than both thresholds.

    ``relative`` is a share of the larger figure, ``absolute`` has the figures' unit.
    """
    return abs(one - other) > max(relative * max(abs(one), abs(other)), absolute)


class ChangeDetector:
    """Compares a figure with the value that was reported last."""

    __slots__ = ("absolute", "relative", "reported")

    def __init__(
        self, relative: float, absolute: float = 0.0, reported: float | None = None
    ) -> None:
        """A change counts beyond both thresholds, as in :func:`differs`."""
        self.relative = relative
        self.absolute = absolute
        #: The last reported value; ``None`` before the first report.
        self.reported = reported

    def has_changed(self, value: float) -> bool:
        """Whether the number ``value`` is worth a report. The first one always is."""
        if self.reported is None:
            return True
        return differs(value, self.reported, self.relative, self.absolute)

    def update(self, value: float) -> bool:
        """Record the number ``value`` as reported if it is worth a report; returns whether it
        is."""
        changed = self.has_changed(value)
        if changed:
            self.reported = value
        return changed
