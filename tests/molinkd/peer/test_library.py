"""Serving model files: what may be read, and how copies are told apart."""

import os
from pathlib import Path

import pytest

from molink.errors import BrokenModel, ModelNotFound, RequestError
from molink.wire.messages.codec import control_codec
from molink.wire.messages.transfer import FileEntry
from molinkd.peer.library import Library, folder_name, hold, listing_identity
from molinkd.peer.service import FILES_PER_MESSAGE, file_lists


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    (model / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    (model / "secret.txt").write_text("no", encoding="utf-8")
    (model / ".hidden.safetensors").write_bytes(b"no")
    (tmp_path / "outside.safetensors").write_bytes(b"no")
    return model


def test_only_model_files_are_listed(folder: Path) -> None:
    library = Library()
    library.add("m", folder)
    assert [entry.name for entry in library.files("m")] == ["config.json", "model.safetensors"]
    assert library.names == ("m",)


def test_reading(folder: Path) -> None:
    library = Library()
    library.add("m", folder)
    assert library.read("m", "model.safetensors", 255, 3) == bytes([255, 0, 1])


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "secret.txt", "/etc/passwd", ".hidden.safetensors", "", "."]
)
def test_nothing_else_can_be_read(folder: Path, name: str) -> None:
    library = Library()
    library.add("m", folder)
    with pytest.raises(RequestError, match="no file"):
        library.read("m", name, 0, 1)


def test_bounds(folder: Path) -> None:
    library = Library()
    library.add("m", folder)
    with pytest.raises(RequestError, match="bytes"):
        library.read("m", "config.json", 1, 2)
    with pytest.raises(ModelNotFound):
        library.read("other", "config.json", 0, 1)
    with pytest.raises(ModelNotFound):
        library.files("other")


def test_a_file_that_shrinks_is_noticed(folder: Path) -> None:
    library = Library()
    library.add("m", folder)
    os.truncate(folder / "model.safetensors", 10)
    with pytest.raises(BrokenModel, match="shorter"):
        library.read("m", "model.safetensors", 0, 100)


def test_copies_are_told_apart_by_content(folder: Path, tmp_path: Path) -> None:
    before = hold(folder).identity
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((folder / name).read_bytes())
    assert hold(copy).identity == before
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[5000] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert hold(copy).identity != before


@pytest.mark.parametrize("name", ["../../etc", "a/b\\c", "..", "C:evil", "x" * 300, "", "nul\0"])
def test_folder_names_are_plain(name: str) -> None:
    plain = folder_name(name, "0123456789abcdef")
    assert set(plain) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert not plain.startswith(".")
    assert len(plain) <= 81


def test_long_listings_are_split_and_fit_the_wire() -> None:
    codec = control_codec()
    files = [FileEntry(name=f"{n:03d}{'x' * 125}", size=2**50, digest="f" * 32) for n in range(30)]
    parts = list(file_lists(7, files))
    assert [len(part.files) for part in parts] == [FILES_PER_MESSAGE, FILES_PER_MESSAGE, 6]
    assert [part.more for part in parts] == [True, True, False]
    for part in parts:
        codec.encode(part)
    assert [part.more for part in file_lists(7, [])] == [False]
    assert listing_identity(files) == listing_identity(files[::-1])
