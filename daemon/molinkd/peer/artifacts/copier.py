"""Has the whole of one model that is served on this PC's disk, so that any other PC may be lost.

Which model's turn it is :mod:`molinkd.peer.copies` says. It takes its time
(:mod:`molink.swarm.artifacts.copying`), and gives way to whatever somebody waits for. Once the copy
is whole, others may read it here.
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
from molink.swarm.artifacts.copying import CopyPace, distance
from molink.swarm.artifacts.fetch_plan import GroupPlan
from molink.swarm.artifacts.supply import Supply
from molinkd.peer.artifacts.library import Holding, Library
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.artifacts.store import Store
from molinkd.peer.artifacts.stored import all_plans, holding_of, remove_drafts, stored_manifest

log = logging.getLogger(__name__)

#: How often the files of a copy are looked at: a stat of each, in seconds.
WATCH_S = 60.0


class Copier:
    """The copy of one model."""

    def __init__(
        self,
        store: Store,
        library: Library,
        model: tuple[str, str],
        layers: Callable[[], LayerRange],
        on_change: Callable[[], None],
        may: Callable[[], bool],
    ) -> None:
        """``model`` is its name and its root.

        ``layers()`` are those of this PC's stage: the ones beside them come first. ``may()``:
        whether it is this model's turn. ``on_change()`` is called when the copy is whole, or isn't
        any more, or can't be made.
        """
        self._store = store
        self._library = library
        self.model = model
        self._layers = layers
        self._on_change = on_change
        self._may = may
        self._pace = CopyPace()
        #: Set when something has changed that the pace, or whose turn it is, depends on.
        self._news = asyncio.Event()
        self._supply = Supply()
        #: Of all files, those that are here and the one that comes.
        self._progress = Progress()
        self._whole = False
        self._stuck = False
        self._task = asyncio.get_running_loop().create_task(self._keep(*model))

    @property
    def percent(self) -> int:
        """How much of the model is here; 100 only if it is whole."""
        if self._whole:
            return 100
        done, total = self._progress.done, self._progress.total
        return min(99, 100 * done // total) if total else 0

    @property
    def settled(self) -> bool:
        """Whether it is whole, or can't go on for now: others may have their turn."""
        return self._whole or self._stuck

    def look(self, supply: Supply | None = None, *, serving: bool) -> None:
        """Something has changed: the sources, whether a pipeline serves, or whose turn it is."""
        self._pace.serving = serving
        if supply is not None and self._supply != supply:
            self._supply = supply
            self._pace.again()
        self._news.set()

    def end(self) -> asyncio.Task[None]:
        """End what is under way; files that are whole are kept, but not offered any more."""
        self._task.cancel()
        self._library.withdraw(self.model[1])
        return self._task

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
        self._whole, self._stuck = whole, False
        self._on_change()

    def _failed(self, model: str, reason: str) -> None:
        if not self._stuck:
            self._stuck = True
            self._on_change()
        if self._pace.failed(reason, self._now()):
            log.info("no whole copy of %s here yet; it is tried again: %s", model, reason)

    async def _make(self, model: str, root: str) -> Holding:
        """Look which files are here and fetch the others, the nearest first.

        Raises:
            MolinkError: one can't be had now; says why.
            OSError: a file that was here is gone.
        """
        await self._allowed(fetch=False)
        folder = await self._store.metadata(model, root, self._supply, paced=self._pace.serving)
        manifest = await asyncio.to_thread(stored_manifest, folder, root)
        if manifest is None:
            raise Unavailable(f"{folder} was altered at this moment")
        await asyncio.to_thread(remove_drafts, folder)
        plans = await asyncio.to_thread(all_plans, folder, manifest)
        missing = {plan.file: (layer, plan) for layer, plan in plans}
        progress = self._progress = Progress(total=sum(plan.nbytes for _, plan in plans))
        for _, plan in plans:
            async with self._turn(fetch=False):
                sound = await self._store.sound.has(folder, plan, progress)
            if sound:
                del missing[plan.file]
        with self._store.transfers.under_way(model, progress, copy=True):
            while missing:
                await self._allowed(fetch=True)
                held = self._layers()
                _, plan = min(missing.values(), key=lambda one: distance(one[0], held))
                await self._have(folder, manifest, plan, missing.values())
                del missing[plan.file]
                self._stuck = False
                self._pace.got_on()
        log.info("all of %s is here (%.0f MB)", model, progress.total / 1e6)
        return await asyncio.to_thread(
            holding_of, model, folder, manifest, [plan for _, plan in plans]
        )

    async def _have(
        self,
        folder: Path,
        manifest: Manifest,
        plan: GroupPlan,
        missing: Iterable[tuple[int, GroupPlan]],
    ) -> None:
        """Fetch one of the ``missing`` files, unless a stage needed it meanwhile."""
        progress = self._progress
        here = progress.done
        if await self._store.sound.has(folder, plan, progress):
            return
        rest = sum(one.nbytes for _, one in missing)
        await asyncio.to_thread(self._store.refuse_copy, rest)
        turn = partial(self._turn, fetch=True)
        try:
            await self._store.copy_file(
                self.model[0], folder, manifest, plan, self._supply, turn, progress
            )
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
            turn = not fetch or self._may()
            wait = self._pace.wait(self._now(), fetch=fetch) if turn else None
            if wait == 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._news.wait()


async def _until_changed(copy: Holding) -> None:
    while True:
        await asyncio.sleep(WATCH_S)
        if await asyncio.to_thread(copy.changed):
            return
