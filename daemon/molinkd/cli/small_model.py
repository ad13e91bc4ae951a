"""The short name of a small real model, which is fetched when it is first used."""

import threading

from rich.console import Console

from molink.checkpoint.model_names import DEMO_MODEL_NAME, SMALL_MODEL_NAME
from molink.checkpoint.model_source import check_model_name, expand_short_name, find_local_model
from molink.errors import MolinkError, Unavailable
from molink.plaintext import printable
from molinkd.cli.transfer_progress import run_with_progress
from molinkd.peer.artifacts.smollm2 import ModelOrigin, create_origins
from molinkd.peer.artifacts.transfers import Progress

#: The same model by its name in the catalog.
_SMALL_NAMES = (SMALL_MODEL_NAME, f"{SMALL_MODEL_NAME}:135m")


def resolve_model_name(model: str) -> str:
    """Return the hub name of a short name, or the path or repository of ``smollm2``, which is
    fetched if it is not here; other names as they are.

    Raises:
        ModelNotFound: no model has such a name.
        Unavailable: it can't be downloaded.
    """
    if model in _SMALL_NAMES and find_local_model(model) is None:
        return _fetch_small_model()
    check_model_name(model)
    return expand_short_name(model)


def _fetch_small_model() -> str:
    """Return the model's path; downloads it if needed, showing size and progress.

    Raises:
        Unavailable: it can't be downloaded.
    """
    asked = create_origins()
    for source in asked:
        found = source.find_local()
        if found is not None:
            return found
    reasons: list[str] = []
    for source in asked:
        try:
            return _fetch_from(source)
        except MolinkError as error:
            reasons.append(f"{source.name}: {error}")
    raise Unavailable(
        f"can't download {SMALL_MODEL_NAME} ({'; '.join(reasons)}). {DEMO_MODEL_NAME} is part of "
        "molink; a folder or a GGUF file of this PC works too"
    )


def _fetch_from(source: ModelOrigin) -> str:
    stop, progress = threading.Event(), Progress()
    text = (
        f"SmolLM2-135M-Instruct (Apache-2.0): "
        f"{source.download_bytes() / 1e6:.0f} MB from {source.name}"
    )
    Console(stderr=True, highlight=False, soft_wrap=True).print(printable(text), markup=False)
    return run_with_progress(
        lambda: source.fetch_model(progress, stop), SMALL_MODEL_NAME, progress, stop
    )
