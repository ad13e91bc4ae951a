"""The models on this PC's disk."""

import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import molink
from molink.checkpoint.model_names import (
    DEMO_MODEL_NAME,
    GGUF_SUFFIX,
    SMALL_MODEL_NAME,
    find_demo_folder,
    short_name,
)
from molink.errors import ModelError, ModelNotFound, MolinkError, UsageError
from molink.files import retry_while_busy
from molinkd.peer.home import Home, downloads_folder

log = logging.getLogger(__name__)

#: ``swarm``: fetched from peers; ``cache``: in the Hugging Face cache; ``folder``: provided by the
#: user; ``unpacked``: converted from a GGUF file; ``download``: a GGUF file that molink fetched;
#: ``demo``: a copy of a running or killed demo; ``bundled``: part of molink.
ModelLocation = Literal["swarm", "cache", "folder", "unpacked", "download", "demo", "bundled"]
#: Start of the names of the small model, from any origin.
_SMALL_MODEL_PREFIX = "SmolLM2-135M-Instruct"


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
        short = short_name(self.name)
        if name == SMALL_MODEL_NAME and short.startswith(_SMALL_MODEL_PREFIX):
            return True
        return name in (self.name, short) or self.path == Path(name).absolute()


def list_installed_models(home: Home) -> list[InstalledModel]:
    """All readable models on this PC's disk. Blocks."""
    found = [
        *(one for place in (home, *home.device_homes()) for one in _stored_models(place)),
        *_cached_models(),
        *_user_folders(home),
        *_unpacked_models(home),
        *_downloaded_models(),
        *_demo_models(home),
    ]
    try:
        demo = find_demo_folder()
        found.append(InstalledModel(DEMO_MODEL_NAME, "bundled", demo, _disk_bytes(demo)))
    except MolinkError as error:
        log.info("%s", error)
    return found


def find_installed_models(home: Home, name: str) -> list[InstalledModel]:
    """All copies of the model ``name``, which may also be the path of any folder or GGUF file."""
    found = _choose_named(list_installed_models(home), name)
    if found:
        return found
    from molink.checkpoint.model_source import find_local_model, name_local_model

    path = find_local_model(name)
    if path is None:
        return []
    return [InstalledModel(name_local_model(path), "folder", path, _disk_bytes(path))]


def _choose_named(models: list[InstalledModel], name: str) -> list[InstalledModel]:
    """The entries of ``models`` that ``name`` means; a short name means its file's copies."""
    from molink.checkpoint.model_source import expand_short_name, split_hub_file

    source = expand_short_name(name)
    asked = split_hub_file(source)
    names = {name, source} if asked is None else {name, short_name(source), asked[0]}
    return [one for one in models if any(map(one.has_name, names))]


def choose_deletable(
    home: Home, models: list[InstalledModel], name: str, *, hf_cache: bool
) -> list[InstalledModel]:
    """The entries of ``models`` to delete for ``name``.

    Raises:
        ModelNotFound: There is none.
        UsageError: molink does not own it; the message says what to do instead.
    """
    called = _choose_named(models, name)
    if not called:
        raise ModelNotFound(f"no model {name!r} on this PC; see {home.format_command('list')}")
    chosen = [
        one
        for one in called
        if one.location in ("swarm", "unpacked", "download", "demo")
        or (hf_cache and one.location == "cache")
    ]
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
        delete = shutil.rmtree if model.path.is_dir() else os.unlink
        retry_while_busy(partial(delete, model.path))
    except OSError as error:
        raise ModelError(
            f"can't delete {model.path}: {error}. Close the programs that use it and try again"
        ) from error
    return model.size


def _stored_models(home: Home) -> Iterator[InstalledModel]:
    folders = _subfolders(home.models)
    if not folders:
        return
    from molink.checkpoint.manifest import Manifest, manifest_root
    from molinkd.peer.artifacts.stored_model import MANIFEST_FILE, all_plans

    for folder in folders:
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
        from molink.checkpoint import hub

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
    if not home.hashes.is_dir():
        return
    from huggingface_hub import constants

    from molinkd.peer.artifacts.hashing import Hasher

    seen = {path.parent for path in Hasher(home.hashes).cached_paths()}
    others = (Path(constants.HF_HUB_CACHE), home.root, Path(molink.__file__).parent)
    for folder in sorted(seen):
        if (folder / "config.json").is_file() and not any(map(folder.is_relative_to, others)):
            yield InstalledModel(folder.name, "folder", folder, _disk_bytes(folder))


def _unpacked_models(home: Home) -> Iterator[InstalledModel]:
    for folder in _subfolders(home.unpacked):
        yield InstalledModel(
            folder.name.rpartition("-")[0], "unpacked", folder, _disk_bytes(folder)
        )


def _downloaded_models() -> Iterator[InstalledModel]:
    """GGUF files that molink fetched, and what interrupted downloads left."""
    folder = downloads_folder()
    for path in sorted(folder.glob(f"*{GGUF_SUFFIX}")):
        yield InstalledModel(path.stem, "download", path, _disk_bytes(path))
    for path in _subfolders(folder):
        yield InstalledModel(
            SMALL_MODEL_NAME, "download", path, _disk_bytes(path), is_complete=False
        )


def _demo_models(home: Home) -> Iterator[InstalledModel]:
    for demo in home.demo_homes():
        for peer in demo.demo_peers():
            for one in (*_stored_models(peer), *_unpacked_models(peer)):
                yield replace(one, location="demo")


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
