"""Importing molink runs no garbage collection, and imported objects are never collected later."""

import gc
from collections.abc import Iterator

import pytest

from molinkd.imports import permanent_imports


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


def test_imports_run_no_collection_and_freeze_their_objects() -> None:
    before, kept = gc.get_freeze_count(), [[number] for number in range(1000)]
    with permanent_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)


def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    with permanent_imports():
        pass
    assert not gc.isenabled()


def test_an_import_that_fails() -> None:
    with pytest.raises(ImportError), permanent_imports():
        raise ImportError
    assert gc.isenabled()
