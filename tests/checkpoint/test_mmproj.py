"""An mmproj file beside a GGUF model becomes its vision tower; what contradicts is refused."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from molink.checkpoint.gguf_import import import_gguf, read_gguf_model
from molink.checkpoint.hub import NullCounter
from molink.checkpoint.model_folder import ModelFolder
from molink.errors import BrokenModel, UnsupportedModel
from tests.support.gguf_models import Kind, write_gguf
from tests.support.mmproj_models import write_seeing_gguf
from tests.support.models import MakeModel
from tests.support.sight import make_seeing

#: Writes the GGUF files of a small Gemma 3; arguments are those of ``write_seeing_gguf``.
WriteFiles = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(make_model, tmp_path_factory.mktemp("seeing") / "model", "gemma3")


@pytest.fixture
def write_files(folder: Path, tmp_path: Path) -> WriteFiles:
    def write(**fields: Any) -> Path:
        return write_seeing_gguf(folder, tmp_path / "gguf", **fields)

    return write


def unpack(path: Path) -> Path:
    return import_gguf(path, path.parent / "into", NullCounter(), threading.Event())


def test_only_the_first_stage_has_the_tower(write_files: WriteFiles) -> None:
    path = write_files(kind=Kind.Q8_0)
    opened = ModelFolder.open(unpack(path))
    first, last = opened.stage_tensors(0, 1), opened.stage_tensors(1, 3)
    packed = "vision.encoder.layers.1.mlp.fc1.weight.q8_0"
    assert packed in first
    assert opened.tensors[packed].dtype == "U8"
    assert not any(name.startswith("vision") for name in last)
    assert opened.config.vision is not None
    assert not opened.config.notes


def test_a_tower_is_unpacked_anew_after_it_was_changed(write_files: WriteFiles) -> None:
    path = write_files()
    made = unpack(path)
    tower = next(path.parent.glob("mmproj*"))
    tower.rename(path.with_name("mmproj-other-F32.gguf"))
    assert unpack(path) != made
    tower = path.with_name("mmproj-other-F32.gguf")
    tower.unlink()
    opened = ModelFolder.open(unpack(path))
    assert not opened.config.is_multimodal


def test_names_of_older_converters(write_files: WriteFiles, folder: Path, tmp_path: Path) -> None:
    made = load_file(unpack(write_files()) / "model.safetensors")
    older = write_seeing_gguf(folder, tmp_path / "older", swapped=True)
    found = load_file(unpack(older) / "model.safetensors")
    assert made.keys() == found.keys()
    assert all((made[name] == found[name]).all() for name in made)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a missing tensor": (
        {"without": "v.blk.1.ln2.bias"},
        r"the tensor for vision\.encoder\.layers\.1\.layer_norm2\.bias is missing",
    ),
    "a missing projection": (
        {"without": "mm.input_projection.weight"},
        r"no tensor mm\.input_projection\.weight",
    ),
    "fewer layers": (
        {"metadata": {"clip.vision.block_count": 1}},
        r"tensor v\.blk\.1\.\S+ is unknown in a tower",
    ),
    "more layers": (
        {"metadata": {"clip.vision.block_count": 3}},
        r"layers\.2\.\S+ is missing",
    ),
    "absurd layers": ({"metadata": {"clip.vision.block_count": 1 << 19}}, "num_hidden_layers"),
    "heads": ({"metadata": {"clip.vision.attention.head_count": 5}}, "5 whole heads"),
    "patches": ({"metadata": {"clip.vision.patch_size": 8}}, "its metadata demand"),
    "cells": (
        {"metadata": {"clip.vision.projector.scale_factor": 3}},
        "8 patches a side do not fit",
    ),
    "colours": ({"metadata": {"clip.vision.image_mean": [0.5]}}, "a list of 3 finite numbers"),
    "width": ({"metadata": {"clip.vision.embedding_length": 1 << 30}}, "from 1 to"),
    "no projector": ({"metadata": {"clip.projector_type": 7}}, "projector_type must be a text"),
    "another file": ({"metadata": {"general.architecture": "llama"}}, "is not a vision tower"),
}


@pytest.mark.parametrize(("fields", "reason"), REFUSED.values(), ids=REFUSED)
def test_contradictions(write_files: WriteFiles, fields: dict[str, Any], reason: str) -> None:
    path = write_files(**fields)
    with pytest.raises(BrokenModel, match=reason) as error:
        unpack(path)
    assert "mmproj-tiny-F32.gguf" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (path.parent / "into").exists()


def test_a_tower_of_another_model_leaves_a_text_model(
    write_files: WriteFiles, make_model: MakeModel, tmp_path: Path
) -> None:
    write_files()
    other = make_model(tmp_path / "other", "gemma3_text", 1, hidden_size=32)
    path = write_gguf(other, tmp_path / "gguf" / "tiny.gguf")
    config = ModelFolder.open(unpack(path)).config
    assert config.is_text_only
    (note,) = config.notes
    assert "belongs to another model: its rows have 64 elements, those of tiny.gguf 32" in note


@pytest.mark.parametrize("projector", ["internvl", "pixtral"])
def test_another_projector_leaves_a_text_model(write_files: WriteFiles, projector: str) -> None:
    path = write_files(metadata={"clip.projector_type": projector})
    config = ModelFolder.open(unpack(path)).config
    assert config.is_text_only
    (note,) = config.notes
    assert f"as mmproj-tiny-F32.gguf has the projector '{projector}'" in note
    assert read_gguf_model(path)[0].is_text_only


def test_a_tower_is_no_model(write_files: WriteFiles) -> None:
    path = next(write_files().parent.glob("mmproj*"))
    with pytest.raises(UnsupportedModel, match=r"holds a vision tower \(mmproj\)"):
        unpack(path)
