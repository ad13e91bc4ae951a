"""Offering model files: which files may be read, and that altered ones are not passed on."""

import os
import sys
from pathlib import Path

import pytest

from molink.errors import BrokenModel, ModelNotFound, RequestError, Unavailable
from molinkd.peer.artifacts.hashing import Hasher, run_in_thread
from molinkd.peer.artifacts.model_repository import (
    ModelRepository,
    folder_name,
    make_change_watcher,
)
from molinkd.peer.artifacts.transfers import Progress
from tests.support.models import write_tensors

DATA = bytes(range(256)) * 64
links = pytest.mark.skipif(sys.platform == "win32", reason="links need a right on Windows")


def write(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    write_tensors(folder / "model.safetensors", {"a": DATA, "b": DATA[::-1]})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = write(tmp_path / "model")
    (model / "secret.txt").write_text("no", encoding="utf-8")
    write_tensors(tmp_path / "outside.safetensors", {"c": DATA})
    return model


def test_only_the_models_parts_are_offered(folder: Path) -> None:
    repository = ModelRepository()
    manifest = repository.add_model("m", folder).manifest
    assert (set(manifest.files), set(manifest.tensors)) == ({"config.json"}, {"a", "b"})
    assert repository.model_names == ("m",)
    assert repository.require_model(manifest.root) is repository.get_model("m")
    with pytest.raises(ModelNotFound):
        repository.require_model(f"{0:064}:1")


def test_reading_chunks(folder: Path) -> None:
    model_files = ModelRepository().add_model("m", folder)
    assert model_files.read_chunk("b", 0) == DATA[::-1]
    assert model_files.read_chunk("config.json", 0) == b"{}"


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "secret.txt", "/etc/passwd", "model.safetensors", "", "."]
)
def test_other_files_cannot_be_read(folder: Path, name: str) -> None:
    with pytest.raises(RequestError, match="no part"):
        ModelRepository().add_model("m", folder).read_chunk(name, 0)


def test_chunk_bounds(folder: Path) -> None:
    model_files = ModelRepository().add_model("m", folder)
    for index in (1, 2**31 - 1, -1):
        with pytest.raises(RequestError, match="1 chunks"):
            model_files.read_chunk("a", index)


@pytest.mark.parametrize("how", ["shorter", "altered", "gone"])
def test_changed_files_are_not_passed_on(folder: Path, how: str) -> None:
    model_files = ModelRepository().add_model("m", folder)
    file = folder / "model.safetensors"
    if how == "shorter":
        os.truncate(file, 100)
    elif how == "altered":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    else:
        file.unlink()
    with pytest.raises(BrokenModel, match=r"model\.safetensors(:| has changed since)"):
        model_files.read_chunk("b", 0)
    with pytest.raises(BrokenModel, match=r"model\.safetensors(:| has changed since)"):
        model_files.verify_files()


def test_a_changed_file_is_reported_once(folder: Path) -> None:
    repository, reported = ModelRepository(), list[str]()
    model_files = repository.add_model("m", folder)
    look = make_change_watcher(repository, reported.append)
    look()
    assert reported == []
    (folder / "config.json").write_text('{"x": 1}', encoding="utf-8")
    look()
    look()
    (text,) = reported
    assert "config.json has changed since molink read it. Restart molink" in text
    with pytest.raises(BrokenModel, match="has changed since"):
        model_files.verify_files()


def test_a_touched_file_is_unchanged(folder: Path) -> None:
    model_files = ModelRepository().add_model("m", folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert model_files.find_changed() == [folder / "model.safetensors"]
    model_files.verify_files()
    assert model_files.find_changed() == []


def test_versions_are_distinguished_by_content(folder: Path, tmp_path: Path) -> None:
    root = ModelRepository().add_model("m", folder).manifest.root
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    # The same tensors in differently named files are the same model.
    write_tensors(copy / "one.safetensors", {"b": DATA[::-1]})
    write_tensors(copy / "two.safetensors", {"a": DATA})
    assert ModelRepository().add_model("m", copy).manifest.root == root
    write_tensors(copy / "two.safetensors", {"a": DATA[:-1] + b"?"})
    assert ModelRepository().add_model("m", copy).manifest.root != root
    write_tensors(copy / "two.safetensors", {"a": DATA})
    (copy / "chat_template.jinja").write_text("{{ evil }}", encoding="utf-8")
    assert ModelRepository().add_model("m", copy).manifest.root != root


@links
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "more.safetensors"])
def test_a_link_out_of_the_folder_is_rejected(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "outside.safetensors")
    if name == "config.json":
        write_tensors(tmp_path / "outside.safetensors", {"c": DATA})
    with pytest.raises(BrokenModel, match=r"is a link to .*outside\.safetensors, outside of"):
        ModelRepository().add_model("m", folder)


@links
def test_links_to_the_hub_cache_s_blobs_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--o--n"
    snapshot = write(repository / "snapshots" / "abc")
    (repository / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(repository / "blobs" / "1234")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    assert ModelRepository().add_model("m", snapshot).read_chunk("a", 0) == DATA
    # Blobs of another repository belong to another model.
    other = tmp_path / "models--o--other" / "blobs"
    other.mkdir(parents=True)
    (repository / "blobs" / "1234").rename(other / "1234")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(other / "1234")
    with pytest.raises(BrokenModel, match="outside of the model's folder"):
        ModelRepository().add_model("m", snapshot)


@links
def test_links_inside_the_folder_are_followed(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "model.safetensors").rename(folder / "deep" / "x")
    (folder / "model.safetensors").symlink_to("deep/x")
    assert ModelRepository().add_model("m", folder).read_chunk("a", 0) == DATA


@links
def test_a_file_that_becomes_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    model_files = ModelRepository().add_model("m", folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(BrokenModel, match="has changed since"):
        model_files.read_chunk("a", 0)


@pytest.mark.parametrize("name", ["../../etc", "a/b\\c", "..", "C:evil", "x" * 300, "", "nul\0"])
def test_folder_names_are_plain(name: str) -> None:
    plain = folder_name(name, "0123456789abcdef" * 4)
    assert set(plain) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert not plain.startswith(".")
    assert len(plain) <= 81


async def test_hashing_can_be_cancelled(folder: Path) -> None:
    def act(stop: object) -> None:
        stop.set()  # type: ignore[attr-defined]
        ModelRepository(Hasher()).add_model("m", folder, Progress(), stop)  # type: ignore[arg-type]

    with pytest.raises(Unavailable, match="cancelled"):
        await run_in_thread(act)
