"""Which models are on this PC, and which of them can be deleted."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from molink.checkpoint import hub
from molink.checkpoint.model_names import DEMO_MODEL_NAME
from molink.checkpoint.model_source import find_demo_model
from molink.errors import ModelNotFound, UsageError
from molink.swarm.artifacts.sources import ModelSources
from molinkd.peer.artifacts import installed_models
from molinkd.peer.artifacts.hashing import Hasher
from molinkd.peer.artifacts.installed_models import (
    InstalledModel,
    choose_deletable,
    delete_model,
    list_installed_models,
)
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.artifacts.model_store import ModelStore
from molinkd.peer.artifacts.transfers import Progress
from molinkd.peer.home import Home
from tests.support.fake_hub import REPOSITORY, FakeHub, in_place
from tests.support.fake_sources import RepositorySource, connect_to
from tests.support.models import write_plain_model


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub, "RETRY_DELAYS_S", (0.0,))
    with in_place(write_plain_model(tmp_path / "model"), tmp_path / "cache", monkeypatch) as made:
        yield made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(installed_models, "downloads_folder", lambda: tmp_path / "downloads")
    return Home(tmp_path / "home").create_folders()


def by_place(home: Home) -> dict[str, InstalledModel]:
    return {one.location: one for one in list_installed_models(home)}


def test_the_bundled_model_is_not_a_user_folder(home: Home) -> None:
    ModelRepository(Hasher(home.hashes)).add_model(
        DEMO_MODEL_NAME, find_demo_model().path
    )  # as on a PC that served it
    assert [(one.name, one.location) for one in list_installed_models(home)] == [
        (DEMO_MODEL_NAME, "bundled")
    ]


async def test_all_locations(served: FakeHub, home: Home, tmp_path: Path) -> None:
    assert [(one.name, one.location) for one in list_installed_models(home)] == [
        (DEMO_MODEL_NAME, "bundled")
    ]
    own = write_plain_model(tmp_path / "own")
    repository = ModelRepository(Hasher(home.hashes))
    root = repository.add_model("own", own).manifest.root
    sources = connect_to({"a": RepositorySource(repository)}, [])
    store = ModelStore(
        home.models, "me", ModelRepository(), sources, ModelRepository(), lambda *_: None
    )
    part = await store.fetch_stage("own", root, (0, 1), ModelSources(("a",)))
    hub.pull_model(REPOSITORY, Progress(), threading.Event())

    found = by_place(home)
    assert {where: one.name for where, one in found.items()} == {
        "swarm": "own",
        "cache": REPOSITORY,
        "folder": "own",
        "bundled": DEMO_MODEL_NAME,
    }
    assert {where: one.is_complete for where, one in found.items()} == {
        "swarm": False,
        "cache": True,
        "folder": True,
        "bundled": True,
    }
    assert found["folder"].path == own
    assert found["swarm"].path == part
    assert 0 < found["swarm"].size < found["swarm"].total
    weights = sum(path.stat().st_size for path in own.glob("*.safetensors"))
    assert weights < found["cache"].size < 1.2 * weights

    # What was fetched from peers is deleted; a user's own folder stays.
    (chosen,) = choose_deletable(home, list_installed_models(home), "own", hf_cache=True)
    assert chosen == found["swarm"]
    assert delete_model(chosen) == chosen.size
    assert not part.exists()
    with pytest.raises(UsageError, match="is your own folder; delete it yourself"):
        choose_deletable(home, list_installed_models(home), "own", hf_cache=True)
    with pytest.raises(UsageError, match="--hf-cache"):
        choose_deletable(home, list_installed_models(home), REPOSITORY, hf_cache=False)
    with pytest.raises(UsageError, match="is bundled"):
        choose_deletable(home, list_installed_models(home), DEMO_MODEL_NAME, hf_cache=True)
    with pytest.raises(ModelNotFound, match="`molink list --home"):
        choose_deletable(home, list_installed_models(home), "other", hf_cache=True)
    for one in choose_deletable(home, list_installed_models(home), "some-model", hf_cache=True):
        delete_model(one)
    assert "cache" not in by_place(home)


def test_a_partial_download_is_listed_and_deletable(served: FakeHub, home: Home) -> None:
    served.cuts = [1000, 0, 0]
    with pytest.raises(Exception, match="broke off"):
        hub.pull_model(REPOSITORY, Progress(), threading.Event())
    half = by_place(home)["cache"]
    assert (half.name, half.is_complete) == (REPOSITORY, False)
    assert half.size >= 1000
    delete_model(half)
    assert "cache" not in by_place(home)


def test_a_cached_gguf_file(served: FakeHub, home: Home) -> None:
    for name in ("a.gguf", "b.gguf"):
        (served.folder / name).write_bytes(b"GGUF" + bytes(5000))
    hub.pull_file(REPOSITORY, ("a.gguf",), Progress(), threading.Event())
    found = by_place(home)["cache"]
    assert (found.name, found.is_complete) == (REPOSITORY, True)
    for one in choose_deletable(home, list_installed_models(home), REPOSITORY, hf_cache=True):
        delete_model(one)
    assert "cache" not in by_place(home)


def test_unreadable_models_are_skipped(home: Home) -> None:
    (home.models / "odd-0123").mkdir()
    (home.models / "odd-0123" / "manifest.molink").write_bytes(b"nonsense")
    assert set(by_place(home)) == {"bundled"}


def test_an_unpacked_gguf_model_is_deletable(home: Home) -> None:
    made = home.unpacked / f"some-model.Q4_K_M-{'0' * 16}"
    made.mkdir(parents=True)
    (made / "model.safetensors").write_bytes(bytes(100))
    (home.unpacked / ".half.part").mkdir()
    found = by_place(home)["unpacked"]
    assert (found.name, found.size) == ("some-model.Q4_K_M", 100)
    chosen = choose_deletable(
        home, list_installed_models(home), "some-model.Q4_K_M", hf_cache=False
    )
    assert [delete_model(one) for one in chosen] == [100]
    assert not made.exists()
