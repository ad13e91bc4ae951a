"""Stores the manifest and metadata of a hub model in shards, without the shards themselves.

The folder has the same layout as on PCs that fetch the model. Shards of this PC's own stage are
added to it later.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from molink.checkpoint.manifest import HashedEntry, Manifest, hash_chunks, manifest_root
from molink.checkpoint.model_folder import METADATA_FILES
from molink.checkpoint.model_names import short_name
from molink.checkpoint.safetensors_header import TensorSpan
from molink.errors import BrokenModel, MolinkError
from molink.files import make_plain_name, retry_while_busy
from molink.wire.sockets.secrets import private_folder
from molinkd.peer.artifacts.model_repository import ModelFiles, folder_name
from molinkd.peer.artifacts.stored_model import (
    MANIFEST_FILE,
    altered_parts,
    metadata_parts,
    stored_files,
)

if TYPE_CHECKING:
    from molink.checkpoint.hub_reader import HubModel

log = logging.getLogger(__name__)


def store_model(store: Path, name: str, model: "HubModel") -> ModelFiles:
    """Store the metadata of ``model`` in a folder below ``store``, created atomically.

    Raises:
        BrokenModel: A metadata file is too large or unreadable, or the tokenizer is missing.
    """
    try:
        present = [one for one in METADATA_FILES if (model.folder / one).is_file()]
        manifest = model.build_manifest([_hash_file(model.folder, one) for one in present])
        parts = metadata_parts(name, manifest)
        folder = store / folder_name(name, manifest.root)
        if not folder.is_dir():
            draft = private_folder(folder.with_name(f".{folder.name}.part"))
            _copy_parts(model.folder, draft, parts)
            (draft / MANIFEST_FILE).write_bytes(manifest.raw)
            retry_while_busy(lambda: draft.rename(folder))
        _copy_parts(model.folder, folder, altered_parts(folder, manifest, parts))
        return stored_files(name, folder, manifest, ())
    except OSError as error:
        raise BrokenModel(f"can't store the files of {name} in {store}: {error}") from error


def find_stored_model(store: Path, repository: str) -> ModelFiles | None:
    """The newest stored version of a hub repository."""
    name = short_name(repository)
    found = sorted(
        store.glob(f"{make_plain_name(name, 'model')}-*"), key=_modified_at, reverse=True
    )
    for folder in found:
        try:
            raw = (folder / MANIFEST_FILE).read_bytes()
            manifest = Manifest.open(raw, manifest_root(raw))
            if manifest.hub.partition("@")[0] != repository:
                continue
            if not altered_parts(folder, manifest, metadata_parts(name, manifest)):
                return stored_files(name, folder, manifest, ())
        except (OSError, MolinkError) as error:
            log.info("%s: %s", folder, error)
    return None


def tensor_spans(manifest: Manifest) -> dict[str, TensorSpan]:
    """Tensors of a model in shards, with offset 0: only the shards know the real ones."""
    shards = [*manifest.shards]
    return {
        one.name: TensorSpan(shards[one.shard], one.dtype, one.shape, 0, one.nbytes, one.name)
        for one in manifest.placed.values()
    }


def _hash_file(folder: Path, name: str) -> HashedEntry:
    path = folder / name
    size = path.stat().st_size
    with path.open("rb") as file:
        return HashedEntry(name, size, b"".join(hash_chunks(file, 0, size)))


def _copy_parts(source: Path, target: Path, parts: list[HashedEntry]) -> None:
    for part in parts:
        (target / part.name).parent.mkdir(exist_ok=True)
        (target / part.name).write_bytes((source / part.name).read_bytes())


def _modified_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
