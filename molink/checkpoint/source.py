"""From the name of a model to its folder: bundled, local, or from the Hugging Face hub."""

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from molink.checkpoint.folder import weight_map
from molink.errors import ModelNotFound

#: The model that ships with molink, and the default.
DEMO_MODEL = "molink-demo"
#: What is fetched from the hub: weights and metadata, no pickles.
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
#: The same weights again, in the layout of the model's authors.
HUB_DUPLICATES = ("original/*", "consolidated*", "*/*.safetensors")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model by its public name and the local folder that holds it (not yet checked)."""

    name: str
    path: Path


def demo_model() -> ModelSource:
    """The bundled model.

    Raises:
        ModelNotFound: this copy of molink came without it.
    """
    path = Path(str(files("molink"))) / "data" / "demo_model"
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"the bundled model is not in {path}; install molink again")
    return ModelSource(DEMO_MODEL, path)


def find_model(name_or_path: str | None = None) -> ModelSource:
    """Resolve ``molink-demo`` (or ``None``), a folder, or a repository of the Hugging Face hub.

    A folder wins over a repository of the same name. A repository is taken from the hub's local
    cache if it is complete there, else downloaded (resumable, with a progress bar).

    Raises:
        ModelNotFound: nothing of that name; says what was tried.
    """
    if name_or_path is None or name_or_path == DEMO_MODEL:
        return demo_model()
    folder = Path(name_or_path).expanduser()
    if name_or_path and folder.is_dir():
        resolved = folder.resolve()
        return ModelSource(resolved.name or str(resolved), resolved)
    if not _REPOSITORY.fullmatch(name_or_path):
        raise ModelNotFound(
            f"no model {name_or_path!r}: it is no folder, not {DEMO_MODEL!r}, "
            "and no repository of the Hugging Face hub (OWNER/NAME)"
        )
    return ModelSource(name_or_path.rpartition("/")[2], _from_hub(name_or_path))


def _from_hub(repository: str) -> Path:
    # Imported late: it takes half a second, and most commands never need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted, unwanted = list(HUB_PATTERNS), list(HUB_DUPLICATES)
    try:
        cached = snapshot_download(
            repository,
            allow_patterns=wanted,
            ignore_patterns=unwanted,
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        cached = None
    if cached is not None and _has_weights(Path(cached)):
        return Path(cached)
    try:
        return Path(snapshot_download(repository, allow_patterns=wanted, ignore_patterns=unwanted))
    except Exception as error:
        raise ModelNotFound(
            f"no model {repository!r}: there is no such folder, it is not in the Hugging Face "
            f"cache, and the hub gave none: {_first_line(error)}"
        ) from error


def _has_weights(folder: Path) -> bool:
    """Whether all shards are there; the hub's cache may hold a part of a repository."""
    present = {file.name for file in folder.glob("*.safetensors")}
    return bool(present) and present >= set(weight_map(folder).values())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
