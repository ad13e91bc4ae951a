"""Which models are on this PC, and which of them may be deleted."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from molink.checkpoint import hub
from molink.checkpoint.source import DEMO_MODEL, demo_model
from molink.errors import ModelNotFound, UsageError
from molink.swarm.artifacts.supply import Supply
from molinkd.peer.artifacts.hashing import Hasher
from molinkd.peer.artifacts.library import Library
from molinkd.peer.artifacts.models_here import ModelHere, choose, delete, models_here
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.artifacts.store import Store
from molinkd.peer.home import Home
from tests.support.fake_hub import REPOSITORY, FakeHub, in_place
from tests.support.models import write_plain_model
from tests.support.sources import LibrarySource, connect_to


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub, "PAUSES_S", (0.0,))
    with in_place(write_plain_model(tmp_path / "model"), tmp_path / "cache", monkeypatch) as made:
        yield made


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").create()


def by_place(home: Home) -> dict[str, ModelHere]:
    return {one.where: one for one in models_here(home)}


def test_the_bundled_model_is_no_folder_of_a_user(home: Home) -> None:
    Library(Hasher(home.hashes)).add(DEMO_MODEL, demo_model().path)  # it was served from here
    assert [(one.name, one.where) for one in models_here(home)] == [(DEMO_MODEL, "bundled")]


async def test_all_places(served: FakeHub, home: Home, tmp_path: Path) -> None:
    assert [(one.name, one.where) for one in models_here(home)] == [(DEMO_MODEL, "bundled")]
    own = write_plain_model(tmp_path / "own")
    library = Library(Hasher(home.hashes))
    root = library.add("own", own).manifest.root
    sources = connect_to({"a": LibrarySource(library)}, [])
    store = Store(home.models, "me", Library(), sources, Library(), lambda *_: None)
    part = await store.stage("own", root, (0, 1), Supply(("a",)))
    hub.pull(REPOSITORY, Progress(), threading.Event())

    found = by_place(home)
    assert {where: one.name for where, one in found.items()} == {
        "swarm": "own",
        "cache": REPOSITORY,
        "folder": "own",
        "bundled": DEMO_MODEL,
    }
    assert {where: one.whole for where, one in found.items()} == {
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

    # What came from others goes; a folder of a user's own stays.
    (chosen,) = choose(home, models_here(home), "own", hf_cache=True)
    assert chosen == found["swarm"]
    assert delete(chosen) == chosen.size
    assert not part.exists()
    with pytest.raises(UsageError, match="a folder of yours: delete it yourself"):
        choose(home, models_here(home), "own", hf_cache=True)
    with pytest.raises(UsageError, match="--hf-cache"):
        choose(home, models_here(home), REPOSITORY, hf_cache=False)
    with pytest.raises(UsageError, match="came with molink"):
        choose(home, models_here(home), DEMO_MODEL, hf_cache=True)
    with pytest.raises(ModelNotFound, match="`molink list --home"):
        choose(home, models_here(home), "other", hf_cache=True)
    for one in choose(home, models_here(home), "some-model", hf_cache=True):
        delete(one)
    assert "cache" not in by_place(home)


def test_half_a_download_is_shown_and_can_be_deleted(served: FakeHub, home: Home) -> None:
    served.cuts = [1000, 0, 0]
    with pytest.raises(Exception, match="broke off"):
        hub.pull(REPOSITORY, Progress(), threading.Event())
    half = by_place(home)["cache"]
    assert (half.name, half.whole) == (REPOSITORY, False)
    assert half.size >= 1000
    delete(half)
    assert "cache" not in by_place(home)


def test_a_gguf_file_of_the_hub(served: FakeHub, home: Home) -> None:
    for name in ("a.gguf", "b.gguf"):
        (served.folder / name).write_bytes(b"GGUF" + bytes(5000))
    hub.pull_file(REPOSITORY, ("a.gguf",), Progress(), threading.Event())
    found = by_place(home)["cache"]
    assert (found.name, found.whole) == (REPOSITORY, True)
    for one in choose(home, models_here(home), REPOSITORY, hf_cache=True):
        delete(one)
    assert "cache" not in by_place(home)


def test_what_cannot_be_read_is_left_out(home: Home) -> None:
    (home.models / "odd-0123").mkdir()
    (home.models / "odd-0123" / "manifest.molink").write_bytes(b"nonsense")
    assert set(by_place(home)) == {"bundled"}


def test_what_was_made_of_a_gguf_file_is_molinks_to_delete(home: Home) -> None:
    made = home.unpacked / f"some-model.Q4_K_M-{'0' * 16}"
    made.mkdir(parents=True)
    (made / "model.safetensors").write_bytes(bytes(100))
    (home.unpacked / ".half.part").mkdir()
    found = by_place(home)["unpacked"]
    assert (found.name, found.size) == ("some-model.Q4_K_M", 100)
    chosen = choose(home, models_here(home), "some-model.Q4_K_M", hf_cache=False)
    assert [delete(one) for one in chosen] == [100]
    assert not made.exists()
