"""A model in several GGUF files, as llama.cpp's ``gguf-split`` cuts it: each has some tensors.

``name-00001-of-00003.gguf`` has the model's metadata, the others say only which part they are
(``split.*``). Whichever is named, the others are looked for beside it, by their names.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from molink.errors import BrokenModel
from molink.gguf.header import MAX_TENSORS, GgufFile, GgufTensor, read_gguf

_SPLIT_PATTERN = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def model_name(file: str) -> str:
    """What the model in a GGUF file is called: the file's name without its part and ending."""
    match = _SPLIT_PATTERN.fullmatch(file)
    return match[1] if match else Path(file).stem


def split_names(file: str) -> tuple[str, ...]:
    """The names of all files of a model, by that of one of them (a folder may be before it)."""
    match = _SPLIT_PATTERN.fullmatch(file)
    if match is None or not 0 < int(match[2]) <= int(match[3]):
        return (file,)
    count = int(match[3])
    return tuple(f"{match[1]}-{i:05}-of-{count:05}{match[4]}" for i in range(1, count + 1))


def find_first_splits(names: Iterable[str]) -> list[str]:
    """Of the names of a folder's GGUF files the first of each model; none for ``mmproj`` (images).

    Folders may be before them.
    """
    models = [name for name in names if not name.rpartition("/")[2].startswith("mmproj")]
    return [*dict.fromkeys(split_names(name)[0] for name in sorted(models))]


def find_splits(path: Path) -> tuple[Path, ...]:
    """The files of the model that ``path`` is, or is a part of.

    Raises:
        BrokenModel: one of them is missing; named.
    """
    found = tuple(path.with_name(name) for name in split_names(path.name))
    missing = [part for part in found if not part.exists()]
    if len(found) > 1 and missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BrokenModel(
            f"{path.name} is one of {len(found)} parts of a model, but {missing[0].name}{more} "
            f"isn't beside it in {path.parent}: put all parts into one folder"
        )
    return found


def read_split_gguf(path: Path) -> GgufFile:
    """Metadata and tensors of the model that ``path`` is, or is a part of. Blocks on the disk.

    Raises:
        BrokenModel: a part is missing, of another model, or broken; named.
        UnsupportedModel: a version or an element type that isn't implemented; named.
    """
    paths = find_splits(path)
    files = [read_gguf(part) for part in paths]
    first, count = files[0], len(files)
    for index, file in enumerate(files):
        _check_split(file, index, count)
        _refuse_other_model(first, file)
    if count == 1:
        return first
    tensors: dict[str, GgufTensor] = {}
    for index, file in enumerate(files):
        for tensor in file.tensors.values():
            if tensor.name in tensors:
                other = paths[tensors[tensor.name].split].name
                raise BrokenModel(f"{file.path}: tensor {tensor.name} is in {other} too")
            tensors[tensor.name] = replace(tensor, split=index)
    wanted = first.metadata.get_integer(_TENSORS, maximum=MAX_TENSORS)
    if len(tensors) != wanted:
        raise BrokenModel(
            f"{first.path}: metadata {_TENSORS} is {wanted}, but its {count} parts have "
            f"{len(tensors)} tensors: one of them is of another model"
        )
    return GgufFile(first.path, first.metadata, tensors, paths)


def _check_split(file: GgufFile, index: int, count: int) -> None:
    """Whether the file is the part that its name says."""
    said = file.metadata.get_index(_COUNT) or 1
    number = file.metadata.get_index(_NUMBER) or 0
    if (said, number) == (count, index):
        return
    if count == 1:
        raise BrokenModel(
            f"{file.path} is part {number + 1} of {said} of a model, but isn't named so: the parts "
            f"are found by names such as NAME-{number + 1:05}-of-{said:05}.gguf"
        )
    raise BrokenModel(
        f"{file.path} says that it is part {number + 1} of {said} ({_NUMBER}, {_COUNT}): another "
        "one than its name says"
    )


def _refuse_other_model(first: GgufFile, file: GgufFile) -> None:
    """Parts after the first repeat little of its metadata; what they repeat is the same."""
    if file is first:
        return
    other = file.metadata.find_difference(first.metadata, besides=_NUMBER)
    if other is not None:
        raise BrokenModel(
            f"{file.path} is a part of another model than {first.path.name}: their metadata "
            f"{other} differ"
        )
