"""Resolves a model's name to its folder: bundled, local, GGUF file, or hub repository."""

import re
import threading
from dataclasses import dataclass
from pathlib import Path

from molink.checkpoint import hub
from molink.checkpoint.gguf_import import find_gguf, import_gguf
from molink.checkpoint.hub_catalog import CatalogEntry, load_catalog
from molink.checkpoint.hub_reader import HubModel, find_shards
from molink.checkpoint.model_names import (
    DEMO_MODEL_NAME,
    GGUF_SUFFIX,
    SMALL_MODEL_NAME,
    find_demo_folder,
    short_name,
)
from molink.errors import ModelNotFound
from molink.files import find_path_fault
from molink.gguf.gguf_file import model_name, split_names

_REPOSITORY_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_HUB_FILE_PATTERN = re.compile(
    rf"({_REPOSITORY_PATTERN.pattern})/([\w.-]+(?:/[\w.-]+)?\.gguf)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's public name and its local folder, whose content is not yet checked.

    ``hub_place`` is ``OWNER/NAME@COMMIT`` for a model of the hub, else empty. ``shards`` describes
    weights that the folder lacks.
    """

    name: str
    path: Path
    hub_place: str = ""
    shards: HubModel | None = None


def find_demo_model() -> ModelSource:
    """Return the bundled model.

    Raises:
        ModelNotFound: this installation lacks it.
    """
    return ModelSource(DEMO_MODEL_NAME, find_demo_folder())


def find_model(
    name_or_path: str | None = None,
    counter: hub.ByteCounter | None = None,
    stop: threading.Event | None = None,
    *,
    unpack_into: Path,
    in_shards: bool = False,
    compare: bool = False,
) -> ModelSource:
    """Resolve ``molink-demo`` (or ``None``), a folder, a GGUF file, a short name of the catalog, or
    a hub repository.

    A GGUF file is first converted to a folder below ``unpack_into``. A folder takes precedence over
    a repository of the same name. A repository comes from the hub's cache if complete there, else
    it is downloaded; ``stop`` interrupts that. ``OWNER/NAME/FILE.gguf`` names one file of a
    repository; a repository with a single GGUF model needs no file name.

    With ``in_shards``, weights may stay on the hub. With ``compare``, the cache is compared with
    the hub, and incomplete files are fetched.

    Raises:
        ModelError: no such model, or it is not accessible.
        Unavailable: the hub is unreachable.
    """
    if name_or_path is None or name_or_path == DEMO_MODEL_NAME:
        return find_demo_model()
    counter, stop = counter or hub.NullCounter(), stop or threading.Event()
    found = find_local_model(name_or_path)
    if found is not None:
        file = find_gguf(found) if found.is_dir() else found
        path = found if file is None else import_gguf(file, unpack_into, counter, stop)
        return ModelSource(name_local_model(found), path)
    name_or_path = expand_short_name(name_or_path)
    asked = split_hub_file(name_or_path)
    if asked is not None:
        here = None if compare else hub.find_cached_file(*asked)
        file = here or hub.pull_file(*asked, counter, stop)
        return ModelSource(model_name(file.name), import_gguf(file, unpack_into, counter, stop))
    if not is_repository(name_or_path):
        raise _explain_not_found(name_or_path)
    cached = None if compare else hub.find_cached(name_or_path)
    if cached is None:
        gguf = hub.find_only_gguf(name_or_path)
        if gguf is not None and is_hub_file(f"{name_or_path}/{gguf}"):
            one = f"{name_or_path}/{gguf}"
            return find_model(one, counter, stop, unpack_into=unpack_into, compare=compare)
        shards = find_shards(name_or_path, counter, stop) if in_shards else None
        if shards is not None:
            return ModelSource(short_name(name_or_path), shards.folder, shards.place, shards)
        cached = hub.pull_model(name_or_path, counter, stop)
    commit = cached.name if hub.COMMIT_PATTERN.fullmatch(cached.name) else ""
    place = f"{name_or_path}@{commit}" if commit else ""
    return ModelSource(short_name(name_or_path), cached, place)


def check_model_name(name: str) -> None:
    """Check that ``name`` has the form of a model's name, or is a model on this PC.

    Raises:
        ModelNotFound: it is neither; the message explains how models are named.
    """
    known = name in (DEMO_MODEL_NAME, SMALL_MODEL_NAME) or is_repository(name) or is_hub_file(name)
    if not known and find_local_model(name) is None and find_catalog_entry(name) is None:
        raise _explain_not_found(name)


def find_catalog_entry(name: str) -> CatalogEntry | None:
    """Find the catalog entry called ``name``, unless a folder or file of that name exists.

    ``None`` for other names.
    """
    if not name or "/" in name or find_local_model(name) is not None:
        return None
    return load_catalog().find_entry(name)


def expand_short_name(name: str) -> str:
    """Expand a short name to ``OWNER/NAME`` or ``OWNER/NAME/FILE.gguf``; keep other names."""
    entry = find_catalog_entry(name)
    return name if entry is None else entry.source


def find_served_name(model: str) -> str:
    """Return the name under which a swarm would serve ``model``."""
    found = None if model == DEMO_MODEL_NAME else find_local_model(model)
    return short_name(expand_short_name(model)) if found is None else name_local_model(found)


def _explain_not_found(name: str) -> ModelNotFound:
    path = Path(name).expanduser()
    if name and path.is_file():
        return ModelNotFound(
            f"{name} is not a GGUF file: name the model's folder, {path.resolve().parent}"
        )
    near = " or ".join(load_catalog().propose_names(name))
    return ModelNotFound(
        f"no model {name!r}.{f' Did you mean {near}?' if near else ''} Name a model by a short "
        "name (`molink search`), a model of the Hugging Face hub with its owner (OWNER/NAME, or "
        f"OWNER/NAME/FILE.gguf), a folder or a GGUF file on this PC, {DEMO_MODEL_NAME} or "
        f"{SMALL_MODEL_NAME}"
    )


def find_local_model(name: str) -> Path | None:
    """Return the complete folder or GGUF file that ``name`` is on this PC, else ``None``."""
    path = Path(name).expanduser()
    if name and (path.is_dir() or (path.suffix.lower() == GGUF_SUFFIX and path.is_file())):
        # Keep a link's own name: in the hub's cache, files are links to blobs.
        return path.resolve() if path.is_dir() else path.parent.resolve() / path.name
    return None


def name_local_model(path: Path) -> str:
    """Derive a model's name from its folder or GGUF file."""
    return (path.name if path.is_dir() else model_name(path.name)) or str(path)


def is_repository(name: str) -> bool:
    """Whether it has the form ``OWNER/NAME``."""
    return _REPOSITORY_PATTERN.fullmatch(name) is not None


def is_hub_file(name: str) -> bool:
    """Whether it has the form ``OWNER/NAME/FILE.gguf``."""
    return split_hub_file(name) is not None


def split_hub_file(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Split ``OWNER/NAME/FILE.gguf`` into the repository and its files, including all splits."""
    match = _HUB_FILE_PATTERN.fullmatch(name)
    if match is None or find_path_fault(match[2]):
        return None
    return match[1], split_names(match[2])


def is_local(name: str) -> bool:
    """Whether the model is complete on this PC."""
    if find_local_model(name) is not None:
        return True
    asked = split_hub_file(name)
    return (hub.find_cached(name) if asked is None else hub.find_cached_file(*asked)) is not None
