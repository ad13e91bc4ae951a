"""Each pipeline in its turn."""

from collections.abc import Sequence

from molink.routing.base import PipelineLoad, PipelineName, RoutedPrompt, Router


class RoundRobinRouter(Router):
    """Who has waited longest is next; who is not there is passed over."""

    def __init__(self) -> None:
        self._last_chosen: dict[PipelineName, int] = {}
        self._num_chosen = 0

    def choose_pipeline(
        self, prompt: RoutedPrompt, pipelines: Sequence[PipelineLoad], now: float
    ) -> PipelineLoad:
        """The one whose turn was longest ago."""
        chosen = min(pipelines, key=lambda load: self._last_chosen.get(load.name, 0))
        self._num_chosen += 1
        self._last_chosen[chosen.name] = self._num_chosen
        return chosen

    def on_pipeline_removed(self, name: PipelineName) -> None:
        """Its turn is forgotten."""
        self._last_chosen.pop(name, None)
