"""Loading tensors of a model folder, converted and merged, without a copy more than needed."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from molink.checkpoint.folder import ModelFolder
from molink.checkpoint.layout import Shapes, layer_tensors
from molink.checkpoint.low_bit import LowBit
from molink.checkpoint.prequantized import companions
from molink.checkpoint.quantization import can_hold, is_quantizable
from molink.checkpoint.stacked import StackPlace, find_stack
from molink.checkpoint.stored import FLOATS
from molink.errors import BrokenModel, UsageError
from molink.facts.model import Quantize
from molink.gguf.blocks import Kind, find_packed, packed_name, unpack
from molink.gguf.formats import stays
from molink.stage.linear import (
    BlockLinear,
    CompiledLinear,
    EmbeddingTable,
    Linear,
    Projection,
    Projections,
    SideBySide,
)
from molink.stage.linear.quantized import QuantizedKernels, QuantizedWeight
from molink.stage.linear.unpacked import part_rows
from molink.stage.loading.bnb_formats import check_layout, fill
from molink.stage.loading.low_bit import unpack_low_bit
from molink.stage.loading.stacks import expert_parts


class WeightReader:
    """Reads tensors into a dtype on a device; files are mapped while the reader is open.

    Every result owns its memory, so the files may go away afterwards. ``quantize`` is about the
    projections of layers; those of a checkpoint that is quantized itself stay as they are.
    """

    def __init__(
        self,
        folder: ModelFolder,
        dtype: torch.dtype,
        device: torch.device,
        quantize: Quantize = "none",
        avoid: Collection[str] = (),
    ) -> None:
        """Kernels to ``avoid`` are named as in :mod:`molink.facts.kernels`.

        Raises:
            UsageError: the checkpoint is quantized in another way.
        """
        stored = folder.config.quantized
        if "none" not in (stored, quantize) and stored != quantize:
            raise UsageError(f"{folder.path} is quantized as {stored}; it can't become {quantize}")
        self._folder, self.dtype, self._device = folder, dtype, device
        self._projections = Projections.probe(dtype, device, avoid)
        self._mode: Quantize = quantize if stored == "none" else stored
        self._kernels = QuantizedKernels.probe(self._mode, dtype, device, avoid)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._layer: tuple[int, Shapes] = (-1, {})

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, *names: str) -> Tensor:
        """The tensors, one below the other in their first dimension.

        Raises:
            BrokenModel: a tensor is missing, can't be read, or holds NaN or infinity; named.
        """
        return self._merge(names, self.dtype)

    def _merge(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        shapes = [self._full_shape(name) for name in names]
        rows = sum(shape[0] for shape in shapes)
        merged = torch.empty((rows, *shapes[0][1:]), dtype=dtype, device=self._device)
        first = 0
        for name, shape in zip(names, shapes, strict=True):
            part = merged[first : first + shape[0]]
            for begin, stored in self._parts(name, shape[0]):
                part[begin : begin + len(stored)].copy_(stored)
            self._check_finite(name, part)
            first += shape[0]
        return merged

    def _full_shape(self, name: str) -> tuple[int, ...]:
        if self._place(name) is not None:
            return self._layer_shape(name)
        if self._low_bit(name) is not None:
            return self._shape(name)
        kind = self._packed(name)
        if kind is None:
            return self._folder.tensors[name].shape
        rows, nbytes = self._folder.tensors[packed_name(name, kind)].shape
        return rows, nbytes // kind.nbytes * kind.weights

    def _parts(self, name: str, step: int) -> Iterator[tuple[int, Tensor]]:
        """Rows of a tensor as numbers, about ``step`` at a time, each with where it begins."""
        place, scheme = self._place(name), self._low_bit(name)
        if place is not None:
            yield from expert_parts(place, self._mapped, step)
            return
        if scheme is not None:
            scales = scheme.scales(name, self._folder.tensors)
            yield from unpack_low_bit(scheme, name, scales, self._shape(name), self._mapped)
            return
        kind = self._packed(name)
        stored = self._mapped(name if kind is None else packed_name(name, kind))
        if kind is not None:
            step = min(step, part_rows(self._full_shape(name)[1]))
        for begin in range(0, len(stored), step):
            part = stored[begin : begin + step]
            yield begin, part if kind is None else torch.from_numpy(unpack(kind, part.numpy()))

    def _place(self, name: str) -> StackPlace | None:
        """Where an expert's tensor lies in one of all experts, if it does."""
        return find_stack(name, self._folder.tensors)

    def _low_bit(self, name: str) -> LowBit | None:
        """How a weight is stored in few bits (GPTQ, AWQ, FP8 …), if it is."""
        scheme = self._folder.config.low_bit
        if scheme is None or not name.startswith("model.layers."):
            return None
        return scheme if scheme.holds(name, self._folder.tensors) else None

    def _packed(self, name: str) -> Kind | None:
        """The blocks of GGUF that a tensor is stored in, if it is."""
        return find_packed(name, self._folder.tensors)

    def projection(self, names: Sequence[str], biased: bool) -> Projection:
        """Projections ``names`` (without ``.weight``) merged into one, outputs side by side.

        Raises:
            BrokenModel: as :meth:`read`.
            UnsupportedModel: a stored quantization that isn't implemented; named.
        """
        weights = [f"{name}.weight" for name in names]
        bias = self.read(*(f"{name}.bias" for name in names)) if biased else None
        if self._becomes_quantized(weights):
            return self._kernels.create(self._quantized(weights), bias)
        parts, first = [], 0
        for kind, found in groupby(weights, self._stays):
            names = list(found)
            last = first + sum(self._full_shape(name)[0] for name in names)
            added = None if bias is None else bias[first:last]
            if kind is None:
                merged = self._merge(names, self._kept(names))
                parts.append(self._projections.create(merged, added))
            else:
                parts.append(self._in_blocks(kind, names, added))
            first = last
        return parts[0] if len(parts) == 1 else SideBySide(tuple(parts))

    def tied(self, name: str) -> Linear | CompiledLinear | BlockLinear:
        """The weight ``name``, as embedding and output head at once; raises as :meth:`read`."""
        kind = self._stays(name)
        if kind is not None:
            return self._in_blocks(kind, [name], None)
        return self._projections.create_tied(self._merge([name], self._kept([name])))

    def table(self, name: str) -> EmbeddingTable:
        """The weight ``name``, as an embedding; raises as :meth:`read`."""
        kind = self._stays(name)
        return Linear(self.read(name)) if kind is None else self._in_blocks(kind, [name], None)

    def _stays(self, name: str) -> Kind | None:
        """The blocks in which a weight stays on the device, if it does."""
        kind = self._packed(name)
        if kind is None or not stays(kind, self._full_shape(name)[0]):
            return None
        return kind if self._projections.product_of(kind.name) else None

    def _in_blocks(self, kind: Kind, names: Sequence[str], bias: Tensor | None) -> BlockLinear:
        product = self._projections.product_of(kind.name)
        assert product is not None  # nothing else stays
        stored = [self._mapped(packed_name(name, kind)) for name in names]
        made = BlockLinear.pack(product, kind.name, stored, bias, self.dtype)
        first = 0
        for name, part in zip(names, stored, strict=True):
            if not made.is_finite(first, first + len(part)):
                raise self._not_finite(name, "f16")
            first += len(part)
        return made

    def _kept(self, names: Sequence[str]) -> torch.dtype:
        """The type in which they are kept: 16 bits stay as they are where rows of more take them.

        Weights of few bits are less exact than bf16.
        """
        found = {
            "BF16" if self._low_bit(name) or self._packed(name) else self._stored(name)
            for name in names
        }
        kept = torch.float16 if found == {"F16"} else torch.bfloat16
        stays = kept is torch.float16 or found <= {"BF16", "U8"}
        return kept if stays and self._projections.holds(kept) else self.dtype

    def _stored(self, name: str) -> str:
        """The type of what a tensor that isn't in blocks of GGUF is stored in."""
        place = self._place(name)
        return self._folder.tensors[name if place is None else place.names[0]].dtype

    def _becomes_quantized(self, names: Sequence[str]) -> bool:
        if self._mode == "none" or not names[0].startswith("model.layers."):
            return False
        if self._folder.config.quantized != "none":
            # Some may have been left out on purpose; if all were, they are not touched.
            return any(self._is_stored_quantized(name) for name in names)
        shapes = [self._shape(name) for name in names]
        fine = all(is_quantizable(name, self._shape(name)) for name in names)
        return fine and can_hold(self._mode, shapes)

    def _is_stored_quantized(self, name: str) -> bool:
        if self._place(name) is not None:
            return False
        full = self._packed(name) is None and self._low_bit(name) is None
        return full and self._folder.tensors[name].dtype not in FLOATS

    def _quantized(self, names: Sequence[str]) -> QuantizedWeight:
        shapes = [self._shape(name) for name in names]
        merged = (sum(shape[0] for shape in shapes), shapes[0][1])
        weight = QuantizedWeight.empty(self._mode, merged, self._device)
        first = 0
        for name, shape in zip(names, shapes, strict=True):
            if self._is_stored_quantized(name):
                layout = companions(name)[1]
                if layout in self._folder.tensors:
                    check_layout(name, self._mapped(layout))
                fill(weight, first, name, shape, self._mapped)
            else:
                self._quantize(weight, first, name, shape)
            first += shape[0]
        return weight

    def _quantize(
        self, weight: QuantizedWeight, first: int, name: str, shape: tuple[int, int]
    ) -> None:
        """Few rows at a time: the rest is in full precision only in the file."""
        for begin, stored in self._parts(name, part_rows(shape[1])):
            part = stored.to(self._device)
            self._check_finite(name, part)
            weight.put(first + begin, part)

    def _shape(self, name: str) -> tuple[int, int]:
        """Shape of a layer's weight by the config: that of a packed one doesn't tell."""
        rows, width = self._layer_shape(name)
        return rows, width

    def _layer_shape(self, name: str) -> tuple[int, ...]:
        layer = int(name.split(".")[2])
        if self._layer[0] != layer:
            self._layer = layer, layer_tensors(self._folder.config, layer)
        return self._layer[1][name]

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        # A sum takes a twentieth of the time, but may overflow where no element is infinite.
        if bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all()):
            return
        raise self._not_finite(name, str(tensor.dtype))

    def _not_finite(self, name: str, dtype: str) -> BrokenModel:
        kind, place, scheme = self._packed(name), self._place(name), self._low_bit(name)
        stored = name if kind is None else packed_name(name, kind)
        stored = stored if place is None else place.names[0]
        stored = stored if scheme is None else scheme.numbers(name)
        file = self._folder.path / self._folder.tensors[stored].file
        return BrokenModel(
            f"{file}: tensor {name} holds NaN or infinity (as {dtype}); fetch the file "
            "again, or compute in another dtype"
        )

    def _mapped(self, name: str) -> Tensor:
        span = self._folder.tensors[name]
        file, path = span.file, self._folder.path / span.file
        try:
            if file not in self._files:
                opened = safe_open(path, framework="pt", device="cpu")
                self._files[file] = self._stack.enter_context(opened)
            tensor: Tensor = self._files[file].get_tensor(span.key)
        except (SafetensorError, OSError) as error:
            raise BrokenModel(f"{path}: tensor {name} can't be read: {error}") from error
        return tensor
