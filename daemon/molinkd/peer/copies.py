"""Replicates all served models, the one of this PC's stage first."""

import asyncio
from collections.abc import Callable

from molink.facts.model import LayerRange
from molink.swarm.artifacts.sources import ModelSources
from molink.wire.messages.instructions import Route
from molinkd.peer.artifacts.model_replicator import ModelReplicator
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.artifacts.model_store import ModelStore

#: A model's name and manifest root.
_Model = tuple[str, str]


class Replicator:
    """Replicates one model at a time; a stuck one does not block the others."""

    def __init__(
        self,
        store: ModelStore,
        repository: ModelRepository,
        layers: Callable[[], LayerRange],
        on_change: Callable[[], None],
        holds: Callable[[str], bool] = lambda _pipeline: False,
        *,
        wanted: bool,
    ) -> None:
        """``layers()`` returns this PC's layers, whose neighbours are fetched first.

        ``holds(pipeline)`` says whether this PC has a stage of a pipeline. ``on_change()`` is
        called when a replica becomes complete or incomplete.
        """
        self._store, self._library = store, repository
        self._layers, self._has_pipeline, self._is_enabled = layers, holds, wanted
        self._on_change = on_change
        #: Routes of all models, by pipeline.
        self._routes: dict[str, Route] = {}
        #: Replicators in the order of their models' first routes.
        self._replicators: dict[_Model, ModelReplicator] = {}
        self._stopping: list[asyncio.Task[None]] = []

    @property
    def percent(self) -> int:
        """Replicated percentage of this PC's model; 100 only when complete."""
        return next((one.percent for one in self._by_priority()), 0)

    def update_route(self, route: Route) -> None:
        """Replicate the model of a route, from its newest sources."""
        if not self._is_enabled or not route.root:
            return
        self._routes[route.pipeline] = route
        self._sync_models()
        self._replicators[_model_of(route)].on_change(
            ModelSources.from_message(route), serving=self._is_serving
        )

    def remove_pipeline(self, pipeline: str) -> None:
        """Drop a removed pipeline; complete files stay."""
        if self._routes.pop(pipeline, None) is not None:
            self._sync_models()

    async def close(self) -> None:
        """Cancel replication; complete files stay."""
        self._stopping += [one.stop_replication() for one in self._replicators.values()]
        self._replicators.clear()
        await asyncio.gather(*self._stopping, return_exceptions=True)

    @property
    def _is_serving(self) -> bool:
        return any(one.is_ready for one in self._routes.values())

    def _sync_models(self) -> None:
        """Keep one replicator per model with a pipeline; without any pipeline, keep all."""
        models = dict.fromkeys(map(_model_of, self._routes.values()))
        for model in [one for one in self._replicators if models and one not in models]:
            self._stopping = [one for one in self._stopping if not one.done()]
            self._stopping.append(self._replicators.pop(model).stop_replication())
        for model in models:
            if model not in self._replicators:
                self._replicators[model] = self._make_replicator(model)
        self._notify_replicators()

    def _make_replicator(self, model: _Model) -> ModelReplicator:
        def layers() -> LayerRange:
            return self._layers() if self._is_own(model) else (0, 0)

        def is_allowed() -> bool:
            for one in self._by_priority():
                if one.model == model or not one.is_settled:
                    return one.model == model
            return False

        return ModelReplicator(
            self._store, self._library, model, layers, self._on_replica_change, is_allowed
        )

    def _by_priority(self) -> list[ModelReplicator]:
        """Replicators, this PC's model first."""
        return sorted(self._replicators.values(), key=lambda one: not self._is_own(one.model))

    def _is_own(self, model: _Model) -> bool:
        """Whether this PC has a stage of the model, or it is the only one."""
        if len(self._replicators) == 1:
            return True
        return any(
            self._has_pipeline(one.pipeline)
            for one in self._routes.values()
            if _model_of(one) == model
        )

    def _on_replica_change(self) -> None:
        self._notify_replicators()
        self._on_change()

    def _notify_replicators(self) -> None:
        for one in self._replicators.values():
            one.on_change(serving=self._is_serving)


def _model_of(route: Route) -> _Model:
    return route.model, route.root
