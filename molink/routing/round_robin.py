"""Each pipeline in its turn."""

from collections.abc import Sequence

from molink.routing.base import Name, PipelineLoad, RoutedPrompt, Router


class RoundRobin(Router):
    """Who has waited longest is next; who is not there is passed over."""

    def __init__(self) -> None:
        self._turns: dict[Name, int] = {}
        self._turn = 0

    def choose(self, prompt: RoutedPrompt, up: Sequence[PipelineLoad], now: float) -> PipelineLoad:
        """The one whose turn was longest ago."""
        chosen = min(up, key=lambda load: self._turns.get(load.name, 0))
        self._turn += 1
        self._turns[chosen.name] = self._turn
        return chosen

    def gone(self, name: Name) -> None:
        """Its turn is forgotten."""
        self._turns.pop(name, None)
