"""Converts a GGUF file to a model folder, which molink hashes, transfers and loads.

Weights keep their GGUF blocks (:mod:`molink.gguf.ggml_types`), so the folder is as large as the
file. Everything is checked before the first write.
"""

import hashlib
import json
import mmap
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.config_fields import describe_version
from molink.checkpoint.disk_space import OTHER_HOME_HINT, check_free_space
from molink.checkpoint.hub import ByteCounter
from molink.checkpoint.image_rules import PREPROCESSOR_FILE
from molink.checkpoint.mmproj import read_vision_file
from molink.checkpoint.model_names import GGUF_SUFFIX
from molink.checkpoint.model_task import EMBEDDING_FILES
from molink.checkpoint.prequantized import required_tensors
from molink.checkpoint.safetensors_header import encode_header
from molink.checkpoint.tensor_layout import TensorShapes, stage_tensors
from molink.errors import BrokenModel, ModelError, Unavailable
from molink.files import make_plain_name, write_folder_aside
from molink.gguf.architecture import (
    build_config,
    check_architecture,
    is_embedding_model,
    read_vocab_size,
)
from molink.gguf.gguf_file import (
    GgufFile,
    GgufTensor,
    find_first_splits,
    find_mmproj,
    find_splits,
    model_name,
    read_gguf,
    read_split_gguf,
)
from molink.gguf.metadata import read_sampling_defaults
from molink.gguf.tensor_mapping import MappedTensor, map_tensors
from molink.gguf.tokenizer_files import TokenizerFiles, build_tokenizer_files

#: Version of the folder's layout; increment it with every change.
_LAYOUT_VERSION = 5
#: Bytes of one write.
_WRITE_BYTES = 1 << 22


def find_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder without safetensors, else ``None``.

    Of a split model, it is the first file.

    Raises:
        ModelError: the folder has several models.
    """
    if any(folder.glob("*.safetensors")):
        return None
    here = {path.name: path for path in folder.glob(f"*{GGUF_SUFFIX}")}
    found = find_first_splits(here)
    if len(found) > 1:
        names = ", ".join(found[:4])
        raise ModelError(f"{folder} has {len(found)} GGUF files ({names}): name one of them")
    return folder / found[0] if found else None


def read_gguf_model(path: Path) -> tuple[ModelConfig, dict[str, MappedTensor]]:
    """Return config and tensors of a GGUF file, without its tokenizer; raises as
    :func:`import_gguf`.
    """
    found = _read_model(read_split_gguf(path), ())
    entries = {entry.name: entry for entry in found.tensors}
    return ModelConfig.parse_config(found.config, str(path)).drop_absent_mtp(entries), entries


@dataclass(frozen=True, slots=True)
class _GgufModel:
    """A GGUF model, with its vision tower, in molink's terms; ``files`` hold its tensors.

    ``processor`` is its ``preprocessor_config.json``, if it has a tower.
    """

    config: dict[str, Any]
    processor: dict[str, Any]
    tensors: list[MappedTensor]
    files: tuple[Path, ...]


def _read_model(file: GgufFile, ends: tuple[int, ...]) -> _GgufModel:
    config = build_config(file, lambda tensor: _read_numbers(file, tensor), ends)
    tensors, beside = _check_tensors(file, config), _find_mmproj(file.path)
    if beside is None:
        return _GgufModel(config, {}, tensors, file.split_paths)
    vision = read_vision_file(read_gguf(beside, len(file.split_paths)), config, file.path.name)
    parsed = ModelConfig.parse_config(vision.config, str(beside))
    if parsed.vision is not None:
        _check_shapes(beside, parsed.vision.tensors, {one.name: one for one in vision.tensors})
    files = *file.split_paths, beside
    return _GgufModel(vision.config, vision.processor, tensors + vision.tensors, files)


def _find_mmproj(path: Path) -> Path | None:
    """Return the file with the vision tower of the GGUF model ``path``, if there is one."""
    name = find_mmproj(path.name, (each.name for each in path.parent.glob(f"*{GGUF_SUFFIX}")))
    return None if name is None else path.with_name(name)


def import_gguf(path: Path, into: Path, counter: ByteCounter, stop: threading.Event) -> Path:
    """Return the folder below ``into`` for a GGUF file; create it if needed.

    ``path`` is any file of a split model.

    Raises:
        BrokenModel: the file is truncated or inconsistent.
        UnsupportedModel: something in it is not implemented.
        ModelError: the disk is too small, or the folder can't be written.
        Unavailable: ``stop`` was set.
    """
    tower = _find_mmproj(path)
    files = (*find_splits(path), *([] if tower is None else [tower]))
    target = into / f"{make_plain_name(model_name(path.name), 'model')}-{_files_key(files)}"
    if target.is_dir():
        return target
    try:
        _write_folder(path, target, counter, stop)
    except OSError as error:
        raise ModelError(f"{path} can't be unpacked into {target}: {error}") from error
    return target


def _files_key(parts: Sequence[Path]) -> str:
    """A key that changes with any of the files."""
    about = [str(_LAYOUT_VERSION)]
    for path in parts:
        about.append(f"{path.resolve()} {describe_version(path)}")
    return hashlib.sha256(" ".join(about).encode()).hexdigest()[:16]


def _write_folder(path: Path, target: Path, counter: ByteCounter, stop: threading.Event) -> None:
    file = read_split_gguf(path)
    check_architecture(file)
    embeds = is_embedding_model(file.metadata)
    tokens = build_tokenizer_files(file.metadata, read_vocab_size(file), embeds=embeds)
    model = _read_model(file, tokens.eos_ids)
    sampling, found = read_sampling_defaults(file.metadata), model.tensors
    header = encode_header({entry.name: entry for entry in found})
    with ExitStack() as opened:
        partial = opened.enter_context(write_folder_aside(target))
        _write_metadata(partial, model.config, tokens, sampling)
        if model.processor:
            _write_files(partial, {PREPROCESSOR_FILE: model.processor})
        if embeds:
            _write_files(partial, EMBEDDING_FILES)
        total = sum(entry.nbytes for entry in found)
        check_free_space(partial.parent, total, path.name, OTHER_HOME_HINT)
        counter.total += total
        data = [opened.enter_context(_map_file(part)) for part in model.files]
        with (partial / "model.safetensors").open("wb") as made:
            made.write(header)
            for entry in found:
                for part in _read_bytes(entry, data):
                    if stop.is_set():
                        raise Unavailable(f"unpacking of {path.name} was interrupted")
                    made.write(part)
                    counter.add_bytes(len(part))


@contextmanager
def _map_file(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _check_tensors(file: GgufFile, config: dict[str, Any]) -> list[MappedTensor]:
    """Return the model's tensors; check that none is missing and that all match the metadata."""
    found = {entry.name: entry for entry in map_tensors(file, config)}
    parsed = ModelConfig.parse_config(config, str(file.path)).drop_absent_mtp(found)
    _check_shapes(file.path, stage_tensors(parsed, 0, parsed.layers), found)
    return list(found.values())


def _check_shapes(path: Path, shapes: TensorShapes, found: Mapping[str, MappedTensor]) -> None:
    wanted = required_tensors(shapes, "none", found)
    for name, stored in wanted.items():
        entry = found.get(name)
        if entry is None:
            raise BrokenModel(f"{path}: the tensor for {name} is missing")
        if not stored.accepts_shape(entry.shape) or entry.dtype not in stored.dtypes:
            raise BrokenModel(
                f"{path}: the tensor for {name} is {entry.dtype} {list(entry.shape)}, but its "
                f"metadata demand {list(stored.shape)} in {' or '.join(stored.dtypes)}"
            )
    strays = sorted(found.keys() - wanted.keys())
    if strays:
        raise BrokenModel(
            f"{path}: {strays[0]} does not fit its metadata"
            + (f" and {len(strays) - 1} more tensors" if len(strays) > 1 else "")
        )


def _read_numbers(file: GgufFile, tensor: GgufTensor) -> list[float]:
    with file.split_paths[tensor.split].open("rb") as source:
        source.seek(tensor.offset)
        return [number for (number,) in struct.iter_unpack("<f", source.read(tensor.nbytes))]


def _write_metadata(
    partial: Path, config: dict[str, Any], tokens: TokenizerFiles, sampling: dict[str, float]
) -> None:
    (partial / "tokenizer.json").write_text(tokens.tokenizer, encoding="utf-8")
    contents = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": list(tokens.eos_ids), **sampling},
        "tokenizer_config.json": tokens.config,
    }
    _write_files(partial, contents)


def _write_files(partial: Path, contents: Mapping[str, Any]) -> None:
    for name, content in contents.items():
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _read_bytes(entry: MappedTensor, files: Sequence[mmap.mmap]) -> Iterator[bytes]:
    # Imported late: a daemon needs numpy for nothing else.
    import numpy as np

    data, end = files[entry.split], entry.offset + entry.nbytes
    if entry.paired is not None:
        split, begin, count = entry.paired
        half, sources = entry.nbytes // 2, ((entry.split, entry.offset), (split, begin))
        parts = [
            np.frombuffer(files[split][begin : begin + half], np.uint8).reshape(count, -1)
            for split, begin in sources
        ]
        yield np.stack(parts, axis=1).tobytes()
    elif entry.subtract:
        norm = np.frombuffer(data[entry.offset : end], "<f4")
        yield (norm - np.float32(entry.subtract)).astype("<f4").tobytes()
    elif entry.permuted_heads:
        # GGUF interleaves the halves of a head: row 2i is row i of the first half, row 2i + 1 is
        # row i of the second.
        rows = np.frombuffer(data[entry.offset : end], np.uint8).reshape(entry.shape[0], -1)
        pairs = rows.reshape(entry.permuted_heads, -1, 2, rows.shape[1])
        yield pairs.swapaxes(1, 2).tobytes()
    else:
        for begin in range(entry.offset, end, _WRITE_BYTES):
            yield data[begin : min(begin + _WRITE_BYTES, end)]
