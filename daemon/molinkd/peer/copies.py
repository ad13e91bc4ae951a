"""Copies of all models that are served: first of the one that this PC has a stage of."""

import asyncio
from collections.abc import Callable

from molink.facts.model import LayerRange
from molink.swarm.artifacts.sources import ModelSources
from molink.wire.messages.instructions import Route
from molinkd.peer.artifacts.model_replicator import ModelReplicator
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.artifacts.model_store import ModelStore

#: A model's name and root.
_Model = tuple[str, str]


class Replicator:
    """One copy after the other: the next one has its turn once those before it are whole.

    One that can't go on for now holds nobody up.
    """

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
        """``layers()`` are those of this PC's stage: the ones beside them come first.

        ``holds(pipeline)`` says whether that stage is of this pipeline. ``on_change()`` is called
        when a copy is whole, or isn't any more.
        """
        self._store, self._library = store, repository
        self._layers, self._has_pipeline, self._is_enabled = layers, holds, wanted
        self._on_change = on_change
        #: Of all models, by pipeline.
        self._routes: dict[str, Route] = {}
        #: In the order in which models were first heard of.
        self._replicators: dict[_Model, ModelReplicator] = {}
        self._stopping: list[asyncio.Task[None]] = []

    @property
    def percent(self) -> int:
        """How much of this PC's model is here; 100 only if it is whole."""
        return next((one.percent for one in self._by_priority()), 0)

    def update_route(self, route: Route) -> None:
        """A pipeline serves a model, or is to; the sources are the newest ones."""
        if not self._is_enabled or not route.root:
            return
        self._routes[route.pipeline] = route
        self._sync_models()
        self._replicators[_model_of(route)].on_change(
            ModelSources.from_message(route), serving=self._is_serving
        )

    def remove_pipeline(self, pipeline: str) -> None:
        """A pipeline is no more; what is here stays."""
        if self._routes.pop(pipeline, None) is not None:
            self._sync_models()

    async def close(self) -> None:
        """End what is under way; files that are whole are kept."""
        self._stopping += [one.stop_replication() for one in self._replicators.values()]
        self._replicators.clear()
        await asyncio.gather(*self._stopping, return_exceptions=True)

    @property
    def _is_serving(self) -> bool:
        return any(one.is_ready for one in self._routes.values())

    def _sync_models(self) -> None:
        """A copier for each model that has a pipeline; while none has, those that there are."""
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
        """That of this PC's model first."""
        return sorted(self._replicators.values(), key=lambda one: not self._is_own(one.model))

    def _is_own(self, model: _Model) -> bool:
        """Whether this PC has a stage of it, or no other model is served."""
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
