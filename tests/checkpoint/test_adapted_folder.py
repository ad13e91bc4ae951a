"""The folder of a model with adapters: complete, checked, and a new one if an adapter changes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from molink.checkpoint import adapted_folder
from molink.checkpoint.adapted_folder import adapt_model
from molink.checkpoint.adapters import ADAPTERS_FILE, read_adapters
from molink.checkpoint.model_folder import ModelFolder
from molink.errors import BrokenModel, MolinkError, UsageError
from molink.facts.model import MAX_ADAPTERS
from molink.swarm.artifacts.fetch_plan import group_tensors
from tests.support.adapters import write_adapter


@pytest.fixture
def adapter(pristine: Path, tmp_path: Path) -> Path:
    """An adapter of queries and values of layers 1 and 3."""
    return write_adapter(tmp_path / "adapter", pristine, ("q_proj", "v_proj"), layers=(0, 2))


def test_a_folder_like_any_other(pristine: Path, adapter: Path, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", pristine, ("up_proj",), layers=(1,), dtype="bfloat16")
    folder = ModelFolder.open(
        adapt_model("m", pristine, {"one": adapter, "two": other}, tmp_path / "into")
    )
    before = ModelFolder.open(pristine)
    assert [one.name for one in folder.config.adapters] == ["one", "two"]
    assert folder.tensors.keys() > before.tensors.keys()
    groups = group_tensors(folder.config, 0, 3)
    found = {name: {n for n in shapes if ".lora_" in n} for name, shapes in groups.items()}
    q, v = (f"model.layers.0.self_attn.{name}_proj" for name in "qv")
    assert found["adapters-0000"] == {f"{p}.lora_{part}.1" for p in (q, v) for part in "AB"}
    assert found["adapters-0001"] == {f"model.layers.1.mlp.up_proj.lora_{part}.2" for part in "AB"}
    assert len(found["adapters-0002"]) == 4
    without = group_tensors(before.config, 0, 3)
    assert {name: group for name, group in groups.items() if name in without} == without
    stored = folder.tensors["model.layers.1.mlp.up_proj.lora_A.2"]
    assert (stored.dtype, stored.shape) == ("BF16", (4, 64))


def test_the_same_folder_until_an_adapter_changes(
    pristine: Path, adapter: Path, tmp_path: Path
) -> None:
    into = tmp_path / "into"
    first = adapt_model("m", pristine, {"one": adapter}, into)
    assert adapt_model("m", pristine, {"one": adapter}, into) == first
    assert adapt_model("m", pristine, {"uno": adapter}, into) != first
    write_adapter(adapter, pristine, ("q_proj", "v_proj"), 7, layers=(0, 2))
    os.utime(adapter / "adapter_model.safetensors", ns=(1, 1))
    assert adapt_model("m", pristine, {"one": adapter}, into) != first
    assert not [*into.glob(".*")]


def test_copies_where_there_are_no_links(
    pristine: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    folder = adapt_model("m", pristine, {"one": adapter}, tmp_path / "into")
    assert ModelFolder.open(folder).config.adapters
    assert (folder / "config.json").stat().st_ino != (pristine / "config.json").stat().st_ino


def test_a_model_of_links_as_in_the_hub_s_cache(
    pristine: Path, adapter: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in pristine.iterdir():
        try:
            (snapshot / file.name).symlink_to(file)
        except OSError:
            pytest.skip("no symbolic links here")
    folder = adapt_model("m", snapshot, {"one": adapter}, tmp_path / "into")
    assert not any(file.is_symlink() for file in folder.iterdir())
    assert ModelFolder.open(folder).config.adapters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none(pristine: Path, tmp_path: Path, dtype: str, value: float) -> None:
    from safetensors.torch import load, save_file

    adapter = write_adapter(tmp_path / "adapter", pristine, ("q_proj",), dtype=dtype)
    path = adapter / "adapter_model.safetensors"
    tensors = load(path.read_bytes())
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    tensors[name][5, 1] = value
    save_file(tensors, path)
    with pytest.raises(
        BrokenModel, match=r"layers\.1\.self_attn\.q_proj\.lora_B\.weight holds NaN"
    ):
        adapt_model("m", pristine, {"one": adapter}, tmp_path / "into")
    assert not [*(tmp_path / "into").iterdir()]


@pytest.mark.parametrize("name", ["", "a b", "../up", "a/b", "ä", "-a", "a" * 65, "m"])
def test_names_that_are_refused(pristine: Path, adapter: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="can't be called"):
        adapt_model("m", pristine, {name: adapter}, tmp_path / "into")


def test_too_many_and_adapters_of_adapted_models(
    pristine: Path, adapter: Path, tmp_path: Path
) -> None:
    many = {f"a{number}": adapter for number in range(MAX_ADAPTERS + 1)}
    with pytest.raises(UsageError, match="33 adapters"):
        adapt_model("m", pristine, many, tmp_path / "into")
    made = adapt_model("m", pristine, {"one": adapter}, tmp_path / "into")
    with pytest.raises(UsageError, match="has adapters already"):
        adapt_model("m", made, {"two": adapter}, tmp_path / "into")


def test_a_full_disk(
    pristine: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(adapted_folder, "encode_header", refuse)
    with pytest.raises(MolinkError, match="m can't be combined with adapters"):
        adapt_model("m", pristine, {"one": adapter}, tmp_path / "into")
    assert not [*(tmp_path / "into").iterdir()]


_MODULE = {"module": "self_attn.q_proj", "rank": 4, "scale": 1.0, "layers": [0]}


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"adapters": []},
        {"adapters": [{"name": "a", "modules": []}]},
        {"adapters": [{"name": "a b", "modules": [_MODULE]}]},
        {"adapters": [{"name": "a", "modules": [_MODULE]}] * 2},
        {"adapters": [{"name": "a", "modules": [_MODULE, _MODULE]}]},
        {"adapters": [{"name": "a", "modules": [_MODULE | {"rank": 0}]}]},
        {"adapters": [{"name": "a", "modules": [_MODULE | {"rank": 513}]}]},
        {"adapters": [{"name": "a", "modules": [_MODULE | {"scale": 1e9}]}]},
        {"adapters": [{"name": "a", "modules": [_MODULE | {"layers": [-1]}]}]},
        {"adapters": [{"name": "a", "modules": [_MODULE | {"layers": [4096]}]}]},
        {"adapters": [{"name": "a", "modules": [_MODULE | {"module": "../x"}]}]},
        {"adapters": [{"name": "a", "modules": [_MODULE | {"more": 1}]}]},
        {"adapters": [{"name": f"a{n}", "modules": [_MODULE]} for n in range(33)]},
    ],
)
def test_hostile_lists_of_adapters(tmp_path: Path, content: Any) -> None:
    (tmp_path / ADAPTERS_FILE).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(BrokenModel, match=r"molink_adapters\.json"):
        read_adapters(tmp_path)


def test_a_list_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / ADAPTERS_FILE).write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(BrokenModel, match="longer than"):
        read_adapters(tmp_path)


def test_a_list_that_does_not_fit_the_model(pristine: Path, adapter: Path, tmp_path: Path) -> None:
    folder = adapt_model("m", pristine, {"one": adapter}, tmp_path / "into")
    content = json.loads((folder / ADAPTERS_FILE).read_text(encoding="utf-8"))
    content["adapters"][0]["modules"][0]["rank"] = 5
    (folder / ADAPTERS_FILE).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(BrokenModel, match="has shape"):
        ModelFolder.open(folder)
    content["adapters"][0]["modules"][0]["module"] = "mlp.router"
    (folder / ADAPTERS_FILE).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(BrokenModel, match=r"adapter one changes mlp\.router of layer 1"):
        ModelFolder.open(folder)
