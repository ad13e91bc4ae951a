"""From the name of a model to its folder: bundled, local, or from the Hugging Face hub."""

import re
import threading
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from molink.checkpoint import hub
from molink.errors import ModelNotFound

#: The model that ships with molink, and the default.
DEMO_MODEL = "molink-demo"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model by its public name and the local folder that holds it (not yet checked).

    ``hub``: where the hub has it, as ``OWNER/NAME@COMMIT``; empty if it isn't from there.
    """

    name: str
    path: Path
    hub: str = ""


def demo_model() -> ModelSource:
    """The bundled model.

    Raises:
        ModelNotFound: this copy of molink came without it.
    """
    path = Path(str(files("molink"))) / "data" / "demo_model"
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"the bundled model is not in {path}; install molink again")
    return ModelSource(DEMO_MODEL, path)


class Uncounted:
    """Nobody wants to know how far a download is."""

    total = 0

    def add(self, nbytes: int) -> None:
        """So many more have come."""

    def keep(self, nbytes: int) -> None:
        """So many lie here already."""


def find_model(
    name_or_path: str | None = None,
    counter: hub.Counter | None = None,
    stop: threading.Event | None = None,
) -> ModelSource:
    """Resolve ``molink-demo`` (or ``None``), a folder, or a repository of the Hugging Face hub.

    A folder wins over a repository of the same name. A repository is taken from the hub's local
    cache if it is complete there, else downloaded (resumable; ``counter`` is told how far it is,
    and ``stop`` ends it).

    Raises:
        ModelError: nothing of that name, or it can't be had; says why.
        Unavailable: the hub can't be reached.
    """
    if name_or_path is None or name_or_path == DEMO_MODEL:
        return demo_model()
    folder = Path(name_or_path).expanduser()
    if name_or_path and folder.is_dir():
        resolved = folder.resolve()
        return ModelSource(resolved.name or str(resolved), resolved)
    if not is_repository(name_or_path):
        raise ModelNotFound(
            f"no model {name_or_path!r}: it is no folder, not {DEMO_MODEL!r}, "
            "and no repository of the Hugging Face hub (OWNER/NAME)"
        )
    path = hub.cached(name_or_path)
    if path is None:
        path = hub.pull(name_or_path, counter or Uncounted(), stop or threading.Event())
    commit = path.name if _COMMIT.fullmatch(path.name) else ""
    place = f"{name_or_path}@{commit}" if commit else ""
    return ModelSource(short_name(name_or_path), path, place)


def is_repository(name: str) -> bool:
    """Whether it may be the name of a model on the hub: ``OWNER/NAME``."""
    return _REPOSITORY.fullmatch(name) is not None


def short_name(repository: str) -> str:
    """What a model of the hub is called here."""
    return repository.rpartition("/")[2]
