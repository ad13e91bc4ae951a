"""How much of its time a stage computes, and stands idle although it has requests."""

#: How long the share is averaged over, in seconds.
WINDOW_S = 5.0


class BubbleMeter:
    """Seconds in which requests lived at this stage and nothing was computed.

    What pipelines are measured by: the share of time in which a stage waits for the others, for the
    links, or for someone to ask for something more.
    """

    def __init__(self, now: float) -> None:
        #: In all.
        self.seconds = 0.0
        self._since = now
        self._live = self._computing = False
        self._window_start = now
        #: Of this window: bubbles, time in which requests lived, and time in which a step ran.
        self._bubble = self._lived = self._busy = 0.0
        self._share = self._busy_share = 0.0

    def update_state(self, now: float, *, live: bool, computing: bool) -> None:
        """From ``now`` on requests live here, or none do, and a step runs, or none does."""
        passed = now - self._since if now > self._since else 0.0
        if self._computing:
            self._busy += passed
        if self._live:
            self._lived += passed
            if not self._computing:
                self._bubble += passed
                self.seconds += passed
        self._since, self._live, self._computing = now, live, computing
        if now - self._window_start >= WINDOW_S:
            self._share = self._bubble / self._lived if self._lived > 0 else 0.0
            self._busy_share = self._busy / (now - self._window_start)
            self._window_start, self._bubble, self._lived, self._busy = now, 0.0, 0.0, 0.0

    @property
    def bubble_share(self) -> float:
        """Bubbles' share of the time in which requests lived, in the last window; 0 if none did."""
        return self._share

    @property
    def busy_share(self) -> float:
        """The share of the last window in which a step ran."""
        return self._busy_share
