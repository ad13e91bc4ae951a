"""Has the whole of a model that is served on this PC's disk, so that any other PC may be lost.

It takes its time (:mod:`molink.swarm.copying`), and gives way to whatever somebody waits for. Once
the copy is whole, others may read it here.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from molink.errors import MolinkError, Unavailable
from molink.facts.model import LayerRange
from molink.swarm.copying import CopyPace, distance, ranges
from molink.swarm.fetch_plan import GroupPlan
from molink.wire.messages.instructions import Route
from molinkd.peer.library import Holding, Library
from molinkd.peer.progress import Progress
from molinkd.peer.store import Store
from molinkd.peer.stored import all_plans, holding_of, remove_drafts, stored_manifest

log = logging.getLogger(__name__)

#: How often the files of a copy are looked at: a stat of each, in seconds.
WATCH_S = 60.0


class Copier:
    """The copy of one model: of several that are served, the one that this PC has a stage of."""

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
        self._store = store
        self._library = library
        self._layers = layers
        self._on_change = on_change
        self._holds = holds
        self._wanted = wanted
        self._pace = CopyPace()
        #: Set when something has changed that the pace depends on.
        self._news = asyncio.Event()
        self._model: tuple[str, str] | None = None
        #: Of all models.
        self._routes: dict[str, Route] = {}
        self._sources: Sequence[str] = ()
        self._task: asyncio.Task[None] | None = None
        #: Of all files, those that are here and the one that comes.
        self._progress = Progress()
        self._whole = False
        #: All layers, and the files that are not here, each with the first layer that needs it.
        self._all: frozenset[int] = frozenset()
        self._missing: dict[str, tuple[int, GroupPlan]] = {}

    @property
    def percent(self) -> int:
        """How much of the model is here; 100 only if it is whole."""
        if self._whole:
            return 100
        done, total = self._progress.done, self._progress.total
        return min(99, 100 * done // total) if total else 0

    @property
    def held(self) -> tuple[LayerRange, ...]:
        """The layers all of whose files are here."""
        return ranges(self._all - {layer for layer, _ in self._missing.values()})

    def serve(self, route: Route) -> None:
        """A pipeline serves a model, or is to; the sources are the newest ones."""
        if not self._wanted or not route.root:
            return
        self._routes[route.pipeline] = route
        self._choose(route)

    def gone(self, pipeline: str) -> None:
        """A pipeline is no more; what is here stays."""
        gone = self._routes.pop(pipeline, None)
        if gone is None:
            return
        left = [*self._routes.values()]
        same = [one for one in left if _model(one) == self._model]
        if _model(gone) == self._model and left and not same:
            self._choose(left[0])
        self._pace.serving = any(one.ready for one in left)

    def _choose(self, route: Route) -> None:
        """Copy this route's model, unless there is a reason to go on with another one."""
        self._pace.serving = any(one.ready for one in self._routes.values())
        self._news.set()
        model = _model(route)
        others = [one for one in self._routes.values() if _model(one) == self._model]
        if self._model != model and others and not self._holds(route.pipeline):
            return
        if self._sources != route.sources:
            self._pace.again()
        self._sources = route.sources
        if self._model != model:
            self._end()
            self._model = model
            self._task = asyncio.get_running_loop().create_task(self._keep(*model))

    async def close(self) -> None:
        """End what is under way; files that are whole are kept."""
        task = self._task
        self._end()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._model is not None:
            self._library.withdraw(self._model[1])
        self._model = self._task = None
        self._progress, self._whole = Progress(), False
        self._all, self._missing = frozenset(), {}

    async def _keep(self, model: str, root: str) -> None:
        """Have a whole copy for as long as the model is served."""
        while True:
            try:
                if self._store.brought(root):
                    self._change(whole=True)
                    return
                copy = await self._make(model, root)
            except (MolinkError, OSError) as error:
                self._failed(model, str(error))
            except Exception as error:
                log.exception("the copy of %s", model)
                self._failed(model, f"internal error: {error!r}")
            else:
                self._library.offer(model, copy)
                self._change(whole=True)
                await _until_changed(copy)
                log.warning("the copy of %s in %s has changed", model, copy.folder)
                self._library.withdraw(root)
                self._change(whole=False)

    def _change(self, *, whole: bool) -> None:
        self._whole = whole
        self._on_change()

    def _failed(self, model: str, reason: str) -> None:
        if self._pace.failed(reason, self._now()):
            log.info("no whole copy of %s here yet; it is tried again: %s", model, reason)

    async def _make(self, model: str, root: str) -> Holding:
        """Look which files are here and fetch the others, the nearest first.

        Raises:
            MolinkError: one can't be had now; says why.
            OSError: a file that was here is gone.
        """
        await self._allowed(fetch=False)
        folder = await self._store.metadata(model, root, self._sources, paced=self._pace.serving)
        manifest = await asyncio.to_thread(stored_manifest, folder, root)
        if manifest is None:
            raise Unavailable(f"{folder} was altered at this moment")
        await asyncio.to_thread(remove_drafts, folder)
        plans = await asyncio.to_thread(all_plans, folder, manifest)
        missing = self._missing = {plan.file: (layer, plan) for layer, plan in plans}
        self._all = frozenset(layer for layer, _ in plans)
        progress = self._progress = Progress(total=sum(plan.nbytes for _, plan in plans))
        for _, plan in plans:
            async with self._turn(fetch=False):
                sound = await self._store.is_sound(folder, plan, progress)
            if sound:
                del missing[plan.file]
        with self._store.transfers.under_way(model, progress, copy=True):
            while missing:
                await self._allowed(fetch=True)
                held = self._layers()
                _, plan = min(missing.values(), key=lambda one: distance(one[0], held))
                await self._have(folder, root, plan, missing.values())
                del missing[plan.file]
                self._pace.got_on()
        log.info("all of %s is here (%.0f MB)", model, progress.total / 1e6)
        return await asyncio.to_thread(
            holding_of, model, folder, manifest, [plan for _, plan in plans]
        )

    async def _have(
        self, folder: Path, root: str, plan: GroupPlan, missing: Iterable[tuple[int, GroupPlan]]
    ) -> None:
        """Fetch one of the ``missing`` files, unless a stage needed it meanwhile."""
        progress = self._progress
        here = progress.done
        if await self._store.is_sound(folder, plan, progress):
            return
        rest = sum(one.nbytes for _, one in missing)
        await asyncio.to_thread(self._store.refuse_copy, rest)
        turn = partial(self._turn, fetch=True)
        try:
            await self._store.copy_group(folder, root, plan, self._sources, turn, progress)
        except BaseException:
            progress.done = here
            raise
        progress.done = here + plan.nbytes

    # --- giving way ---

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @asynccontextmanager
    async def _turn(self, *, fetch: bool) -> AsyncIterator[None]:
        """One chunk or one look: when it may begin, and what it took."""
        await self._allowed(fetch=fetch)
        begun = self._now()
        yield
        self._pace.took(self._now() - begun, self._now(), fetch=fetch)

    async def _allowed(self, *, fetch: bool) -> None:
        while True:
            await self._store.idle.wait()
            self._news.clear()
            wait = self._pace.wait(self._now(), fetch=fetch)
            if wait == 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._news.wait()


def _model(route: Route) -> tuple[str, str]:
    return route.model, route.root


async def _until_changed(copy: Holding) -> None:
    while True:
        await asyncio.sleep(WATCH_S)
        if await asyncio.to_thread(copy.changed):
            return
