"""Makes the folder of a model with adapters, which molink hashes, transfers and loads.

The model's own files are hard links, or copies on file systems without hard links, so the folder
can be used like any other model folder. Everything is checked before the first write.
"""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from molink.checkpoint.adapters import (
    ADAPTER_TENSORS_FILE,
    ADAPTERS_FILE,
    adapter_tensor_names,
    check_adapter_names,
    encode_adapters,
)
from molink.checkpoint.config_fields import describe_version
from molink.checkpoint.disk_space import OTHER_HOME_HINT, check_free_space
from molink.checkpoint.model_folder import INDEX_FILE, METADATA_FILES, ModelFolder
from molink.checkpoint.peft_adapter import CONFIG_FILE, WEIGHTS_FILE, PeftAdapter
from molink.checkpoint.safetensors_header import TensorSpan, encode_header
from molink.errors import BrokenModel, ModelError, UsageError
from molink.files import make_plain_name, write_folder_aside

#: Version of the folder's layout; increment it with every change.
_LAYOUT_VERSION = 1
#: Bytes read and checked at once; a multiple of all element sizes.
_READ_BYTES = 1 << 22
#: Mask of a little-endian element's exponent bits, which are all ones in NaN and infinity.
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}


def adapt_model(model: str, path: Path, adapters: Mapping[str, Path], into: Path) -> Path:
    """Return the folder below ``into`` of the model ``path`` with adapters; create it if needed.

    ``model`` is its name. ``adapters`` are PEFT folders by the names that requests will use.

    Raises:
        UsageError: a name is invalid or the model's own.
        ModelError: an adapter is not supported, broken or of another model, the disk is too small,
            or the folder can't be written.
    """
    check_adapter_names([*adapters])
    if model in adapters:
        raise UsageError(f"an adapter can't be called {model}, which is the model's name")
    base = ModelFolder.open(path)
    if base.config.adapters:
        raise UsageError(f"{path} has adapters already: name the model without them")
    opened = [PeftAdapter.open(place, name, base.config) for name, place in adapters.items()]
    target = into / f"{make_plain_name(model, 'model')}.adapted-{_files_key(path, adapters)}"
    if target.is_dir():
        return target
    try:
        with write_folder_aside(target) as partial:
            _write_adapters(partial, opened)
            _link_model(base, partial)
    except OSError as error:
        raise ModelError(f"{model} can't be combined with adapters in {into}: {error}") from error
    return target


def _model_files(path: Path) -> list[Path]:
    """List the files of a model folder that molink reads."""
    named = (path / name for name in (*METADATA_FILES, INDEX_FILE))
    return [*(file for file in named if file.is_file()), *sorted(path.glob("*.safetensors"))]


def _files_key(path: Path, adapters: Mapping[str, Path]) -> str:
    """A key that changes with any of the files."""
    about = [str(_LAYOUT_VERSION)]
    folders = {"": _model_files(path)}
    folders |= {
        name: [place / CONFIG_FILE, place / WEIGHTS_FILE] for name, place in adapters.items()
    }
    for name, files in folders.items():
        for file in files:
            about.append(f"{name} {file.absolute()} {describe_version(file)}")
    return hashlib.sha256("\n".join(about).encode("utf-8", "replace")).hexdigest()[:16]


def _link_model(base: ModelFolder, folder: Path) -> None:
    for file in _model_files(base.path):
        place = folder / file.relative_to(base.path)
        place.parent.mkdir(exist_ok=True)
        source = file.resolve()
        try:
            place.hardlink_to(source)
        except OSError:  # another disk, or a file system without links
            check_free_space(folder, source.stat().st_size, file.name, OTHER_HOME_HINT)
            shutil.copyfile(source, place)


def _write_adapters(folder: Path, opened: list[PeftAdapter]) -> None:
    matrices: dict[str, tuple[Path, TensorSpan]] = {}
    for number, one in enumerate(opened, 1):
        for (layer, module), pair in one.matrices.items():
            names = adapter_tensor_names(f"model.layers.{layer}.{module}", number)
            matrices |= {name: (one.file, span) for name, span in zip(names, pair, strict=True)}
    total = sum(span.nbytes for _, span in matrices.values())
    check_free_space(folder, total, "a set of adapters", OTHER_HOME_HINT)
    with (folder / ADAPTER_TENSORS_FILE).open("wb") as target:
        target.write(encode_header({name: span for name, (_, span) in matrices.items()}))
        for file, span in matrices.values():
            for data in _read_finite(file, span):
                target.write(data)
    (folder / ADAPTERS_FILE).write_bytes(encode_adapters([one.adapter for one in opened]))


def _read_finite(file: Path, span: TensorSpan) -> Iterator[bytes]:
    """Read a tensor part by part; raises :class:`BrokenModel` for NaN and infinity."""
    # Imported late: a daemon needs numpy for nothing else.
    import numpy as np

    kind, exponent = _EXPONENTS[span.dtype]
    with file.open("rb") as source:
        source.seek(span.offset)
        for begin in range(0, span.nbytes, _READ_BYTES):
            data = source.read(min(_READ_BYTES, span.nbytes - begin))
            if len(data) != min(_READ_BYTES, span.nbytes - begin):
                raise BrokenModel(f"{file}: truncated while it was read")
            if bool((np.frombuffer(data, kind) & exponent == exponent).any()):
                raise BrokenModel(f"{file}: tensor {span.key} holds NaN or infinity")
            yield data
