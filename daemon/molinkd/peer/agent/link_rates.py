"""Reports the measured rates of this PC's links to the coordinator."""

import asyncio
from collections.abc import Callable, Mapping

from molink.util.change_detector import differs
from molink.wire.messages.peer_reports import MAX_RATE, MIN_RATE
from molinkd.tasks import cancel_tasks

#: Polling interval, in seconds.
POLL_INTERVAL_S = 10.0
#: Relative change that is reported; estimates jitter by less.
_CHANGE_FRACTION = 0.25


class LinkRateReporter:
    """Rates in bytes/s by peer, as last reported; resent in a new session."""

    def __init__(
        self, rates: Callable[[], Mapping[str, float]], report: Callable[[str, float], None]
    ) -> None:
        """``rates()`` returns the current rate of each link, by the peer at its other end."""
        self._read_rates, self._report = rates, report
        self._reported: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start polling."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop polling."""
        await cancel_tasks(self._task)

    def report_changes(self) -> None:
        """Report rates that changed noticeably."""
        for peer, rate in self._read_rates().items():
            reported = self._reported.get(peer, 0.0)
            if MIN_RATE <= rate <= MAX_RATE and differs(rate, reported, _CHANGE_FRACTION):
                self._reported[peer] = rate
                self._report(peer, rate)

    def report_all(self) -> None:
        """Resend all rates, after a new session."""
        for peer, rate in self._reported.items():
            self._report(peer, rate)

    def drop_peer(self, peer: str) -> None:
        """Drop the rate of a removed peer."""
        self._reported.pop(peer, None)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            self.report_changes()
