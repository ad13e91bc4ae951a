"""Speeds up imports at startup, a fifth of whose time is garbage collection."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def permanent_imports() -> Iterator[None]:
    """Import without garbage collection, and exempt the imported objects from it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
