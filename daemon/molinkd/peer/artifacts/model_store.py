"""Stores model files fetched from peers: only the needed ones, resumable, and atomic.

Every peer that reports files of a model is a source. The model's provider has published its
manifest (:mod:`molink.checkpoint.manifest`): each chunk or shard is verified when it arrives, and
each file again before its first use in a run of the daemon.
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
from molink.checkpoint.disk_space import DISK_RESERVE_BYTES, OTHER_HOME_HINT, check_free_space
from molink.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    HashedEntry,
    Manifest,
    ShardEntry,
    manifest_size,
)
from molink.errors import AlteredModel, BrokenModel, FilesMissing, ModelError, Unavailable
from molink.facts.layer_range import format_layers
from molink.files import retry_while_busy
from molink.swarm.artifacts.fetch_plan import GroupPlan, split_part
from molink.swarm.artifacts.replication import has_disk_room
from molink.swarm.artifacts.sources import ModelSources
from molink.swarm.artifacts.transfer import MIN_RATE
from molink.wire.sockets.secrets import private_folder
from molinkd.peer.artifacts.hashing import FileStamp, run_in_thread
from molinkd.peer.artifacts.model_repository import ModelRepository, folder_name
from molinkd.peer.artifacts.partial_shard import partial_bytes, remove_partials
from molinkd.peer.artifacts.shard_fetch import ShardFetch
from molinkd.peer.artifacts.sources import (
    Connect,
    OnMisbehaviour,
    Reputation,
    SourcePool,
    Throttle,
    fetch_runs,
    write_into,
)
from molinkd.peer.artifacts.stored_model import (
    MANIFEST_FILE,
    REPLICA_SUFFIX,
    altered_parts,
    create_file,
    group_plans,
    link_known_files,
    metadata_parts,
    missing_files_text,
    read_stored_manifest,
    record_verified_shard,
    verify_file,
)
from molinkd.peer.artifacts.transfers import Progress, Transfers

log = logging.getLogger(__name__)


class VerifiedFiles:
    """Stamps of verified files; each file is verified once, and again if it changes."""

    def __init__(self) -> None:
        self._stamps: dict[Path, FileStamp] = {}

    async def mark_verified(self, path: Path) -> None:
        """Record a file that was verified while it arrived."""
        self._stamps[path] = await asyncio.to_thread(FileStamp.of_path, path)

    async def is_verified(self, folder: Path, plan: GroupPlan, progress: Progress) -> bool:
        """Whether a file is present and valid; counts its bytes in ``progress``."""
        path = folder / plan.file
        try:
            stamp = await asyncio.to_thread(FileStamp.of_path, path)
            if self._stamps.get(path) == stamp:
                progress.add_existing(plan.nbytes)
            else:
                await run_in_thread(partial(verify_file, path, plan, progress))
                self._stamps[path] = stamp
                if plan.shard is not None:
                    await asyncio.to_thread(record_verified_shard, folder, plan.file, stamp)
        except FileNotFoundError:
            return False
        except (OSError, AlteredModel, BrokenModel) as error:
            log.warning("%s was altered (%s): fetching it again", path, error)
            return False
        if plan.shard is not None:
            await asyncio.to_thread(remove_partials, path)
        return True


#: Minimum rate of a limited transfer that a stage waits for, in bytes/s; above the coordinator's
#: limit for slow transfers.
MIN_LIMITED_RATE = 1.25 * MIN_RATE
#: Old versions of a model that are kept besides those in use.
MAX_OLD_VERSIONS = 2


class ModelStore:
    """Fetches model files from peers and keeps them under ``root``."""

    def __init__(
        self,
        root: Path,
        me: str,
        repository: ModelRepository,
        connect: Connect,
        bundled: ModelRepository,
        on_liar: OnMisbehaviour,
        transfers: Transfers | None = None,
        is_nearby: Callable[[str], bool] = lambda _: True,
        *,
        hub: bool = False,
    ) -> None:
        """``bundled`` has models on this PC that are not offered, but need not be fetched.

        ``is_nearby(peer)`` prefers peers of the local network. ``hub`` allows fetching from the
        hub. ``on_liar`` gets each source that sent altered bytes.
        """
        self.transfers = transfers or Transfers()
        self._root = root
        self._me = me
        self._repositories = (repository, bundled)
        self._connect = connect
        self._is_nearby, self._use_hub = is_nearby, hub
        self._reputation = Reputation(on_liar)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        #: Metadata transfers in progress, by model.
        self._metadata: dict[str, Progress] = {}
        #: Folders that workers and the API read from; never pruned.
        self._in_use: set[Path] = set()
        #: Weight files that were verified.
        self.verified = VerifiedFiles()
        #: Bytes received in total.
        self.bytes_received = 0
        #: Set while no stage or request waits for files.
        self.idle = asyncio.Event()
        self.idle.set()
        self._num_waiting = 0
        for left_over in root.glob(".*.part"):
            shutil.rmtree(left_over, ignore_errors=True)

    async def fetch_metadata(
        self, model: str, root: str, supply: ModelSources, *, rate_limited: bool = False
    ) -> Path:
        """Fetch config, tokenizer and chat template; returns the model's folder.

        ``rate_limited`` yields bandwidth to a serving pipeline.

        Raises:
            MolinkError: No source could send them; the message quotes each.
        """
        with self._mark_busy():
            async with self._locks[model]:
                progress = self._metadata[model] = Progress()
                try:
                    with self.transfers.track_transfer(model, progress):
                        return await self._fetch(model, root, supply, None, progress, rate_limited)
                finally:
                    del self._metadata[model]

    async def fetch_stage(
        self,
        model: str,
        root: str,
        layers: tuple[int, int],
        supply: ModelSources,
        progress: Progress | None = None,
        *,
        rate_limited: bool = False,
    ) -> Path:
        """Fetch all files of a stage of ``layers`` (half-open); returns the model's folder.

        Raises:
            MolinkError: No source could send them, or the disk is full.
        """
        progress = progress or Progress()
        progress.prerequisite = self._metadata.get(model)
        with self._mark_busy(), self.transfers.track_transfer(model, progress):
            async with self._locks[model]:
                progress.merge_prerequisite()
                return await self._fetch(model, root, supply, layers, progress, rate_limited)

    async def replicate_file(
        self,
        model: str,
        folder: Path,
        manifest: Manifest,
        plan: GroupPlan,
        supply: ModelSources,
        throttle: Throttle,
        progress: Progress,
    ) -> None:
        """Fetch one weight file in the background, one chunk at a time.

        ``folder`` comes from :meth:`fetch_metadata`. An urgent transfer may fetch the same file
        concurrently.

        Raises:
            MolinkError: No source could send it, or the disk is full.
        """
        others = supply.without_peer(self._me, hub=False)

        def connect(supply: ModelSources) -> SourcePool:
            source = progress.set_source
            known = self._connect, self._reputation, manifest.root, supply
            return SourcePool(*known, source, patient=True, rate_limited=True)

        count = partial(self._count_bytes, progress)
        if plan.shard is not None:
            made = ShardFetch(
                model,
                manifest,
                others,
                connect,
                self._reputation,
                progress,
                count,
                throttle,
                is_replica=True,
            )
            await made.fetch_shard(folder, plan.shard)
        else:
            async with (
                connect(others) as pool,
                create_file(folder, plan.file, REPLICA_SUFFIX) as file,
            ):
                pool.set_manifest(manifest)
                await asyncio.to_thread(file.write, plan.header)
                await fetch_runs(pool, plan.chunk_runs(), write_into(file), count, 1, throttle)
        await self.verified.mark_verified(folder / plan.file)

    async def link_known_files(
        self, folder: Path, manifest: Manifest, plans: Sequence[GroupPlan]
    ) -> None:
        """Reuse files of the model's other versions in ``folder``, where hashes are the same."""
        versions = await asyncio.to_thread(self._other_versions, folder)
        await asyncio.to_thread(link_known_files, folder, manifest, plans, versions)

    def check_replica_room(self, missing: int) -> None:
        """Check that a replica of ``missing`` more bytes fits.

        Raises:
            ModelError: Too little disk space would be left.
        """
        disk = shutil.disk_usage(self._root)
        if not has_disk_room(missing, disk.free - DISK_RESERVE_BYTES, disk.total):
            raise ModelError(
                f"the disk of {self._root} has {disk.free / 1e9:.1f} GB free; a copy of the rest "
                f"of the model would take {missing / 1e9:.1f} GB and leave too little"
            )

    def is_in_repository(self, root: str) -> bool:
        """Whether this PC has all files of the model outside the store."""
        return any(repository.find_by_root(root) is not None for repository in self._repositories)

    def drop_peer(self, peer: str) -> None:
        """Forget the reputation of a removed peer."""
        self._reputation.drop_peer(peer)

    @contextmanager
    def _mark_busy(self) -> Iterator[None]:
        """Pause replication while a stage or request waits for files."""
        self._num_waiting += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self.idle.set()

    async def _fetch(
        self,
        model: str,
        root: str,
        supply: ModelSources,
        layers: tuple[int, int] | None,
        progress: Progress,
        rate_limited: bool,
    ) -> Path:
        if not root:
            raise Unavailable(
                f"{model} has no manifest: restart molink on the PC that provides the model"
            )
        for repository in self._repositories:
            held = repository.find_by_root(root)
            if held is not None:
                await asyncio.to_thread(held.verify_files)
                return held.folder
        if manifest_size(root) > MAX_MANIFEST_BYTES:
            raise BrokenModel(f"{model} is too large to be fetched from peers")
        request = _FetchRequest(
            model, root, supply.without_peer(self._me, hub=self._use_hub), progress, rate_limited
        )
        try:
            async with self._make_pool(request) as pool:
                folder = await self._fetch_from(pool, request, layers)
        except FilesMissing:
            raise
        except Unavailable as error:
            raise Unavailable(f"can't fetch the files of {model}: {error}") from error
        self._in_use.add(folder)
        return folder

    def _make_pool(
        self, request: "_FetchRequest", supply: ModelSources | None = None
    ) -> SourcePool:
        """A pool of the request's sources, or of ``supply``."""
        return SourcePool(
            self._connect,
            self._reputation,
            request.root,
            request.supply if supply is None else supply,
            request.progress.set_source,
            is_nearby=self._is_nearby,
            rate_limited=request.rate_limited,
            floor=MIN_LIMITED_RATE,
        )

    async def _fetch_from(
        self, pool: SourcePool, request: "_FetchRequest", layers: tuple[int, int] | None
    ) -> Path:
        root, progress = request.root, request.progress
        folder = self._root / folder_name(request.model, root)
        manifest = await asyncio.to_thread(read_stored_manifest, folder, root)
        if manifest is None:
            manifest = await pool.fetch_manifest(progress)
        else:
            pool.set_manifest(manifest)
        if not await asyncio.to_thread(folder.is_dir):
            await asyncio.to_thread(self._prune_versions, folder)
        await self._download_metadata(pool, request.model, manifest, folder, progress)
        try:
            if layers is not None:
                await self._download_layers(pool, request, manifest, folder, layers)
        except BaseException:
            # For a model in shards this may be the only manifest, and partial files are kept.
            few = not manifest.shards and not any(folder.glob("*.safetensors"))
            if few and folder not in self._in_use:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _other_versions(self, folder: Path) -> list[Path]:
        """Folders of other versions of its model, newest first."""
        model, _, identity = folder.name.rpartition("-")
        version = re.compile(rf"{re.escape(model)}-[0-9a-f]{{{len(identity)}}}\Z")
        others = [
            path for path in self._root.iterdir() if version.match(path.name) and path != folder
        ]
        return sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)

    def _prune_versions(self, folder: Path) -> None:
        """Before ``folder`` is created, remove all but the newest other versions of its model."""
        others = [path for path in self._other_versions(folder) if path not in self._in_use]
        for old in others[MAX_OLD_VERSIONS:]:
            log.info("removing %s: newer versions of the model are here", old)
            shutil.rmtree(old, ignore_errors=True)

    # --- metadata ---

    async def _download_metadata(
        self,
        pool: SourcePool,
        model: str,
        manifest: Manifest,
        folder: Path,
        progress: Progress,
    ) -> None:
        """Create ``folder`` atomically with all verified files except weights."""
        parts = metadata_parts(model, manifest)
        if await asyncio.to_thread(folder.is_dir):
            altered = await asyncio.to_thread(altered_parts, folder, manifest, parts)
            for part in altered:
                log.warning("%s was altered: fetching it again", folder / part.name)
                await self._download_file(pool, part, folder, progress)
            return
        check_free_space(self._root, sum(part.nbytes for part in parts), model, OTHER_HOME_HINT)
        draft = private_folder(folder.with_name(f".{folder.name}.part"))
        try:
            await asyncio.to_thread((draft / MANIFEST_FILE).write_bytes, manifest.raw)
            for part in parts:
                await self._download_file(pool, part, draft, progress)
            await asyncio.to_thread(ModelConfig.load_folder, draft)
            await asyncio.to_thread(retry_while_busy, lambda: draft.rename(folder))
        except OSError as error:
            raise ModelError(f"can't create {folder}: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    async def _download_file(
        self, pool: SourcePool, part: HashedEntry, folder: Path, progress: Progress
    ) -> None:
        progress.total += part.nbytes
        count = partial(self._count_bytes, progress)
        async with create_file(folder, part.name) as file:
            await fetch_runs(pool, split_part(part), write_into(file), count)

    def _count_bytes(self, progress: Progress, nbytes: int) -> None:
        progress.add_bytes(nbytes)
        self.bytes_received += nbytes

    # --- weights ---

    async def _download_layers(
        self,
        pool: SourcePool,
        request: "_FetchRequest",
        manifest: Manifest,
        folder: Path,
        layers: tuple[int, int],
    ) -> None:
        model, progress = request.model, request.progress
        plans = await asyncio.to_thread(group_plans, folder, manifest, layers)
        await self.link_known_files(folder, manifest, plans)
        progress.total = progress.done + sum(plan.nbytes for plan in plans)
        wanted = [
            plan for plan in plans if not await self.verified.is_verified(folder, plan, progress)
        ]
        if not wanted:
            return
        shards = [folder / plan.file for plan in wanted if plan.shard is not None]
        here = await asyncio.to_thread(partial_bytes, shards)
        missing = sum(plan.nbytes for plan in wanted) - here
        check_free_space(self._root, missing, model, OTHER_HOME_HINT)
        log.info("fetching layers %s of %s (%s)", format_layers(layers), model, progress)
        for plan in wanted:
            if plan.shard is not None:
                await self._download_shard(request, manifest, folder, plan.shard)
            else:
                await self._download_group(pool, request, folder, plan, wanted)
            path = folder / plan.file
            await self.verified.mark_verified(path)
            log.info("fetched %s of %s (%s)", plan.file, model, progress)

    async def _download_group(
        self,
        pool: SourcePool,
        request: "_FetchRequest",
        folder: Path,
        plan: GroupPlan,
        wanted: Sequence[GroupPlan],
    ) -> None:
        count = partial(self._count_bytes, request.progress)
        try:
            async with create_file(folder, plan.file) as file:
                await asyncio.to_thread(file.write, plan.header)
                request.progress.add_bytes(len(plan.header))
                await fetch_runs(pool, plan.chunk_runs(), write_into(file), count)
        except Unavailable as error:
            parts = {one.file: [part.name for part in one.parts] for one in wanted}
            lacking = [file for file, names in parts.items() if pool.are_unavailable(names)]
            if not lacking:
                raise
            raise FilesMissing(missing_files_text(request.model, lacking)) from error

    async def _download_shard(
        self, request: "_FetchRequest", manifest: Manifest, folder: Path, shard: ShardEntry
    ) -> None:
        made = ShardFetch(
            request.model,
            manifest,
            request.supply,
            partial(self._make_pool, request),
            self._reputation,
            request.progress,
            partial(self._count_bytes, request.progress),
            nullcontext,
        )
        await made.fetch_shard(folder, shard)


@dataclass(frozen=True, slots=True)
class _FetchRequest:
    """What to fetch, and from which sources."""

    model: str
    root: str
    supply: ModelSources
    progress: Progress
    rate_limited: bool
