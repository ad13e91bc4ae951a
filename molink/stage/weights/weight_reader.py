"""Loads, converts and merges tensors of a model folder with minimal copies."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, groupby
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from molink.checkpoint.adapters import Adapter, adapter_tensor_names
from molink.checkpoint.experts import Routing
from molink.checkpoint.low_bit import LowBitScheme, find_resident_format
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.prequantized import companion_names
from molink.checkpoint.quantized_size import LAYER_PREFIXES, can_hold, is_quantizable
from molink.checkpoint.safetensors_header import FLOAT_DTYPES
from molink.checkpoint.stacked_experts import StackedExpert, find_stack
from molink.checkpoint.tensor_layout import TensorShapes, layer_tensors
from molink.errors import BrokenModel, UsageError
from molink.facts.dtypes import NarrowDType, narrow_dtype, weight_dtype
from molink.facts.model import Quantize
from molink.gguf.block_formats import BlockFormat
from molink.gguf.ggml_types import GgmlType, dequantize_rows, find_packed, packed_name
from molink.stage.cpu_kernels.repack import BlockCodes, read_blocks
from molink.stage.linear import (
    AdaptedLinear,
    BlockLinear,
    CompiledLinear,
    ConcatenatedLinear,
    EmbeddingTable,
    ExpertLinear,
    LowRankUpdate,
    PlainLinear,
    PlanesLinear,
    Projection,
    ProjectionFactory,
)
from molink.stage.linear.compiled import PART_ROWS
from molink.stage.linear.quantized import QuantizedProjectionFactory, QuantizedWeight
from molink.stage.linear.unpacked import rows_per_unpack
from molink.stage.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES
from molink.stage.weights.stored_formats import (
    check_layout,
    fill_quantized,
    read_column_order,
    read_expert_blocks,
    read_expert_rows,
    read_low_bit_blocks,
    unpack_low_bit,
)

#: Number of weights packed at once.
_MAX_PACKED_WEIGHTS = 2**20


class WeightReader:
    """Reads tensors in a dtype to a device; files are mapped while the reader is open.

    Results own their memory. ``quantize`` applies to layer projections of unquantized checkpoints.
    """

    def __init__(
        self,
        folder: ModelFolder,
        dtype: torch.dtype,
        device: torch.device,
        quantize: Quantize = "none",
        disabled_kernels: Collection[str] = (),
    ) -> None:
        """Open the reader.

        Raises:
            UsageError: the checkpoint is quantized differently.
        """
        stored = folder.config.quantized
        if "none" not in (stored, quantize) and stored != quantize:
            raise UsageError(f"{folder.path} is quantized as {stored}; it can't become {quantize}")
        self._folder, self.dtype, self.device = folder, dtype, device
        self._projections = ProjectionFactory.probe_device(dtype, device, disabled_kernels)
        self._mode: Quantize = quantize if stored == "none" else stored
        self._quantized_projections = QuantizedProjectionFactory.probe_device(
            self._mode, dtype, device, disabled_kernels, self._projections
        )
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._layer: tuple[int, TensorShapes] = (-1, {})

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

    def read_tensors(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read tensors, stacked along the first dimension, in the reader's or another ``dtype``.

        Raises:
            BrokenModel: a tensor is missing, unreadable, or has NaN or infinity.
        """
        return self._merge_tensors(names, dtype or self.dtype)

    def _merge_tensors(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        shapes = [self._stored_shape(name) for name in names]
        rows = sum(shape[0] for shape in shapes)
        merged = torch.empty((rows, *shapes[0][1:]), dtype=dtype, device=self.device)
        first = 0
        for name, shape in zip(names, shapes, strict=True):
            part = merged[first : first + shape[0]]
            for begin, stored in self._read_rows(name, shape[0]):
                part[begin : begin + len(stored)].copy_(stored)
            self._check_finite(name, part)
            first += shape[0]
        return merged

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        if self._find_stack(name) is not None:
            return self._layer_shape(name)
        if self._low_bit_scheme(name) is not None:
            return self._weight_shape(name)
        kind = self._find_packed(name)
        if kind is None:
            return self._folder.tensors[name].shape
        rows, nbytes = self._folder.tensors[packed_name(name, kind)].shape
        return rows, nbytes // kind.nbytes * kind.block_size

    def _read_rows(self, name: str, step: int) -> Iterator[tuple[int, Tensor]]:
        """Read a tensor as numbers in slices of about ``step`` rows, each with its first row."""
        stack, scheme = self._find_stack(name), self._low_bit_scheme(name)
        if stack is not None:
            yield from read_expert_rows(stack, self._map_tensor, step)
            return
        if scheme is not None:
            scales = scheme.scales_name(name, self._folder.tensors)
            yield from unpack_low_bit(
                scheme, name, scales, self._weight_shape(name), self._map_tensor
            )
            return
        kind = self._find_packed(name)
        stored = self._map_tensor(name if kind is None else packed_name(name, kind))
        if kind is not None:
            step = min(step, rows_per_unpack(self._stored_shape(name)[1]))
        for begin in range(0, len(stored), step):
            part = stored[begin : begin + step]
            yield (
                begin,
                part if kind is None else torch.from_numpy(dequantize_rows(kind, part.numpy())),
            )

    def _find_stack(self, name: str) -> StackedExpert | None:
        """Find the stack that holds an expert's tensor."""
        return find_stack(name, self._folder.tensors)

    def _low_bit_scheme(self, name: str) -> LowBitScheme | None:
        """Return the low-bit scheme in which a weight is stored, if any."""
        scheme = self._folder.config.low_bit
        if scheme is None or not name.startswith(LAYER_PREFIXES):
            return None
        return scheme if scheme.is_stored(name, self._folder.tensors) else None

    def _find_packed(self, name: str) -> GgmlType | None:
        """Return the type of GGUF blocks in which a tensor is stored, if any."""
        return find_packed(name, self._folder.tensors)

    def load_projection(self, names: Sequence[str], biased: bool) -> Projection:
        """Load projections ``names`` (without ``.weight``) as one with concatenated outputs.

        Adapters' updates of them are loaded, too.

        Raises:
            BrokenModel: as :meth:`read_tensors`.
            UnsupportedModel: a stored quantization is not implemented.
        """
        base = self._load_merged(names, biased)
        updates = {
            number: found
            for number, adapter in enumerate(self._folder.config.adapters, 1)
            if (found := self._load_update(names, adapter, number)) is not None
        }
        return AdaptedLinear(base, updates) if updates else base

    def _load_update(
        self, names: Sequence[str], adapter: Adapter, number: int
    ) -> LowRankUpdate | None:
        """Load an adapter's update of merged projections; ``None`` if it has none."""
        downs, ups, first = [], [], 0
        for name in names:
            if not name.startswith("model.layers."):
                continue
            layer, module = name.removeprefix("model.layers.").split(".", 1)
            changed = adapter.find_module(module, int(layer))
            if changed is not None:
                down, up = adapter_tensor_names(name, number)
                # Scale before rounding.
                scaled = self.read_tensors(up, dtype=torch.float32).mul_(changed.scale)
                rounded = scaled.to(self.dtype)
                self._check_finite(up, rounded)
                downs.append(down)
                ups.append((first, PlainLinear(rounded)))
            first += self._weight_shape(f"{name}.weight")[0]
        return LowRankUpdate(PlainLinear(self.read_tensors(*downs)), tuple(ups)) if ups else None

    def _load_merged(self, names: Sequence[str], biased: bool) -> Projection:
        weights = [f"{name}.weight" for name in names]
        bias = self.read_tensors(*(f"{name}.bias" for name in names)) if biased else None
        if self._becomes_quantized(weights):
            return self._quantized_projections.create_projection(
                self._load_quantized(weights), bias
            )
        parts, first = [], 0
        for (form, order), found in groupby(weights, self._resident_layout):
            names = list(found)
            last = first + sum(self._stored_shape(name)[0] for name in names)
            added = None if bias is None else bias[first:last]
            if form is None:
                parts.append(self._load_plain(names, added))
            else:
                parts.append(self._load_blocks(form, names, added, order))
            first = last
        return parts[0] if len(parts) == 1 else ConcatenatedLinear(tuple(parts))

    def load_experts(
        self, names: Sequence[Sequence[str]], biased: bool, routing: Routing
    ) -> ExpertLinear | None:
        """Load a projection of each expert, merged from its ``names``, with stacked outputs.

        ``None`` if the device can't multiply by all at once. Raises as :meth:`load_projection`.
        """
        if self._projections.experts_device is None:
            return None
        weights = [[f"{name}.weight" for name in merged] for merged in names]
        every, count = list(chain.from_iterable(weights)), len(names)
        width = self._weight_shape(every[0])[1]
        shape = sum(self._weight_shape(name)[0] for name in every), width
        quantized = {self._becomes_quantized(merged) for merged in weights}
        if quantized == {True}:
            form = self._quantized_projections.find_format(self._mode, shape)
            is_uniform = form is not None
        else:
            layouts = {self._resident_layout(name) for name in every}
            form, order = next(iter(layouts))
            # Experts with permuted columns have different permutations.
            is_uniform = len(quantized) == len(layouts) == 1 and not order
        if not is_uniform:
            return None
        if not self._projections.groups_experts(form, width, routing):
            return None
        biases = (f"{name}.bias" for name in chain.from_iterable(names))
        bias = self.read_tensors(*biases) if biased else None
        if form is None:
            return ExpertLinear(self._merge_tensors(every, self.dtype), bias, count)
        if quantized == {True}:
            parts = (self._load_quantized(merged).read_blocks(form.group) for merged in weights)
            made = self._projections.create_quantized(form, shape, chain.from_iterable(parts), None)
        else:
            made = self._load_blocks(form, every, None)
        assert isinstance(made, PlanesLinear)  # the form of all low-bit weights on a GPU
        return ExpertLinear(made.planes, bias, count)

    def load_unquantized(self, name: str, biased: bool) -> Projection:
        """Load a projection whose weight becomes the compute type."""
        bias = self.read_tensors(f"{name}.bias") if biased else None
        return self._projections.create_projection(self.read_tensors(f"{name}.weight"), bias)

    def _load_plain(self, names: Sequence[str], bias: Tensor | None) -> Projection:
        weight_dtype = self._weight_dtype(names)
        made = self._load_in_parts(names, weight_dtype, bias)
        return made or self._projections.create_projection(
            self._merge_tensors(names, weight_dtype), bias
        )

    def _load_in_parts(
        self, names: Sequence[str], weight_dtype: torch.dtype, bias: Tensor | None
    ) -> CompiledLinear | None:
        """Check and pack part by part, while each is in cache; ``None`` if unsupported."""
        if any(
            self._find_stack(name) or self._low_bit_scheme(name) or self._find_packed(name)
            for name in names
        ):
            return None
        shapes = [(shape[0], shape[1]) for shape in map(self._stored_shape, names)]
        made = self._projections.create_empty(shapes, weight_dtype, bias)
        if made is None:
            return None
        first, step = 0, max(1, _MAX_PACKED_WEIGHTS // shapes[0][1] // PART_ROWS) * PART_ROWS
        for name, (rows, _) in zip(names, shapes, strict=True):
            for begin, stored in self._read_rows(name, step):
                part = stored.to(weight_dtype)
                self._check_finite(name, part)
                made.put_rows(first + begin, part)
            first += rows
        return made

    def load_tied_embedding(
        self, name: str
    ) -> PlainLinear | CompiledLinear | BlockLinear | PlanesLinear:
        """Load ``name`` as embedding and output head; raises as :meth:`read_tensors`."""
        form = self._resident_format(name)
        if form is not None:
            return self._load_blocks(form, [name], None)
        weight_dtype = self._weight_dtype([name])
        made = self._load_in_parts([name], weight_dtype, None)
        return made or self._projections.create_tied(self._merge_tensors([name], weight_dtype))

    def load_embedding(self, name: str) -> EmbeddingTable:
        """Load ``name`` as an embedding; raises as :meth:`read_tensors`."""
        form = self._resident_format(name)
        return (
            PlainLinear(self.read_tensors(name))
            if form is None
            else self._load_blocks(form, [name], None)
        )

    def _resident_format(self, name: str) -> BlockFormat | None:
        """Return the format in which a weight stays on the device, if it stays quantized."""
        tensors, scheme = self._folder.tensors, self._folder.config.low_bit
        low_bit = scheme or self._find_packed(name) or self._find_stack(name)
        if not self._projections.keeps_blocks or not low_bit:
            return None
        rows, width = self._stored_shape(name)
        form = find_resident_format(name, (rows, width), tensors, scheme)
        return form if form and self._projections.keeps_format(form, (rows, width)) else None

    def _resident_layout(self, name: str) -> tuple[BlockFormat | None, tuple[int, ...]]:
        """Return that format with the order of the weight's columns, if they are permuted."""
        form, scheme = self._resident_format(name), self._low_bit_scheme(name)
        if form is None or scheme is None:
            return form, ()
        return form, read_column_order(scheme, name, self._weight_shape(name)[1], self._map_tensor)

    def _load_blocks(
        self,
        form: BlockFormat,
        names: Sequence[str],
        bias: Tensor | None,
        order: Sequence[int] = (),
    ) -> BlockLinear | PlanesLinear:
        rows = [self._stored_shape(name)[0] for name in names]
        columns = torch.tensor(order) if order else None
        parts = chain.from_iterable(self._read_blocks(name, form, columns) for name in names)
        shape = sum(rows), self._stored_shape(names[0])[1]
        made = self._projections.create_quantized(form, shape, parts, bias, columns)
        first = 0
        for name, count in zip(names, rows, strict=True):
            if not made.is_finite(first, first + count):
                raise self._not_finite(name, form.number_dtype)
            first += count
        return made

    def _read_blocks(
        self, name: str, form: BlockFormat, order: Tensor | None
    ) -> Iterator[BlockCodes]:
        """Read blocks of a weight that stays quantized, in slices."""
        kind, scheme = self._find_packed(name), self._low_bit_scheme(name)
        stack = self._find_stack(name)
        if kind is not None:
            return read_blocks(kind.name, self._map_tensor(packed_name(name, kind)))
        if stack is not None:
            return read_expert_blocks(stack, self._map_tensor)
        assert scheme is not None  # nothing else stays quantized
        scales = scheme.scales_name(name, self._folder.tensors)
        return read_low_bit_blocks(
            scheme, form, name, scales, self._weight_shape(name), self._map_tensor, order
        )

    def _weight_dtype(self, names: Sequence[str]) -> torch.dtype:
        """Return the type in which weights are kept, by :mod:`molink.facts.dtypes`."""
        stored = {
            "U8"
            if self._low_bit_scheme(name) or self._find_packed(name)
            else self._stored_dtype(name)
            for name in names
        }
        return TORCH_DTYPES[
            weight_dtype(narrow_dtype(stored), DTYPE_NAMES[self.dtype], self._keeps_dtype)
        ]

    def _keeps_dtype(self, narrow: NarrowDType) -> bool:
        return self._projections.keeps_dtype(TORCH_DTYPES[narrow])

    def _stored_dtype(self, name: str) -> str:
        """Return the stored type of a tensor that is not in GGUF blocks."""
        stack = self._find_stack(name)
        return self._folder.tensors[name if stack is None else stack.names[0]].dtype

    def _becomes_quantized(self, names: Sequence[str]) -> bool:
        if self._mode == "none" or not names[0].startswith(LAYER_PREFIXES):
            return False
        if self._folder.config.quantized != "none":
            # If the checkpoint's authors left all of them unquantized, they stay so.
            return any(self._is_stored_quantized(name) for name in names)
        shapes = [self._weight_shape(name) for name in names]
        fine = all(is_quantizable(name, self._weight_shape(name)) for name in names)
        return fine and can_hold(self._mode, shapes)

    def _is_stored_quantized(self, name: str) -> bool:
        if self._find_stack(name) is not None:
            return False
        full = self._find_packed(name) is None and self._low_bit_scheme(name) is None
        return full and self._folder.tensors[name].dtype not in FLOAT_DTYPES

    def _load_quantized(self, names: Sequence[str]) -> QuantizedWeight:
        shapes = [self._weight_shape(name) for name in names]
        merged = (sum(shape[0] for shape in shapes), shapes[0][1])
        weight = QuantizedWeight.create_empty(self._mode, merged, self.device)
        first = 0
        for name, shape in zip(names, shapes, strict=True):
            if self._is_stored_quantized(name):
                layout = companion_names(name)[1]
                if layout in self._folder.tensors:
                    check_layout(name, self._map_tensor(layout))
                fill_quantized(weight, first, name, shape, self._map_tensor)
            else:
                self._quantize_rows(weight, first, name, shape)
            first += shape[0]
        return weight

    def _quantize_rows(
        self, weight: QuantizedWeight, first: int, name: str, shape: tuple[int, int]
    ) -> None:
        """Quantize a few rows at a time, to bound memory in full precision."""
        for begin, stored in self._read_rows(name, rows_per_unpack(shape[1])):
            part = stored.to(self.device)
            self._check_finite(name, part)
            weight.quantize_rows(first + begin, part)

    def _weight_shape(self, name: str) -> tuple[int, int]:
        """Return the shape of a layer's weight by the config; packed tensors have other shapes."""
        rows, width = self._layer_shape(name)
        return rows, width

    def _layer_shape(self, name: str) -> tuple[int, ...]:
        layer = int(name.split(".")[2])
        if self._layer[0] != layer:
            self._layer = layer, layer_tensors(self._folder.config, layer)
        return self._layer[1][name]

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        # The sum is 20 times as fast, but may overflow although all elements are finite.
        if bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all()):
            return
        raise self._not_finite(name, str(tensor.dtype))

    def _not_finite(self, name: str, dtype: str) -> BrokenModel:
        kind, stack, scheme = (
            self._find_packed(name),
            self._find_stack(name),
            self._low_bit_scheme(name),
        )
        stored = name if kind is None else packed_name(name, kind)
        stored = stored if stack is None else stack.names[0]
        stored = stored if scheme is None else scheme.numbers_name(name)
        file = self._folder.path / self._folder.tensors[stored].file
        return BrokenModel(
            f"{file}: tensor {name} holds NaN or infinity (as {dtype}); fetch the file "
            "again, or compute in another dtype"
        )

    def _map_tensor(self, name: str) -> Tensor:
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
