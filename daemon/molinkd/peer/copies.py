"""Copies of all models that are served: first of the one that this PC has a stage of."""

import asyncio
from collections.abc import Callable

from molink.facts.model import LayerRange
from molink.swarm.artifacts.supply import Supply
from molink.wire.messages.instructions import Route
from molinkd.peer.artifacts.copier import Copier
from molinkd.peer.artifacts.library import Library
from molinkd.peer.artifacts.store import Store

#: A model's name and root.
_Model = tuple[str, str]


class Copies:
    """One copy after the other: the next one has its turn once those before it are whole.

    One that can't go on for now holds nobody up.
    """

    def __init__(
        self,
        store: Store,
        library: Library,
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
        self._store, self._library = store, library
        self._layers, self._holds, self._wanted = layers, holds, wanted
        self._on_change = on_change
        #: Of all models, by pipeline.
        self._routes: dict[str, Route] = {}
        #: In the order in which models were first heard of.
        self._copiers: dict[_Model, Copier] = {}
        self._ended: list[asyncio.Task[None]] = []

    @property
    def percent(self) -> int:
        """How much of this PC's model is here; 100 only if it is whole."""
        return next((one.percent for one in self._in_turn()), 0)

    def serve(self, route: Route) -> None:
        """A pipeline serves a model, or is to; the sources are the newest ones."""
        if not self._wanted or not route.root:
            return
        self._routes[route.pipeline] = route
        self._follow()
        self._copiers[_model(route)].look(Supply.of(route), serving=self._serving)

    def gone(self, pipeline: str) -> None:
        """A pipeline is no more; what is here stays."""
        if self._routes.pop(pipeline, None) is not None:
            self._follow()

    async def close(self) -> None:
        """End what is under way; files that are whole are kept."""
        self._ended += [one.end() for one in self._copiers.values()]
        self._copiers.clear()
        await asyncio.gather(*self._ended, return_exceptions=True)

    @property
    def _serving(self) -> bool:
        return any(one.ready for one in self._routes.values())

    def _follow(self) -> None:
        """A copier for each model that has a pipeline; while none has, those that there are."""
        models = dict.fromkeys(map(_model, self._routes.values()))
        for model in [one for one in self._copiers if models and one not in models]:
            self._ended = [one for one in self._ended if not one.done()]
            self._ended.append(self._copiers.pop(model).end())
        for model in models:
            if model not in self._copiers:
                self._copiers[model] = self._copier(model)
        self._look()

    def _copier(self, model: _Model) -> Copier:
        def layers() -> LayerRange:
            return self._layers() if self._is_own(model) else (0, 0)

        def may() -> bool:
            for one in self._in_turn():
                if one.model == model or not one.settled:
                    return one.model == model
            return False

        return Copier(self._store, self._library, model, layers, self._changed, may)

    def _in_turn(self) -> list[Copier]:
        """That of this PC's model first."""
        return sorted(self._copiers.values(), key=lambda one: not self._is_own(one.model))

    def _is_own(self, model: _Model) -> bool:
        """Whether this PC has a stage of it, or no other model is served."""
        if len(self._copiers) == 1:
            return True
        return any(
            self._holds(one.pipeline) for one in self._routes.values() if _model(one) == model
        )

    def _changed(self) -> None:
        self._look()
        self._on_change()

    def _look(self) -> None:
        for one in self._copiers.values():
            one.look(serving=self._serving)


def _model(route: Route) -> _Model:
    return route.model, route.root
