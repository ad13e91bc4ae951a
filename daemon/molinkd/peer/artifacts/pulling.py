"""Fetches all files of a model, or of some of its layers, to this PC."""

import threading
from pathlib import Path

from molink.checkpoint import hub
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_source import find_local_model, find_model, is_repository
from molink.errors import BrokenModel
from molinkd.peer.artifacts.transfers import Progress
from molinkd.peer.home import Home


def fetch_whole_model(
    model: str,
    home: Home,
    progress: Progress,
    stop: threading.Event,
    layers: tuple[int, int] | None = None,
) -> Path:
    """Fetch and open a model, or only the files with ``layers``; returns its folder. Blocks.

    Interrupted downloads resume. Files of the hub's cache that turn out damaged are fetched again.

    Raises:
        ModelError: no such model, or it is not accessible.
        Unavailable: the hub is unreachable.
    """
    from_hub = is_repository(model) and find_local_model(model) is None

    def fetch(*, compare: bool = False) -> Path:
        if from_hub and layers is not None:
            path = hub.pull_model(model, progress, stop, layers)
        else:
            into = home.unpacked
            path = find_model(model, progress, stop, unpack_into=into, compare=compare).path
        ModelFolder.open(path, layers)
        return path

    try:
        return fetch()
    except BrokenModel:
        if find_local_model(model) is not None or layers is not None:
            raise
        return fetch(compare=True)
