"""Tells the coordinator how fast the links of this PC's stages are: their senders know."""

import asyncio
from collections.abc import Callable, Mapping

from molink.wire.messages.peer_reports import MAX_RATE, MIN_RATE

#: Between two looks, in seconds.
POLL_INTERVAL_S = 10.0
#: Another rate is told if it differs by this part: estimates jitter.
_CHANGE_FRACTION = 0.25


class LinkRateReporter:
    """What was told of the links to other peers, in bytes/s; remembered for the next session."""

    def __init__(
        self, rates: Callable[[], Mapping[str, float]], tell: Callable[[str, float], None]
    ) -> None:
        """``rates()`` are those of the links that there are, by the peer that they lead to."""
        self._read_rates, self._report = rates, tell
        self._reported: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look now and then."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def report_changes(self) -> None:
        """Tell what is news."""
        for peer, rate in self._read_rates().items():
            told = self._reported.get(peer, 0.0)
            if MIN_RATE <= rate <= MAX_RATE and abs(rate - told) > _CHANGE_FRACTION * max(
                rate, told
            ):
                self._reported[peer] = rate
                self._report(peer, rate)

    def report_all(self) -> None:
        """Tell all again, to who may have missed it."""
        for peer, rate in self._reported.items():
            self._report(peer, rate)

    def drop_peer(self, peer: str) -> None:
        """It is no member any more."""
        self._reported.pop(peer, None)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            self.report_changes()
