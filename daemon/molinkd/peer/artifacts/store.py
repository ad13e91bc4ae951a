"""Model files that come from other peers: only what is needed, resumable, whole or not at all.

A source is any member that says it holds the model, or some files of it. Its owner said which bytes
that model consists of (:mod:`molink.checkpoint.manifest`): each chunk, or each shard, is checked
when it comes, and each file here again before its first use in a run of the daemon.
"""

import asyncio
import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest, Part, Shard, manifest_bytes
from molink.checkpoint.room import OTHER_HOME, RESERVE_BYTES, check_room
from molink.errors import BrokenModel, FilesMissing, ModelError, Unavailable
from molink.files import patiently
from molink.swarm.artifacts.copying import has_room
from molink.swarm.artifacts.fetch_plan import GroupPlan, cut
from molink.swarm.artifacts.supply import Supply
from molink.swarm.artifacts.transfer import MIN_RATE
from molink.wire.sockets.secrets import private_folder
from molinkd.peer.artifacts.library import Library, folder_name
from molinkd.peer.artifacts.pieces import Turn, fetch_pieces, into
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.artifacts.shard_draft import draft_bytes
from molinkd.peer.artifacts.shard_fetch import ShardFetch
from molinkd.peer.artifacts.sound_files import SoundFiles
from molinkd.peer.artifacts.stored import (
    COPY,
    MANIFEST_FILE,
    altered_parts,
    group_plans,
    metadata_parts,
    new_file,
    nobody_has,
    stored_manifest,
)
from molinkd.peer.artifacts.suppliers import Connect, OnLiar, Reputation, Suppliers
from molinkd.peer.artifacts.transfers import Transfers

log = logging.getLogger(__name__)

#: A paced transfer that somebody waits for asks for so many bytes per second at least: more than
#: what the coordinator takes for too slow.
PACED_FLOOR = 1.25 * MIN_RATE
#: Folders of other versions of a model that are kept, beside those that are in use.
MAX_OTHERS = 2


class Store:
    """Gets files of models from peers and keeps them under ``root``."""

    def __init__(
        self,
        root: Path,
        me: str,
        library: Library,
        connect: Connect,
        bundled: Library,
        on_liar: OnLiar,
        transfers: Transfers | None = None,
        near: Callable[[str], bool] = lambda _: True,
        *,
        hub: bool = False,
    ) -> None:
        """``bundled`` holds models that this PC has but doesn't serve: copies of them are used.

        ``near`` says whether a peer is close by; ``hub``, whether the Hugging Face hub is asked.

        ``on_liar`` is told of each source that sent altered bytes; ``transfers`` of what is under
        way.
        """
        self.transfers = transfers or Transfers()
        self._root = root
        self._me = me
        self._libraries = (library, bundled)
        self._connect = connect
        self._near, self._hub = near, hub
        self._reputation = Reputation(on_liar)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        #: Models whose metadata is being fetched.
        self._metadata: dict[str, Progress] = {}
        #: Folders that were handed out: workers and the endpoint read from them.
        self._in_use: set[Path] = set()
        #: Files of weights that were found to be right.
        self.sound = SoundFiles()
        #: Bytes received so far.
        self.received = 0
        #: Set while nobody waits for files.
        self.idle = asyncio.Event()
        self.idle.set()
        self._waiting = 0
        for left_over in root.glob(".*.part"):
            shutil.rmtree(left_over, ignore_errors=True)

    async def metadata(self, model: str, root: str, supply: Supply, *, paced: bool = False) -> Path:
        """A folder with at least config, tokenizer and chat template of the model with that root.

        ``paced``: a pipeline serves, to which it gives way.

        Raises:
            MolinkError: no source could give them; says what each answered.
        """
        with self._at_work():
            async with self._locks[model]:
                progress = self._metadata[model] = Progress()
                try:
                    with self.transfers.under_way(model, progress):
                        return await self._get(model, root, supply, None, progress, paced)
                finally:
                    del self._metadata[model]

    async def stage(
        self,
        model: str,
        root: str,
        layers: tuple[int, int],
        supply: Supply,
        progress: Progress | None = None,
        *,
        paced: bool = False,
    ) -> Path:
        """A folder with all that a stage of ``layers`` (half-open) loads; ``paced`` as above.

        Raises:
            MolinkError: no source could give it, or the disk is full; says what each answered.
        """
        progress = progress or Progress()
        progress.ahead = self._metadata.get(model)
        with self._at_work(), self.transfers.under_way(model, progress):
            async with self._locks[model]:
                progress.begin()
                return await self._get(model, root, supply, layers, progress, paced)

    async def copy_file(
        self,
        model: str,
        folder: Path,
        manifest: Manifest,
        plan: GroupPlan,
        supply: Supply,
        turn: Turn,
        progress: Progress,
    ) -> None:
        """Have one file of weights here that nobody waits for: one chunk after the other.

        ``folder`` is that of :meth:`metadata`. What is needed now may come in beside this, the same
        file too.

        Raises:
            MolinkError: no source could give it, or the disk is full.
        """
        path, others = folder / plan.file, supply.without(self._me, hub=False)

        def connect(supply: Supply) -> Suppliers:
            source = progress.comes_from
            known = self._connect, self._reputation, manifest.root, supply
            return Suppliers(*known, source, patient=True, paced=True)

        count = partial(self._count, progress)
        if plan.shard is not None:
            made = ShardFetch(
                model,
                manifest,
                others,
                connect,
                self._reputation,
                progress,
                count,
                turn,
                copy=True,
            )
            await made.have(path, plan.shard)
        else:
            async with connect(others) as suppliers, new_file(path, COPY) as file:
                suppliers.knows(manifest)
                await asyncio.to_thread(file.write, plan.header)
                await fetch_pieces(suppliers, plan.pieces(), into(file), count, 1, turn)
        await self.sound.add(path)

    def refuse_copy(self, missing: int) -> None:
        """Whether a copy that takes ``missing`` bytes more may be begun.

        Raises:
            ModelError: the disk would be left with too little room.
        """
        disk = shutil.disk_usage(self._root)
        if not has_room(missing, disk.free - RESERVE_BYTES, disk.total):
            raise ModelError(
                f"the disk of {self._root} has {disk.free / 1e9:.1f} GB free; a copy of the rest "
                f"of the model would take {missing / 1e9:.1f} GB and leave too little"
            )

    def brought(self, root: str) -> bool:
        """Whether all files of that model are here, but not in the store."""
        return any(library.find(root) is not None for library in self._libraries)

    def forget(self, peer: str) -> None:
        """It is no member any more: what it did counts no longer."""
        self._reputation.forget(peer)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Somebody waits for files."""
        self._waiting += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.idle.set()

    async def _get(
        self,
        model: str,
        root: str,
        supply: Supply,
        layers: tuple[int, int] | None,
        progress: Progress,
        paced: bool,
    ) -> Path:
        if not root:
            raise Unavailable(
                f"nobody said which bytes {model} consists of: start molink anew on the PC that "
                "brought the model"
            )
        for library in self._libraries:
            held = library.find(root)
            if held is not None:
                await asyncio.to_thread(held.check)
                return held.folder
        if manifest_bytes(root) > MAX_MANIFEST_BYTES:
            raise BrokenModel(f"{model} is too large to be fetched from peers")
        wish = _Wish(model, root, supply.without(self._me, hub=self._hub), progress, paced)
        try:
            async with self._suppliers(wish) as suppliers:
                folder = await self._from(suppliers, wish, layers)
        except FilesMissing:
            raise
        except Unavailable as error:
            raise Unavailable(f"the files of {model} can't be had: {error}") from error
        self._in_use.add(folder)
        return folder

    def _suppliers(self, wish: "_Wish", supply: Supply | None = None) -> Suppliers:
        """Those of a wish, or of ``supply`` alone."""
        return Suppliers(
            self._connect,
            self._reputation,
            wish.root,
            wish.supply if supply is None else supply,
            wish.progress.comes_from,
            near=self._near,
            paced=wish.paced,
            floor=PACED_FLOOR,
        )

    async def _from(
        self, suppliers: Suppliers, wish: "_Wish", layers: tuple[int, int] | None
    ) -> Path:
        root, progress = wish.root, wish.progress
        folder = self._root / folder_name(wish.model, root)
        manifest = await asyncio.to_thread(stored_manifest, folder, root)
        if manifest is None:
            manifest = await suppliers.manifest(progress)
        else:
            suppliers.knows(manifest)
        if not await asyncio.to_thread(folder.is_dir):
            await asyncio.to_thread(self._prune, folder)
        await self._keep_metadata(suppliers, wish.model, manifest, folder, progress)
        try:
            if layers is not None:
                await self._keep_layers(suppliers, wish, manifest, folder, layers)
        except BaseException:
            # Of a model in shards this may be the only list of hashes, and drafts are kept.
            few = not manifest.shards and not any(folder.glob("*.safetensors"))
            if few and folder not in self._in_use:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _prune(self, folder: Path) -> None:
        """Before ``folder`` is begun: of other versions of its model the newest few are kept."""
        model, _, identity = folder.name.rpartition("-")
        version = re.compile(rf"{re.escape(model)}-[0-9a-f]{{{len(identity)}}}\Z")
        others = [
            path
            for path in self._root.iterdir()
            if version.match(path.name) and path not in self._in_use
        ]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for old in others[MAX_OTHERS:]:
            log.info("removing %s: newer versions of the model are here", old)
            shutil.rmtree(old, ignore_errors=True)

    # --- metadata ---

    async def _keep_metadata(
        self,
        suppliers: Suppliers,
        model: str,
        manifest: Manifest,
        folder: Path,
        progress: Progress,
    ) -> None:
        """Have all but weights in ``folder``, which appears once that is whole and sound."""
        parts = metadata_parts(model, manifest)
        if await asyncio.to_thread(folder.is_dir):
            altered = await asyncio.to_thread(altered_parts, folder, manifest, parts)
            for part in altered:
                log.warning("%s is not as it was fetched: fetching it again", folder / part.name)
                await self._fetch_file(suppliers, part, folder, progress)
            return
        check_room(self._root, sum(part.nbytes for part in parts), model, OTHER_HOME)
        draft = private_folder(folder.with_name(f".{folder.name}.part"))
        try:
            await asyncio.to_thread((draft / MANIFEST_FILE).write_bytes, manifest.raw)
            for part in parts:
                await self._fetch_file(suppliers, part, draft, progress)
            await asyncio.to_thread(ModelConfig.load, draft)
            await asyncio.to_thread(patiently, lambda: draft.rename(folder))
        except OSError as error:
            raise ModelError(f"can't make {folder}: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    async def _fetch_file(
        self, suppliers: Suppliers, part: Part, folder: Path, progress: Progress
    ) -> None:
        progress.total += part.nbytes
        count = partial(self._count, progress)
        async with new_file(folder / part.name) as file:
            await fetch_pieces(suppliers, cut(part), into(file), count)

    def _count(self, progress: Progress, nbytes: int) -> None:
        progress.add(nbytes)
        self.received += nbytes

    # --- weights ---

    async def _keep_layers(
        self,
        suppliers: Suppliers,
        wish: "_Wish",
        manifest: Manifest,
        folder: Path,
        layers: tuple[int, int],
    ) -> None:
        model, progress = wish.model, wish.progress
        plans = await asyncio.to_thread(group_plans, folder, manifest, layers)
        progress.total = progress.done + sum(plan.nbytes for plan in plans)
        wanted = [plan for plan in plans if not await self.sound.has(folder, plan, progress)]
        if not wanted:
            return
        shards = [folder / plan.file for plan in wanted if plan.shard is not None]
        here = await asyncio.to_thread(draft_bytes, shards)
        missing = sum(plan.nbytes for plan in wanted) - here
        check_room(self._root, missing, model, OTHER_HOME)
        log.info("fetching layers %d:%d of %s (%s)", *layers, model, progress)
        for plan in wanted:
            if plan.shard is not None:
                await self._keep_shard(wish, manifest, folder, plan.shard)
            else:
                await self._keep_group(suppliers, wish, folder, plan, wanted)
            path = folder / plan.file
            await self.sound.add(path)
            log.info("%s of %s is here (%s)", plan.file, model, progress)

    async def _keep_group(
        self,
        suppliers: Suppliers,
        wish: "_Wish",
        folder: Path,
        plan: GroupPlan,
        wanted: Sequence[GroupPlan],
    ) -> None:
        count = partial(self._count, wish.progress)
        try:
            async with new_file(folder / plan.file) as file:
                await asyncio.to_thread(file.write, plan.header)
                wish.progress.add(len(plan.header))
                await fetch_pieces(suppliers, plan.pieces(), into(file), count)
        except Unavailable as error:
            parts = {one.file: [part.name for part in one.parts] for one in wanted}
            lacking = [file for file, names in parts.items() if suppliers.lacks(names)]
            if not lacking:
                raise
            raise FilesMissing(nobody_has(wish.model, lacking)) from error

    async def _keep_shard(
        self, wish: "_Wish", manifest: Manifest, folder: Path, shard: Shard
    ) -> None:
        made = ShardFetch(
            wish.model,
            manifest,
            wish.supply,
            partial(self._suppliers, wish),
            self._reputation,
            wish.progress,
            partial(self._count, wish.progress),
            nullcontext,
        )
        await made.have(folder / shard.name, shard)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What somebody waits for, and from whom it may come."""

    model: str
    root: str
    supply: Supply
    progress: Progress
    paced: bool
