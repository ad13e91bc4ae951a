"""A model in several GGUF files: any of them opens the model, and a wrong one is refused."""

import hashlib
import shutil
import threading
from pathlib import Path

import pytest

from molink.checkpoint.gguf_import import import_gguf, read_gguf_model
from molink.checkpoint.hub import NullCounter
from molink.checkpoint.model_source import find_model
from molink.errors import BrokenModel, ModelError
from molink.gguf.gguf_file import model_name, read_split_gguf, split_names
from tests.support.gguf_models import Kind, write_gguf
from tests.support.models import MakeModel

#: Tensors per file, which splits 21 of them into three files.
PART = 8


@pytest.fixture(scope="module")
def folder(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", 1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of three parts."""
    path = tmp_path_factory.mktemp("parts") / "tiny.Q8_0.gguf"
    return write_gguf(folder, path, Kind.Q8_0, part=PART)


@pytest.fixture
def parts(written: Path, tmp_path: Path) -> list[Path]:
    """A copy of all three files."""
    shutil.copytree(written.parent, tmp_path / "parts")
    found = sorted((tmp_path / "parts").glob("*.gguf"))
    assert [path.name for path in found] == [*split_names(written.name)]
    assert len(found) == 3
    return found


def unpack(path: Path, into: Path) -> Path:
    return import_gguf(path, into, NullCounter(), threading.Event())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_any_part_is_the_model(folder: Path, parts: list[Path], tmp_path: Path) -> None:
    whole = unpack(write_gguf(folder, tmp_path / "tiny.gguf", Kind.Q8_0), tmp_path / "whole")
    made = {unpack(part, tmp_path / "into") for part in parts}
    assert len(made) == 1
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert digest(made.copy().pop() / file) == digest(whole / file)
    assert read_gguf_model(parts[2]) == read_gguf_model(parts[0])


def test_found_by_name(parts: list[Path], tmp_path: Path) -> None:
    for name in (parts[1], parts[0].parent):
        found = find_model(str(name), unpack_into=tmp_path / "into")
        assert found.name == ("tiny.Q8_0" if name == parts[1] else "parts")
    shutil.copy(parts[0], parts[0].with_name("other.gguf"))
    with pytest.raises(ModelError, match=r"2 GGUF files \(other.gguf, tiny.*00001-of-00003.gguf\)"):
        find_model(str(parts[0].parent), unpack_into=tmp_path / "into")


def test_a_part_that_changes_is_another_model(parts: list[Path], tmp_path: Path) -> None:
    made = unpack(parts[0], tmp_path)
    data = bytearray(parts[1].read_bytes())
    data[-1] ^= 1
    parts[1].write_bytes(data)
    assert unpack(parts[0], tmp_path) != made


def refused(path: Path, tmp_path: Path) -> str:
    with pytest.raises(BrokenModel) as raised:
        unpack(path, tmp_path / "into")
    assert not (tmp_path / "into").exists()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_part_is_missing(parts: list[Path], tmp_path: Path, gone: int) -> None:
    parts[gone].unlink()
    reason = refused(parts[1 if gone == 0 else 0], tmp_path)
    assert f"one of 3 parts of a model, but {parts[gone].name} isn't in its folder" in reason


def test_parts_in_each_others_place(parts: list[Path], tmp_path: Path) -> None:
    kept = parts[1].read_bytes()
    shutil.copy(parts[2], parts[1])
    parts[2].write_bytes(kept)
    assert "says that it is part 3 of 3" in refused(parts[0], tmp_path)


def test_a_part_by_another_name(parts: list[Path], tmp_path: Path) -> None:
    renamed = parts[1].rename(tmp_path / "second.gguf")
    assert "names such as NAME-00002-of-00003.gguf" in refused(renamed, tmp_path)


def say(path: Path, tensors: int) -> None:
    """Change the number of tensors that a file gives for the whole model."""
    data, key = path.read_bytes(), b"split.tensors.count"
    at = data.index(key) + len(key) + 4
    path.write_bytes(data[:at] + tensors.to_bytes(4, "little") + data[at + 4 :])


def test_a_part_of_another_model(parts: list[Path], tmp_path: Path) -> None:
    say(parts[1], 20)
    reason = refused(parts[0], tmp_path)
    assert "00002-of-00003.gguf belongs to another model than" in reason
    assert "their metadata split.tensors.count differ" in reason


def test_a_tensor_in_two_parts(parts: list[Path], tmp_path: Path) -> None:
    tensors = read_split_gguf(parts[0]).tensors.values()
    last = next(one.name for one in tensors if one.split == 2 and ".1." in one.name)
    twice = next(one.name for one in tensors if one.split == 0 and len(one.name) == len(last))
    parts[2].write_bytes(parts[2].read_bytes().replace(last.encode(), twice.encode()))
    assert f"tensor {twice} is in {parts[0].name} too" in refused(parts[0], tmp_path)


def test_a_tensor_is_missing(folder: Path, tmp_path: Path) -> None:
    """The first file announces more tensors than all files have."""
    first = write_gguf(folder, tmp_path / "tiny.gguf", part=PART)
    for name in split_names(first.name):
        say(first.with_name(name), 99)
    assert "split.tensors.count is 99, but its 3 parts have 21 tensors" in refused(first, tmp_path)


def test_names() -> None:
    assert model_name("a-00002-of-00003.gguf") == "a"
    assert model_name("a.Q4_0.gguf") == "a.Q4_0"
    assert split_names("x/a-00002-of-00002.GGUF") == (
        "x/a-00001-of-00002.GGUF",
        "x/a-00002-of-00002.GGUF",
    )
    for odd in ("a-00000-of-00003.gguf", "a-00004-of-00003.gguf", "a-1-of-3.gguf", "a.gguf"):
        assert split_names(odd) == (odd,)
