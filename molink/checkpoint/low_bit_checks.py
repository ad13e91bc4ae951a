"""Looks into the few tensors of a low-bit checkpoint that could mislead, before anything starts."""

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from molink.checkpoint.low_bit import LowBitScheme, can_be_low_bit
from molink.checkpoint.safetensors_header import TensorSpan
from molink.checkpoint.tensor_layout import TensorShapes
from molink.errors import BrokenModel, UnsupportedModel

#: Reads the bytes of a tensor, perhaps from afar; fewer only where its file ends.
ReadTensor = Callable[[TensorSpan], bytes]


def check_low_bit_contents(
    path: Path,
    scheme: LowBitScheme | None,
    shapes: TensorShapes,
    tensors: Mapping[str, TensorSpan],
    read: ReadTensor | None = None,
) -> None:
    """Check the order of columns of the weights among ``shapes``, and biases that aren't there.

    The tensors are of the shapes and types that the config demands. They lie in the folder
    ``path``, or ``read`` reads them.

    Raises:
        BrokenModel: a column's group is none of those that there are, or a group has too many
            columns; the tensor is named.
        UnsupportedModel: such a bias isn't zero; named.
    """
    if scheme is None:
        return
    read = read or partial(_read_local, path)
    for name, shape in shapes.items():
        if can_be_low_bit(name, shape) and scheme.is_stored(name, tensors):
            _check_order(path, scheme, name, shape[1], tensors, read)
            bias = f"{name.removesuffix('weight')}bias"
            if bias in tensors and bias not in shapes:
                _check_zero(path, tensors[bias], bias, read)


def _check_order(
    path: Path,
    scheme: LowBitScheme,
    name: str,
    width: int,
    tensors: Mapping[str, TensorSpan],
    read: ReadTensor,
) -> None:
    order, groups, columns = (
        scheme.order_name(name),
        scheme.count_groups(width),
        scheme.scale_block[1] or width,
    )
    if not scheme.has_column_order or groups == 1:
        return
    span = tensors[order]
    found = array("i", _read_tensor(path, span, order, read))
    if sys.byteorder == "big":
        found.byteswap()
    if not 0 <= min(found) <= max(found) < groups:
        raise BrokenModel(
            f"{path / span.file}: tensor {order} has groups {min(found)} to {max(found)}, but "
            f"there are scales of {groups} (0 to {groups - 1}): fetch the file again"
        )
    group, most = Counter(found).most_common(1)[0]
    if most > columns:
        raise BrokenModel(
            f"{path / span.file}: tensor {order} gives group {group} {most} columns, where "
            f"config.json says {columns}: fetch the file again"
        )


def _check_zero(path: Path, span: TensorSpan, name: str, read: ReadTensor) -> None:
    if any(_read_tensor(path, span, name, read)):
        raise UnsupportedModel(
            f"{path / span.file}: tensor {name} is a bias that a model of this config.json hasn't"
        )


def _read_tensor(path: Path, span: TensorSpan, name: str, read: ReadTensor) -> bytes:
    try:
        found = read(span)
    except OSError as error:
        raise BrokenModel(f"{path / span.file}: tensor {name} can't be read: {error}") from error
    if len(found) != span.nbytes:
        raise BrokenModel(f"{path / span.file}: tensor {name} is truncated; fetch the file again")
    return found


def _read_local(path: Path, span: TensorSpan) -> bytes:
    with (path / span.file).open("rb") as file:
        file.seek(span.offset)
        return file.read(span.nbytes)
