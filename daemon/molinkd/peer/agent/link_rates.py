"""Tells the coordinator how fast the links of this PC's stages are: their senders know."""

import asyncio
from collections.abc import Callable, Mapping

from molink.wire.messages.reports import MAX_RATE, MIN_RATE

#: Between two looks, in seconds.
LOOK_S = 10.0
#: Another rate is told if it differs by this part: estimates jitter.
_NEWS = 0.25


class LinkRates:
    """What was told of the links to other peers, in bytes/s; remembered for the next session."""

    def __init__(
        self, rates: Callable[[], Mapping[str, float]], tell: Callable[[str, float], None]
    ) -> None:
        """``rates()`` are those of the links that there are, by the peer that they lead to."""
        self._rates, self._tell = rates, tell
        self._told: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look now and then."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self) -> None:
        """Tell what is news."""
        for peer, rate in self._rates().items():
            told = self._told.get(peer, 0.0)
            if MIN_RATE <= rate <= MAX_RATE and abs(rate - told) > _NEWS * max(rate, told):
                self._told[peer] = rate
                self._tell(peer, rate)

    def repeat(self) -> None:
        """Tell all again, to who may have missed it."""
        for peer, rate in self._told.items():
            self._tell(peer, rate)

    def forget(self, peer: str) -> None:
        """It is no member any more."""
        self._told.pop(peer, None)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()
