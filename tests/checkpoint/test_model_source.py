"""Names of models: bundled, local, or on the hub."""

from pathlib import Path

import pytest

from molink.checkpoint import model_names
from molink.checkpoint.model_names import DEMO_MODEL_NAME
from molink.checkpoint.model_source import (
    ModelSource,
    check_model_name,
    expand_short_name,
    find_model,
)
from molink.errors import ModelNotFound


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a bundled model."""
    folder = tmp_path / "data" / "demo_model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(model_names, "files", lambda _: tmp_path)
    return folder


@pytest.mark.parametrize("name", [None, DEMO_MODEL_NAME])
def test_the_bundled_model_is_the_default(package: Path, tmp_path: Path, name: str | None) -> None:
    assert find_model(name, unpack_into=tmp_path) == ModelSource(DEMO_MODEL_NAME, package)


def test_a_package_without_the_bundled_model(package: Path) -> None:
    (package / "config.json").unlink()
    with pytest.raises(ModelNotFound, match="reinstall molink"):
        find_model(unpack_into=package)


def test_a_folder_is_named_after_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    expected = ModelSource("tiny", (tmp_path / "own" / "tiny").resolve())
    assert find_model("own/tiny", unpack_into=tmp_path) == expected
    assert find_model(str(tmp_path / "own" / "tiny"), unpack_into=tmp_path) == expected


@pytest.mark.parametrize("name", ["nothing", "../a/b", "a/b/c", "", "owner/", "https://x.y/z"])
def test_names_that_are_neither_folder_nor_repository(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="a folder or a GGUF file on this PC, molink-demo"):
        find_model(name, unpack_into=tmp_path)


def test_a_short_name_means_its_source_unless_there_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expand_short_name("qwen3:8b-bf16") == "Qwen/Qwen3-8B"
    for same in ("Qwen/Qwen3-8B", "owner/qwen3", "nothing", "", DEMO_MODEL_NAME):
        assert expand_short_name(same) == same
    check_model_name("qwen3:8b-bf16")
    (tmp_path / "qwen3").mkdir()
    assert expand_short_name("qwen3") == "qwen3"
    assert find_model("qwen3", unpack_into=tmp_path).path == (tmp_path / "qwen3").resolve()


def test_one_file_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFound, match="is not a GGUF file: name the model's folder"):
        find_model(str(tmp_path / "model.safetensors"), unpack_into=tmp_path)
