"""Offers the model files in this PC's store to other peers.

The store holds the files of this PC's stages, so parts of a model survive its provider. Nothing is
hashed here: each chunk is verified when it is read, and again by the receiver.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from molink.checkpoint.manifest import Manifest, manifest_root
from molink.errors import MolinkError
from molink.facts.model import LayerRange
from molink.swarm.artifacts.fetch_plan import GroupPlan
from molink.swarm.artifacts.replication import to_ranges
from molink.wire.messages.peer_reports import MAX_LAYER_RANGES, MAX_PARTIAL_MODELS, PartialModel
from molinkd.peer.artifacts.hashing import FileStamp
from molinkd.peer.artifacts.model_repository import ModelFiles, ModelRepository, file_stamp
from molinkd.peer.artifacts.stored_model import (
    MANIFEST_FILE,
    VERIFIED_SHARDS_FILE,
    load_verified_shards,
    plans_by_layer,
    stored_files,
)
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

#: Interval of listing the store's files, in seconds.
POLL_INTERVAL_S = 2.0
#: Maximum number of offered models; the most recently modified ones.
MAX_MODELS = 16

#: Sizes of a folder's files by name, and the modification time of its list of verified shards.
_Listing = dict[str, int]


@dataclass(slots=True)
class _ScannedModel:
    """A model in the store at its last scan."""

    name: str
    manifest: Manifest
    layer_plans: list[list[GroupPlan]]
    listing: _Listing
    files: ModelFiles
    layer_ranges: tuple[LayerRange, ...]


class PartialModels:
    """Scans the store and updates the repository."""

    def __init__(
        self, store: Path, repository: ModelRepository, on_change: Callable[[], None]
    ) -> None:
        """``on_change()`` is called when the offered files have changed."""
        self._store = store
        self._library = repository
        self._on_change = on_change
        #: Scanned models by folder; ``None`` for an unreadable one.
        self._models: dict[Path, _ScannedModel | None] = {}
        self._listings: dict[Path, _Listing] = {}
        self._scanner: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start scanning periodically."""
        self._scanner = asyncio.get_running_loop().create_task(self._scan_periodically())

    async def close(self) -> None:
        """Stop scanning."""
        await cancel_tasks(self._scanner)

    def list_models(self, first: Collection[str] = ()) -> tuple[PartialModel, ...]:
        """Offered models for the peer report; those with the roots ``first`` come first."""
        found = [one for one in self._models.values() if one is not None]
        found.sort(key=lambda one: one.manifest.root not in first)
        return tuple(
            PartialModel(root=one.manifest.root, layers=one.layer_ranges)
            for one in found[:MAX_PARTIAL_MODELS]
        )

    async def _scan_periodically(self) -> None:
        while True:
            await self.scan_store()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def scan_store(self) -> None:
        """Scan the store and offer its files."""
        known = await asyncio.to_thread(self._scan)
        if known is None:
            return
        self._models = known
        found = (one.files for one in known.values() if one is not None)
        self._library.set_partial_models({one.manifest.root: one for one in found})
        self._on_change()

    def _scan(self) -> dict[Path, _ScannedModel | None] | None:
        """The scanned models; ``None`` if nothing changed. Blocks."""
        listings = {folder: _list_files(folder) for folder in self._model_folders()}
        if listings == self._listings:
            return None
        found: dict[Path, _ScannedModel | None] = {}
        for folder, listing in listings.items():
            known = self._models.get(folder)
            if listing == self._listings.get(folder):
                found[folder] = known
            else:
                found[folder] = _scan_model(folder, listing, known)
        self._listings = listings
        return found

    def _model_folders(self) -> list[Path]:
        """The most recently modified model folders."""
        found = []
        try:
            for folder in self._store.iterdir():
                if not folder.name.startswith(".") and (folder / MANIFEST_FILE).is_file():
                    found.append((folder.stat().st_mtime, folder))
        except OSError as error:
            log.info("%s: %s", self._store, error)
        return [folder for _, folder in sorted(found, reverse=True)[:MAX_MODELS]]


def _list_files(folder: Path) -> _Listing:
    try:
        found = {
            path.name: path.stat().st_size
            for path in folder.iterdir()
            if not path.name.startswith(".")
        }
        if (folder / VERIFIED_SHARDS_FILE).is_file():
            found[VERIFIED_SHARDS_FILE] = (folder / VERIFIED_SHARDS_FILE).stat().st_mtime_ns
        return found
    except OSError:
        return {}


def _scan_model(
    folder: Path, listing: _Listing, known: _ScannedModel | None
) -> _ScannedModel | None:
    """Scan a model folder; ``known`` is its previous scan."""
    try:
        if known is None:
            raw = (folder / MANIFEST_FILE).read_bytes()
            manifest = Manifest.open(raw, manifest_root(raw))
            name, _, identity = folder.name.rpartition("-")
            if not identity or not manifest.root.startswith(identity):
                return None
            layers = plans_by_layer(folder, manifest)
        else:
            name, manifest, layers = known.name, known.manifest, known.layer_plans
        is_here = partial(_is_here, folder, listing, load_verified_shards(folder))
        here = {plan.file: plan for plans in layers for plan in plans if is_here(plan)}
        model_files = stored_files(name, folder, manifest, here.values())
    except (OSError, MolinkError) as error:
        log.info("can't offer %s to other peers: %s", folder, error)
        return None
    held = to_ranges(
        {n for n, plans in enumerate(layers) if all(map(is_here, plans))}, MAX_LAYER_RANGES
    )
    return _ScannedModel(name, manifest, layers, listing, model_files, held)


def _is_here(
    folder: Path, listing: _Listing, stamps: Mapping[str, FileStamp], plan: GroupPlan
) -> bool:
    """Whether a file is present and, for a shard, unchanged since it was verified.

    A shard's chunks have no digests, so only its stamp shows that it is intact. An unrecorded shard
    is offered once some transfer has verified it.
    """
    if listing.get(plan.file) != plan.nbytes:
        return False
    return plan.shard is None or stamps.get(plan.file) == file_stamp(folder / plan.file)
