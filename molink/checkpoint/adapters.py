"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) of a model, in its own folder.

An adapter adds ``scale * B A x`` to a projection's output for the input ``x``. ``ADAPTERS_FILE``
says which projections each adapter changes; its matrices are tensors of the layers like any others.
So a stage fetches, counts and loads only those of its own layers. The file and the tensors are part
of the manifest, so the same base with other adapters is another model.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from molink.checkpoint.config_fields import read_bytes
from molink.errors import BrokenModel, UsageError
from molink.facts.model import MAX_ADAPTERS, AdapterName

#: The adapters of a model, and the file that holds their matrices after an import.
ADAPTERS_FILE = "molink_adapters.json"
ADAPTER_TENSORS_FILE = "molink_adapters.safetensors"
MAX_RANK = 512
#: Maximum magnitude of a scale, ``alpha / rank`` or a variant of it.
MAX_SCALE = 1e4
_MAX_LAYERS = 4096
_MAX_MODULES = 256
_MAX_FILE_BYTES = 1 << 20

#: Requests choose an adapter by giving its name as the model.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}")

_TENSOR = re.compile(r".+\.lora_[AB]\.\d{1,3}")

_Layer = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_LAYERS)]


class AdaptedModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A projection, such as ``self_attn.q_proj``, that an adapter changes alike in some layers."""

    module: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]{1,32}(\.[a-z0-9_]{1,32}){1,3}$")]
    rank: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK)]
    scale: Annotated[float, msgspec.Meta(ge=-MAX_SCALE, le=MAX_SCALE)]
    layers: Annotated[tuple[_Layer, ...], msgspec.Meta(min_length=1, max_length=_MAX_LAYERS)]


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter and the name by which requests choose it."""

    name: AdapterName
    modules: Annotated[
        tuple[AdaptedModule, ...], msgspec.Meta(min_length=1, max_length=_MAX_MODULES)
    ]

    def find_module(self, module: str, layer: int) -> AdaptedModule | None:
        """Return how the adapter changes a projection of a layer; ``None`` if it doesn't."""
        return next(
            (each for each in self.modules if each.module == module and layer in each.layers), None
        )


class _AdaptersContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    adapters: Annotated[tuple[Adapter, ...], msgspec.Meta(min_length=1, max_length=MAX_ADAPTERS)]


def read_adapters(folder: Path) -> tuple[Adapter, ...]:
    """The adapters of a model folder, in the order of their numbers, which count from 1.

    Raises:
        BrokenModel: the file is invalid.
    """
    path = folder / ADAPTERS_FILE
    if not path.exists():
        return ()
    raw = read_bytes(path)
    if len(raw) > _MAX_FILE_BYTES:
        raise BrokenModel(f"{path}: longer than {_MAX_FILE_BYTES} bytes")
    try:
        found = msgspec.json.decode(raw, type=_AdaptersContent).adapters
        check_adapter_names([adapter.name for adapter in found])
    except (msgspec.MsgspecError, ValueError, RecursionError, UsageError) as error:
        raise BrokenModel(f"{path}: not a valid list of adapters: {error}") from error
    for adapter in found:
        places = [(each.module, layer) for each in adapter.modules for layer in each.layers]
        if len({*places}) < len(places):
            raise BrokenModel(f"{path}: adapter {adapter.name} changes a projection twice")
    return found


def encode_adapters(adapters: Sequence[Adapter]) -> bytes:
    """The content of ``ADAPTERS_FILE``."""
    return msgspec.json.encode(_AdaptersContent(tuple(adapters)))


def check_adapter_names(names: Sequence[str]) -> None:
    """Check how the adapters of one model are named.

    Raises:
        UsageError: a name has other characters, or two adapters have the same.
    """
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise UsageError(
                f"an adapter can't be called {name[:80]!r}: up to 64 letters, digits and . _ : @ - "
                "beginning with a letter or digit"
            )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two adapters are called {twice}")
    if len(names) > MAX_ADAPTERS:
        raise UsageError(f"{len(names)} adapters; a model can have {MAX_ADAPTERS}")


def is_adapter_tensor(name: str) -> bool:
    """Whether a tensor of a layer is an adapter's."""
    return _TENSOR.fullmatch(name) is not None


def adapter_tensor_names(projection: str, number: int) -> tuple[str, str]:
    """Names of an adapter's ``A`` ``[rank, in]`` and ``B`` ``[out, rank]`` of a projection.

    ``projection`` is its whole name without ``.weight``.
    """
    return f"{projection}.lora_A.{number}", f"{projection}.lora_B.{number}"
