"""A valid model folder that tests may damage, and hand-made safetensors files."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from molink.checkpoint.config import ModelConfig
from tests.support.family_configs import NAMES, SIZES
from tests.support.models import MakeModel


@pytest.fixture(scope="session")
def pristine(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of three layers in several shards."""
    return make_model(tmp_path_factory.mktemp("pristine"), "qwen2", 0, max_shard_size="100KB")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may change."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """``edit_json(path, field=value)``; ``None`` removes the field."""

    def edit(path: Path, **fields: object) -> None:
        raw = json.loads(path.read_text(encoding="utf-8"))
        for name, value in fields.items():
            raw.pop(name, None)
            if value is not None:
                raw[name] = value
        path.write_text(json.dumps(raw), encoding="utf-8")

    return edit


@pytest.fixture
def write_safetensors() -> Callable[..., Path]:
    """``write_safetensors(path, header, nbytes)``: a file with any header and zeros after it."""

    def write(path: Path, header: object, nbytes: int = 0) -> Path:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(nbytes))
        return path

    return write


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Any]:
    """``load(family, **fields)``; ``...`` removes a field."""

    def make(family: str, **fields: Any) -> ModelConfig | None:
        raw = SIZES | {"architectures": [NAMES[family]]} | fields
        raw = {name: value for name, value in raw.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        return ModelConfig.load_folder(tmp_path)

    return make
