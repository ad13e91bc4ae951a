"""Names of models: bundled, local, or on the hub."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from molink.checkpoint import source
from molink.checkpoint.source import DEMO_MODEL, ModelSource, find_model
from molink.errors import ModelNotFound


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a bundled model."""
    folder = tmp_path / "data" / "demo_model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(source, "files", lambda _: tmp_path)
    return folder


@pytest.mark.parametrize("name", [None, DEMO_MODEL])
def test_the_bundled_model_is_the_default(package: Path, name: str | None) -> None:
    assert find_model(name) == ModelSource(DEMO_MODEL, package)


def test_a_package_without_the_bundled_model(package: Path) -> None:
    (package / "config.json").unlink()
    with pytest.raises(ModelNotFound, match="install molink again"):
        find_model()


def test_a_folder_is_named_after_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    expected = ModelSource("tiny", (tmp_path / "own" / "tiny").resolve())
    assert find_model("own/tiny") == expected
    assert find_model(str(tmp_path / "own" / "tiny")) == expected


@pytest.mark.parametrize("name", ["nothing", "../a/b", "a/b/c", "", "owner/", "https://x.y/z"])
def test_what_is_neither_folder_nor_repository(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="no folder, not 'molink-demo'"):
        find_model(name)


def hub(
    monkeypatch: pytest.MonkeyPatch, cached: Path | None = None, downloaded: Path | None = None
) -> list[Any]:
    """Stand in for the hub; records how it is asked."""
    asked = []

    def snapshot_download(repository: str, **options: bool | list[str]) -> str | None:
        local = options.get("local_files_only", False)
        asked.append((repository, local))
        found = cached if local else downloaded
        if found is None:
            raise (LocalEntryNotFoundError if local else OfflineModeIsEnabled)("no network\nmore")
        return str(found)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_cached_repository_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    asked = hub(monkeypatch, cached=tmp_path)
    assert find_model("owner/some-model") == ModelSource("some-model", tmp_path)
    assert asked == [("owner/some-model", True)]


def test_a_repository_without_weights_in_the_cache_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metadata").mkdir()
    asked = hub(monkeypatch, cached=tmp_path / "metadata", downloaded=tmp_path)
    assert find_model("owner/some-model").path == tmp_path
    assert asked == [("owner/some-model", True), ("owner/some-model", False)]


def test_a_repository_that_lacks_a_shard_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "cached"
    cached.mkdir()
    (cached / "a.safetensors").write_bytes(b"")
    index = '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
    (cached / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    hub(monkeypatch, cached=cached, downloaded=tmp_path)
    assert find_model("owner/some-model").path == tmp_path
    (cached / "b.safetensors").write_bytes(b"")
    assert find_model("owner/some-model").path == cached


def test_offline_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch)
    with pytest.raises(ModelNotFound, match=r"no such folder.*cache.*no network$"):
        find_model("owner/some-model")
