"""The pipeline with the fewest requests."""

from collections.abc import Sequence

from molink.routing.base import PipelineLoad, RoutedPrompt, Router


class LeastLoaded(Router):
    """Goes by the number of requests alone, whatever their size."""

    def choose(self, prompt: RoutedPrompt, up: Sequence[PipelineLoad], now: float) -> PipelineLoad:
        """Of several with as few the one that was sent the fewest."""
        return min(up, key=lambda load: (load.requests, load.sent))
