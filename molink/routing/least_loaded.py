"""The pipeline with the fewest requests."""

from collections.abc import Sequence

from molink.routing.base import PipelineLoad, RoutedPrompt, Router


class LeastLoadedRouter(Router):
    """Goes by the number of requests alone, whatever their size."""

    def choose_pipeline(
        self, prompt: RoutedPrompt, pipelines: Sequence[PipelineLoad], now: float
    ) -> PipelineLoad:
        """Of several with as few the one that was sent the fewest."""
        return min(pipelines, key=lambda load: (load.num_requests, load.total_sent))
