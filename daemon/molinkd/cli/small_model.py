"""Provides the small model of ``molink demo --model smollm2``."""

import threading

from rich.console import Console

from molink.errors import MolinkError, Unavailable
from molink.plaintext import printable
from molinkd.cli.model_verbs import run_with_progress
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.artifacts.smollm2 import NAME, ModelOrigin, create_origins


def fetch_small_model() -> str:
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
        f"can't download {NAME} ({'; '.join(reasons)}). `molink demo` without --model uses "
        "the bundled model; --model also accepts a folder or a GGUF file"
    )


def _fetch_from(source: ModelOrigin) -> str:
    stop, progress = threading.Event(), Progress()
    text = (
        f"SmolLM2-135M-Instruct (Apache-2.0): "
        f"{source.download_bytes() / 1e6:.0f} MB from {source.name}"
    )
    Console(stderr=True, highlight=False, soft_wrap=True).print(printable(text), markup=False)
    return run_with_progress(lambda: source.fetch_model(progress, stop), NAME, progress, stop)
