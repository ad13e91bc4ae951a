"""Models from the hub: complete, resumed, and refused ones."""

import hashlib
import json
import re
import shutil
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from molink.checkpoint import hub
from molink.checkpoint import model_source as source
from molink.checkpoint.disk_space import DISK_RESERVE_BYTES
from molink.checkpoint.model_folder import ModelFolder, scan_tensors
from molink.checkpoint.model_source import find_model
from molink.errors import BrokenModel, GatedModel, ModelError, ModelNotFound, Unavailable
from tests.support.fake_hub import COMMIT, REPOSITORY, FakeHub, in_place
from tests.support.locked_files import lock_once
from tests.support.models import write_plain_model

links = pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege on Windows")


class Count:
    def __init__(self) -> None:
        self.total = self.added = self.kept = 0

    def add_bytes(self, nbytes: int) -> None:
        self.added += nbytes

    def add_existing(self, nbytes: int) -> None:
        self.kept += nbytes


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub, "RETRY_DELAYS_S", (0.0, 0.0))
    with in_place(write_plain_model(tmp_path / "model"), tmp_path / "cache", monkeypatch) as made:
        yield made


def pull(layers: tuple[int, int] | None = None) -> tuple[Path, Count]:
    count = Count()
    return hub.pull_model(REPOSITORY, count, threading.Event(), layers), count


def weights(served: FakeHub) -> list[Path]:
    return [path for path in served.files() if path.suffix == ".safetensors"]


def test_a_model_is_pulled_into_the_cache_and_found_there(served: FakeHub) -> None:
    assert hub.find_cached(REPOSITORY) is None
    folder, count = pull()
    assert folder.name == COMMIT
    ModelFolder.open(folder)
    assert count.total == count.added == sum(path.stat().st_size for path in weights(served))
    for path in weights(served):
        assert (folder / path.name).read_bytes() == path.read_bytes()
    served.status = 503  # the hub is not needed from now on
    found = find_model(REPOSITORY, unpack_into=served.folder)
    assert (found.name, found.path) == ("some-model", folder)


def test_a_gguf_file_of_a_repository(
    served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"GGUF" + bytes(5000)
    (served.folder / "some-model.Q4_K_M.gguf").write_bytes(data)
    name, count = f"{REPOSITORY}/some-model.Q4_K_M.gguf", Count()
    served.cuts = [1000]
    # Replaces the import, which has its own tests.
    monkeypatch.setattr(source, "import_gguf", lambda file, *_: file)
    found = find_model(name, count, unpack_into=tmp_path)
    assert found.name == "some-model.Q4_K_M"
    assert found.path.read_bytes() == data
    assert (count.total, count.added + count.kept) == (len(data), len(data))
    assert {file for file, _ in served.asked} == {"some-model.Q4_K_M.gguf"}
    served.status = 503  # the hub is not needed from now on
    assert find_model(name, unpack_into=tmp_path).path == found.path


def test_a_repository_with_one_gguf_file(
    served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in weights(served):
        path.unlink()
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf"):
        (served.folder / name).write_bytes(b"GGUF")
    monkeypatch.setattr(source, "import_gguf", lambda file, *_: file)
    found = find_model(REPOSITORY, Count(), unpack_into=tmp_path)
    assert (found.name, found.path.name) == ("m", "m-00001-of-00002.gguf")
    served.status = 503  # the cache is enough
    assert find_model(REPOSITORY, unpack_into=tmp_path).path == found.path


def test_a_vision_tower_comes_with_its_model(
    served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("m-Q4_0.gguf", "n-Q4_0.gguf", "mmproj-m-F16.gguf", "mmproj-m-BF16.gguf")
    for name in names:
        (served.folder / name).write_bytes(b"GGUF" + name.encode())
    monkeypatch.setattr(source, "import_gguf", lambda file, *_: file)
    found = find_model(f"{REPOSITORY}/{names[0]}", Count(), unpack_into=tmp_path)
    assert found.path.name == names[0]
    asked = {file for file, _ in served.asked if file.endswith(".gguf")}
    assert asked == {names[0], "mmproj-m-BF16.gguf"}
    assert found.path.with_name("mmproj-m-BF16.gguf").read_bytes() == b"GGUFmmproj-m-BF16.gguf"


def test_all_parts_of_a_model_are_fetched(
    served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"big-{index:05}-of-00003.gguf" for index in (1, 2, 3)]
    for index, name in enumerate(names):
        (served.folder / name).write_bytes(b"GGUF" + bytes(100 + index))
    monkeypatch.setattr(source, "import_gguf", lambda file, *_: file)
    found = find_model(f"{REPOSITORY}/{names[1]}", Count(), unpack_into=tmp_path)
    assert (found.name, found.path.name) == ("big", names[0])
    assert [found.path.with_name(name).stat().st_size for name in names] == [104, 105, 106]
    served.status = 503
    assert find_model(f"{REPOSITORY}/{names[2]}", unpack_into=tmp_path).path == found.path


def test_a_part_that_the_hub_lacks(served: FakeHub, tmp_path: Path) -> None:
    (served.folder / "big-00001-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(BrokenModel, match=r"on the hub has no big-00002-of-00002\.gguf"):
        find_model(f"{REPOSITORY}/big-00001-of-00002.gguf", unpack_into=tmp_path)


def test_a_repository_of_gguf_files_alone_has_them_named(served: FakeHub, tmp_path: Path) -> None:
    for path in weights(served):
        path.rename(path.with_suffix(".gguf"))
    for asked in (REPOSITORY, f"{REPOSITORY}/other.gguf"):
        with pytest.raises(BrokenModel, match=f"Name one of its GGUF files: {REPOSITORY}/model-0"):
            find_model(asked, unpack_into=tmp_path)


def test_partial_downloads_survive_a_cut_connection(served: FakeHub) -> None:
    first = weights(served)[0]
    size = first.stat().st_size
    served.cuts = [size // 2, 0]
    folder, count = pull()
    assert (folder / first.name).read_bytes() == first.read_bytes()
    asked = [asked for name, asked in served.asked if name == first.name]
    assert asked == ["bytes=0-", f"bytes={size // 2}-", f"bytes={size // 2}-"]
    assert count.added == count.total


def test_an_interrupted_download_resumes(served: FakeHub) -> None:
    first = weights(served)[0]
    size = first.stat().st_size
    served.cuts = [size // 2, 0, 0, 0]
    with pytest.raises(Unavailable, match=r"broke off at .* MB of .*safetensors.*kept"):
        pull()
    served.asked.clear()
    _, count = pull()
    assert served.asked[0] == (first.name, f"bytes={size // 2}-")
    assert (count.kept, count.kept + count.added) == (size // 2, count.total)


def test_a_truncated_file_in_the_cache(served: FakeHub) -> None:
    folder, _ = pull()
    first, second = (folder / path.name for path in weights(served)[:2])
    whole = first.read_bytes()
    # The existing bytes count, and the download continues after them.
    first.resolve().write_bytes(whole[:-7])
    second.resolve().write_bytes(second.read_bytes() + b"more")
    _, count = pull()
    assert count.added == 7 + weights(served)[1].stat().st_size
    assert first.read_bytes() == whole
    ModelFolder.open(folder)


def test_a_hub_without_range_requests(served: FakeHub) -> None:
    served.ranges = False
    served.cuts = [100]
    folder, count = pull()
    ModelFolder.open(folder)
    assert count.added + count.kept == count.total


def test_other_bytes_than_the_hub_says(served: FakeHub) -> None:
    served.altered = True
    with pytest.raises(BrokenModel, match=r"not what the hub says it is.*pull it again"):
        pull()
    served.altered = False
    ModelFolder.open(pull()[0])


def test_other_bytes_are_deleted_once_no_scanner_reads_them(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.altered = True
    seized = lock_once(monkeypatch, "unlink", hub.PARTIAL_SUFFIX)
    with pytest.raises(BrokenModel, match="It was deleted"):
        pull()
    assert [path.exists() for path in seized] == [False]


def test_only_the_shards_of_a_stage(served: FakeHub) -> None:
    shards = {name: span.file for name, span in scan_tensors(served.folder).items()}
    index = json.dumps({"weight_map": shards})
    (served.folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    folder, _ = pull((0, 1))
    here = {path.name for path in folder.glob("*.safetensors")}
    assert 0 < len(here) < len(weights(served))
    ModelFolder.open(folder, (0, 1))
    assert hub.find_cached(REPOSITORY) is None
    with pytest.raises(ModelError, match=r"has layers 1-\d+; 4-99 is out of range"):
        pull((3, 99))
    ModelFolder.open(find_model(REPOSITORY, unpack_into=served.folder).path)


def test_errors_say_what_to_do(served: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match=r"no model 'owner/other' at http.*HF_TOKEN") as none:
        hub.pull_model("owner/other", Count(), threading.Event())
    assert none.value.exit_code == 5
    served.gated = True
    with pytest.raises(GatedModel, match=r"is gated.*request access at http.*HF_TOKEN") as gate:
        pull()
    assert gate.value.exit_code == 12


@pytest.mark.parametrize("status", [500, 503])
def test_a_failing_hub(served: FakeHub, status: int) -> None:
    served.status = status
    with pytest.raises(Unavailable, match=r"can't reach owner/some-model.*Try again"):
        pull()


def test_a_hub_that_cannot_be_found_is_given_up_soon(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network the system's resolver may block for a long time."""
    ended = threading.Event()

    def hang() -> SimpleNamespace:
        assert ended.wait(60)
        return SimpleNamespace(head=lambda *_, **__: None)

    monkeypatch.setattr("huggingface_hub.get_session", hang)
    monkeypatch.setattr("molink.checkpoint.hub._CONNECT_TIMEOUT_S", 0.05)
    with pytest.raises(Unavailable, match=r"no answer within 0.05 s. Is this PC online"):
        pull()
    ended.set()


def test_an_unreachable_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_place(write_plain_model(tmp_path / "model"), tmp_path / "cache", monkeypatch):
        pass
    with pytest.raises(Unavailable, match=r"can.t reach the hub at http.*online") as down:
        pull()
    assert down.value.exit_code == 6


def test_a_full_disk_is_reported_before_writing(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, DISK_RESERVE_BYTES))
    with pytest.raises(ModelError, match=r"needs .* GB more on the disk of .*0\.3 GB .*HF_HOME"):
        pull()
    assert served.asked == []


def test_it_can_be_ended(served: FakeHub) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Unavailable, match="was stopped; partial downloads are kept"):
        hub.pull_model(REPOSITORY, Count(), stop)


def blobs(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models--owner--some-model" / "blobs"


def blob_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@links
@pytest.mark.parametrize("nbytes", [10, 10**6])
@pytest.mark.parametrize("suffix", ["", hub.PARTIAL_SUFFIX])
def test_links_out_of_the_cache_are_not_followed(
    served: FakeHub, tmp_path: Path, suffix: str, nbytes: int
) -> None:
    """A link in place of a blob or a partial download, with a shorter or a longer target."""
    folder, _ = pull()
    target, first = tmp_path / "target", weights(served)[0]
    target.write_bytes(bytes(nbytes))
    blob = blobs(tmp_path) / blob_of(first)
    blob.unlink()
    blob.with_suffix(suffix).symlink_to(target)
    assert pull()[0] == folder
    assert target.read_bytes() == bytes(nbytes)
    assert (folder / first.name).read_bytes() == first.read_bytes()
    assert not any(path.is_symlink() for path in blobs(tmp_path).iterdir())


@links
@pytest.mark.parametrize("name", ["blobs", "snapshots", "refs"])
def test_a_folder_that_links_out_of_the_cache(served: FakeHub, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    inside = blobs(tmp_path).with_name(name)
    inside.parent.mkdir(parents=True)
    inside.symlink_to(outside)
    with pytest.raises(ModelError, match=r"can't write owner/some-model .* is outside of"):
        pull()
    assert list(outside.iterdir()) == []


def test_small_files_are_checked_too(served: FakeHub) -> None:
    served.lies["config.json"] = {"blobId": "a" * 40}
    with pytest.raises(BrokenModel, match=r"config\.json of .* is not what the hub says it is"):
        pull()
    served.lies.clear()
    (served.folder / "empty.json").write_bytes(b"")
    assert (pull()[0] / "empty.json").read_bytes() == b""


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"blobId": None}, "gives the hash of config.json as 'None'"),
        ({"size": None}, "gives the size of config.json as 'None'"),
        ({"size": -1}, "gives the size of config.json as '-1'"),
        ({"lfs": {"sha256": "A" * 64, "size": 1, "pointerSize": 1}}, "hash of config.json as 'AA"),
        ({"rfilename": "\x1b]0;x/config.json"}, r"has a file '\x1b]0;x/config.json', a name that"),
    ],
)
def test_a_list_that_no_hub_gives(served: FakeHub, lie: dict[str, object], message: str) -> None:
    served.lies["config.json"] = lie
    with pytest.raises(BrokenModel, match=re.escape(f"{REPOSITORY} on the hub")) as broken:
        pull()
    assert message in str(broken.value)


def test_hostile_names_of_gguf_files(served: FakeHub, tmp_path: Path) -> None:
    for path in weights(served):
        path.unlink()
    (served.folder / "m.gguf").write_bytes(b"GGUF")
    served.lies["m.gguf"] = {"rfilename": "../../m.gguf"}
    with pytest.raises(BrokenModel, match=r"has a file '\.\./\.\./m\.gguf', .* leads out"):
        find_model(REPOSITORY, unpack_into=tmp_path)
    with pytest.raises(ModelNotFound):
        find_model(f"{REPOSITORY}/../m.gguf", unpack_into=tmp_path)
    with pytest.raises(BrokenModel, match=r"on the hub has no x\.gguf$"):
        find_model(f"{REPOSITORY}/x.gguf", unpack_into=tmp_path)
