"""Replicates all files of a served model to this PC, so that losing any other PC loses no layers.

Replication is limited by :mod:`molink.swarm.artifacts.replication` and yields to transfers that a
request or stage waits for. A complete replica is offered to other peers.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from molink.checkpoint.manifest import Manifest
from molink.errors import MolinkError, Unavailable
from molink.facts.model import LayerRange
from molink.swarm.artifacts.fetch_plan import GroupPlan
from molink.swarm.artifacts.replication import ReplicationSchedule, layer_distance
from molink.swarm.artifacts.sources import ModelSources
from molink.wire.messages.instructions import Route
from molinkd.peer.artifacts.model_repository import ModelFiles, ModelRepository
from molinkd.peer.artifacts.model_store import ModelStore
from molinkd.peer.artifacts.stored_model import (
    all_plans,
    read_stored_manifest,
    remove_replica_partials,
    stored_files,
)
from molinkd.peer.artifacts.transfers import Progress

log = logging.getLogger(__name__)


#: Interval of checking a complete replica's files for changes, in seconds.
CHECK_INTERVAL_S = 60.0


class ModelReplicator:
    """Replicates one model."""

    def __init__(
        self,
        store: ModelStore,
        repository: ModelRepository,
        model: tuple[str, str],
        layers: Callable[[], LayerRange],
        on_change: Callable[[], None],
        is_allowed: Callable[[], bool],
    ) -> None:
        """``model`` is the model's name and manifest root.

        ``layers()`` returns this PC's layers, whose neighbours are fetched first. ``is_allowed()``
        says whether this model may transfer now. ``on_change()`` is called when the replica becomes
        complete, incomplete or stuck.
        """
        self._store = store
        self._library = repository
        self.model = model
        self._layers = layers
        self._notify_change = on_change
        self._is_allowed = is_allowed
        self._rate_limit = ReplicationSchedule()
        #: Set when a condition of waiting has changed: rate, priority or sources.
        self._changed = asyncio.Event()
        self._supply = ModelSources()
        #: Bytes of complete files and of the current transfer.
        self._progress = Progress()
        self._is_complete = False
        self._is_stuck = False
        self._task = asyncio.get_running_loop().create_task(self._maintain_replica(*model))

    @property
    def percent(self) -> int:
        """Replicated percentage; 100 only when complete."""
        if self._is_complete:
            return 100
        done, total = self._progress.done, self._progress.total
        return min(99, 100 * done // total) if total else 0

    @property
    def is_settled(self) -> bool:
        """Whether the replica is complete or stuck, so that the next model may transfer."""
        return self._is_complete or self._is_stuck

    def on_change(self, supply: ModelSources | None = None, *, serving: bool) -> None:
        """Take note of new sources, of the serving state, or of a changed priority."""
        self._rate_limit.is_serving = serving
        if supply is not None and self._supply != supply:
            self._supply = supply
            self._rate_limit.retry_now()
        self._changed.set()

    def stop_replication(self) -> asyncio.Task[None]:
        """Cancel replication; complete files stay but are no longer offered."""
        self._task.cancel()
        self._library.remove_replica(self.model[1])
        return self._task

    async def _maintain_replica(self, model: str, root: str) -> None:
        """Complete the replica, and complete it again whenever its files change."""
        while True:
            try:
                if self._store.is_in_repository(root):
                    self._set_complete(whole=True)
                    return
                copy = await self._make_replica(model, root)
            except (MolinkError, OSError) as error:
                self._on_failure(model, str(error))
            except Exception as error:
                log.exception("replication of %s failed", model)
                self._on_failure(model, f"internal error: {error!r}")
            else:
                self._library.add_replica(model, copy)
                self._set_complete(whole=True)
                await _until_changed(copy)
                log.warning("the replica of %s in %s has changed", model, copy.folder)
                self._library.remove_replica(root)
                self._set_complete(whole=False)

    def _set_complete(self, *, whole: bool) -> None:
        self._is_complete, self._is_stuck = whole, False
        self._notify_change()

    def _on_failure(self, model: str, reason: str) -> None:
        if not self._is_stuck:
            self._is_stuck = True
            self._notify_change()
        if self._rate_limit.record_failure(reason, self._now()):
            log.info("replication of %s is incomplete and will be retried: %s", model, reason)

    async def _make_replica(self, model: str, root: str) -> ModelFiles:
        """Verify the existing files and fetch the missing ones, nearest layers first.

        Raises:
            MolinkError: A file is unavailable now.
            OSError: A verified file disappeared.
        """
        await self._wait_for_turn(fetch=False)
        folder = await self._store.fetch_metadata(
            model, root, self._supply, rate_limited=self._rate_limit.is_serving
        )
        manifest = await asyncio.to_thread(read_stored_manifest, folder, root)
        if manifest is None:
            raise Unavailable(f"{folder} has just changed")
        await asyncio.to_thread(remove_replica_partials, folder)
        plans = await asyncio.to_thread(all_plans, folder, manifest)
        await self._store.link_known_files(folder, manifest, [plan for _, plan in plans])
        missing = {plan.file: (layer, plan) for layer, plan in plans}
        progress = self._progress = Progress(total=sum(plan.nbytes for _, plan in plans))
        for _, plan in plans:
            async with self._limit_rate(fetch=False):
                sound = await self._store.verified.is_verified(folder, plan, progress)
            if sound:
                del missing[plan.file]
        with self._store.transfers.track_transfer(model, progress, copy=True):
            while missing:
                await self._wait_for_turn(fetch=True)
                held = self._layers()
                _, plan = min(missing.values(), key=lambda one: layer_distance(one[0], held))
                await self._fetch_file(folder, manifest, plan, missing.values())
                del missing[plan.file]
                self._is_stuck = False
                self._rate_limit.reset_backoff()
        log.info("replicated all of %s (%.0f MB)", model, progress.total / 1e6)
        return await asyncio.to_thread(
            stored_files, model, folder, manifest, [plan for _, plan in plans]
        )

    async def _fetch_file(
        self,
        folder: Path,
        manifest: Manifest,
        plan: GroupPlan,
        missing: Iterable[tuple[int, GroupPlan]],
    ) -> None:
        """Fetch one of the ``missing`` files, unless a stage has fetched it meanwhile."""
        progress = self._progress
        here = progress.done
        if await self._store.verified.is_verified(folder, plan, progress):
            return
        rest = sum(one.nbytes for _, one in missing)
        await asyncio.to_thread(self._store.check_replica_room, rest)
        turn = partial(self._limit_rate, fetch=True)
        try:
            await self._store.replicate_file(
                self.model[0], folder, manifest, plan, self._supply, turn, progress
            )
        except BaseException:
            progress.done = here
            raise
        progress.done = here + plan.nbytes

    # --- rate limiting ---

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @asynccontextmanager
    async def _limit_rate(self, *, fetch: bool) -> AsyncIterator[None]:
        """Wait for permission, then account for the time that one chunk or check takes."""
        await self._wait_for_turn(fetch=fetch)
        started = self._now()
        yield
        self._rate_limit.record_duration(self._now() - started, self._now(), fetch=fetch)

    async def _wait_for_turn(self, *, fetch: bool) -> None:
        while True:
            await self._store.idle.wait()
            self._changed.clear()
            turn = not fetch or self._is_allowed()
            wait = self._rate_limit.wait_time(self._now(), fetch=fetch) if turn else None
            if wait == 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()


async def _until_changed(copy: ModelFiles) -> None:
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        if await asyncio.to_thread(copy.find_changed):
            return


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
