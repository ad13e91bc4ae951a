"""The models on this PC's disk."""

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Literal

from molink.checkpoint import hub
from molink.checkpoint.gguf_import import GGUF_SUFFIX
from molink.checkpoint.manifest import Manifest, manifest_root
from molink.checkpoint.model_source import find_demo_model, short_name
from molink.errors import ModelError, ModelNotFound, MolinkError, UsageError
from molink.files import retry_while_busy
from molinkd.peer.artifacts.hashing import Hasher
from molinkd.peer.artifacts.stored_model import MANIFEST_FILE, all_plans
from molinkd.peer.home import Home

log = logging.getLogger(__name__)

#: ``swarm``: fetched from peers; ``cache``: in the Hugging Face cache; ``folder``: provided by the
#: user; ``unpacked``: converted from the user's GGUF file; ``bundled``: part of molink.
ModelLocation = Literal["swarm", "cache", "folder", "unpacked", "bundled"]


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model that is at least partly on disk. Sizes in bytes; ``total`` is 0 if unknown."""

    name: str
    location: ModelLocation
    path: Path
    size: int
    total: int = 0
    is_complete: bool = True

    def has_name(self, name: str) -> bool:
        """Whether ``name`` means this model; hub models have a long and a short name."""
        return name in (self.name, short_name(self.name)) or self.path == Path(name).absolute()


def list_installed_models(home: Home) -> list[InstalledModel]:
    """All readable models on this PC's disk. Blocks."""
    found = [
        *_stored_models(home),
        *_cached_models(),
        *_user_folders(home),
        *_unpacked_models(home),
    ]
    try:
        demo = find_demo_model()
        found.append(InstalledModel(demo.name, "bundled", demo.path, _disk_bytes(demo.path)))
    except MolinkError as error:
        log.info("%s", error)
    return found


def choose_deletable(
    home: Home, models: list[InstalledModel], name: str, *, hf_cache: bool
) -> list[InstalledModel]:
    """The entries of ``models`` to delete for ``name``.

    Raises:
        ModelNotFound: There is none.
        UsageError: molink does not own it; the message says what to do instead.
    """
    called = [one for one in models if one.has_name(name)]
    if not called:
        raise ModelNotFound(f"no model {name!r} on this PC; see {home.format_command('list')}")
    ours = ("swarm", "unpacked", "cache") if hf_cache else ("swarm", "unpacked")
    chosen = [one for one in called if one.location in ours]
    if chosen:
        return chosen
    reasons = {
        "cache": (
            f"{name} is in the Hugging Face cache, which other programs use too; "
            f"{home.format_command(f'rm {name} --hf-cache')} deletes it there"
        ),
        "folder": f"{called[0].path} is your own folder; delete it yourself",
        "bundled": f"{name} is bundled and can't be deleted",
    }
    raise UsageError(reasons[called[0].location])


def delete_model(model: InstalledModel) -> int:
    """Delete the model's files; returns the number of bytes freed.

    Raises:
        ModelError: A file can't be deleted.
    """
    try:
        retry_while_busy(partial(shutil.rmtree, model.path))
    except OSError as error:
        raise ModelError(
            f"can't delete {model.path}: {error}. Close the programs that use it and try again"
        ) from error
    return model.size


def _stored_models(home: Home) -> Iterator[InstalledModel]:
    for folder in _subfolders(home.models):
        try:
            raw = (folder / MANIFEST_FILE).read_bytes()
            manifest = Manifest.open(raw, manifest_root(raw))
            plans = [plan for _, plan in all_plans(folder, manifest)]
        except (OSError, MolinkError) as error:
            log.info("%s: %s", folder, error)
            continue
        files = {plan.file: plan.nbytes for plan in plans}
        here = [file for file, nbytes in files.items() if _disk_bytes(folder / file) == nbytes]
        whole = len(here) == len(files)
        total = sum(files.values()) + manifest.extra_bytes
        name = folder.name.rpartition("-")[0]
        yield InstalledModel(name, "swarm", folder, _disk_bytes(folder), total, whole)


def _cached_models() -> Iterator[InstalledModel]:
    from huggingface_hub import constants

    for folder in _subfolders(Path(constants.HF_HUB_CACHE)):
        kind, _, name = folder.name.partition("--")
        if kind != "models":
            continue
        snapshots = _subfolders(folder / "snapshots")
        with_weights = [one for one in snapshots if any(one.glob("*.safetensors"))]
        has_gguf = any(any(one.rglob(f"*{GGUF_SUFFIX}")) for one in snapshots)
        is_under_way = any((folder / "blobs").glob(f"*{hub.PARTIAL_SUFFIX}"))
        if not (with_weights or has_gguf or is_under_way):
            continue
        whole = any(map(hub.has_weights, with_weights)) or (has_gguf and not is_under_way)
        yield InstalledModel(
            name.replace("--", "/"), "cache", folder, _disk_bytes(folder), 0, whole
        )


def _user_folders(home: Home) -> Iterator[InstalledModel]:
    """Folders of hashed files, except the hub cache, the state folder and the bundled model."""
    from huggingface_hub import constants

    seen = {path.parent for path in Hasher(home.hashes).cached_paths()}
    others = (Path(constants.HF_HUB_CACHE), home.root, Path(str(files("molink"))))
    for folder in sorted(seen):
        if (folder / "config.json").is_file() and not any(map(folder.is_relative_to, others)):
            yield InstalledModel(folder.name, "folder", folder, _disk_bytes(folder))


def _unpacked_models(home: Home) -> Iterator[InstalledModel]:
    for folder in _subfolders(home.unpacked):
        yield InstalledModel(
            folder.name.rpartition("-")[0], "unpacked", folder, _disk_bytes(folder)
        )


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(
            path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
    except OSError:
        return []


def _disk_bytes(path: Path) -> int:
    """Bytes of a file, or of a folder's files without links."""
    try:
        if not path.is_dir():
            return path.stat().st_size
        return sum(_disk_bytes(one) for one in path.iterdir() if not one.is_symlink())
    except OSError:
        return 0
