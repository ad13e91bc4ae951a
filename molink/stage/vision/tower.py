"""A vision tower with its connector, as :mod:`molink.checkpoint.vision` describes it.

The forward pass of one image. Rows are patches, line by line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import (
    gelu,
    layer_norm,
    rms_norm,
    scaled_dot_product_attention,
    silu,
)

from molink.checkpoint.vision import (
    CONNECTOR_PREFIX,
    TOWER_PREFIX,
    LinearShape,
    Merging,
    NormShape,
    VisionActivation,
    VisionConfig,
)
from molink.errors import InvariantError
from molink.stage.decoder.rotary import rotate_half
from molink.stage.linear import PlainLinear, Projection
from molink.stage.linear.base import total_bytes
from molink.stage.weights.weight_reader import WeightReader

_ACTIVATIONS: dict[VisionActivation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda rows: gelu(rows, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class VisionNormLayer:
    """LayerNorm with a bias, or a root mean square norm without; computes in the rows' type."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(rows, self.weight.shape, self.weight, self.eps)
        return layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps)

    @property
    def nbytes(self) -> int:
        return total_bytes(self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """Attention of all patches to all patches, then an MLP."""

    attention_norm: VisionNormLayer
    #: Queries, keys and values.
    heads: tuple[Projection, ...]
    output: Projection
    mlp_norm: VisionNormLayer
    #: Gate, if there is one, up.
    ups: tuple[Projection, ...]
    down: Projection
    activation: VisionActivation
    num_heads: int

    def __call__(self, rows: Tensor, angles: Tensor | None) -> Tensor:
        normed = self.attention_norm(rows)
        query, key, value = (
            project(normed).view(1, len(rows), self.num_heads, -1).transpose(1, 2)
            for project in self.heads
        )
        if angles is not None:
            rotate_half(query[0].transpose(0, 1), angles)
            rotate_half(key[0].transpose(0, 1), angles)
        attended = scaled_dot_product_attention(query, key, value)
        rows = rows + self.output(attended[0].transpose(0, 1).reshape(len(rows), -1))
        normed = self.mlp_norm(rows)
        gate, *ups = (project(normed) for project in self.ups)
        inner = _ACTIVATIONS[self.activation](gate)
        return rows + self.down(inner * ups[0] if ups else inner)

    @property
    def nbytes(self) -> int:
        parts = (*self.heads, *self.ups, self.output, self.down)
        return sum(part.nbytes for part in (*parts, self.attention_norm, self.mlp_norm))


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Turns an image into rows of the decoder, one for each cell of its patches."""

    config: VisionConfig
    patches: PlainLinear
    #: Learned positions ``[side * side, hidden]``.
    positions: Tensor | None
    first_norm: VisionNormLayer | None
    blocks: tuple[VisionBlock, ...]
    last_norm: VisionNormLayer | None
    row_norm: VisionNormLayer | None
    cell_norm: VisionNormLayer | None
    #: The connector's projections.
    projections: tuple[Projection, ...]
    dtype: torch.dtype
    device: torch.device

    @torch.inference_mode()
    def encode_image(self, pixels: Tensor) -> Tensor:
        """Encode an image of ``pixels`` (uint8 ``[height, width, 3]``).

        Returns:
            Rows ``[cells, hidden]`` of the decoder in the compute type, on the device.

        Raises:
            InvariantError: the tower doesn't take that size.
        """
        height, width, _ = pixels.shape
        try:
            cells = self.config.count_rows(height, width)
        except ValueError as error:
            raise InvariantError(f"an image of {error}") from error
        patch = self.config.patch_size
        lines, columns = height // patch, width // patch
        rows = self.patches(self._split_patches(pixels))
        if self.positions is not None:
            rows = rows + self.positions
        if self.first_norm is not None:
            rows = self.first_norm(rows)
        angles = self._compute_angles(lines, columns) if self.config.rope_theta else None
        for block in self.blocks:
            rows = block(rows, angles)
        rows = rows if self.last_norm is None else self.last_norm(rows)
        rows = self._connect_rows(rows, lines, columns)
        assert len(rows) == cells
        return rows

    def _split_patches(self, pixels: Tensor) -> Tensor:
        """Normalized patches ``[lines * columns, 3 * patch * patch]``, by channel."""
        rules, patch = self.config.rules, self.config.patch_size
        height, width, channels = pixels.shape
        mean, std = (torch.tensor(each, device=self.device) for each in (rules.mean, rules.std))
        scaled = ((pixels.to(self.device).float() / 255 - mean) / std).to(self.dtype)
        split = scaled.view(height // patch, patch, width // patch, patch, channels)
        return split.permute(0, 2, 4, 1, 3).reshape(-1, channels * patch * patch)

    def _compute_angles(self, lines: int, columns: int) -> Tensor:
        """Angles ``[T, 1, 2, head_dim]`` of :func:`.rotate_half`, by line and column in turn."""
        size = self.config.head_dim
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        frequencies = 1.0 / self.config.rope_theta**exponents
        line, column = torch.meshgrid(torch.arange(lines), torch.arange(columns), indexing="ij")
        radians = torch.cat(
            (
                line.reshape(-1, 1) * frequencies[0::2],
                column.reshape(-1, 1) * frequencies[1::2],
            ),
            dim=1,
        )
        cos, sin = radians.cos(), radians.sin()
        both = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), dim=1)
        return both[:, None].to(self.device, self.dtype)

    def _connect_rows(self, rows: Tensor, lines: int, columns: int) -> Tensor:
        connector = self.config.connector
        if self.row_norm is not None:
            rows = self.row_norm(rows)
        cells = _merge_cells(rows.view(lines, columns, -1), connector.side, connector.merging)
        if self.cell_norm is not None:
            cells = self.cell_norm(cells)
        for shape, project in zip(connector.projections, self.projections, strict=True):
            cells = gelu(project(cells)) if shape.activated else project(cells)
        return cells

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        norms = (self.first_norm, self.last_norm, self.row_norm, self.cell_norm)
        parts = (self.patches, *self.blocks, *self.projections, *norms)
        return total_bytes(self.positions) + sum(part.nbytes for part in parts if part is not None)


def _merge_cells(rows: Tensor, side: int, merging: Merging) -> Tensor:
    """Merge rows ``[lines, columns, hidden]`` to cells ``[T, hidden]``, or ``side**2`` as wide."""
    lines, columns, width = rows.shape
    cells = rows.view(lines // side, side, columns // side, side, width)
    match merging:
        case "mean":
            return cells.mean(dim=(1, 3)).flatten(0, 1)
        case "by row":
            return cells.permute(0, 2, 1, 3, 4).reshape(-1, side * side * width)
        case "by channel":
            return cells.permute(0, 2, 4, 1, 3).reshape(-1, side * side * width)


# --- loading -------------------------------------------------------------------------------------


def load_tower(reader: WeightReader, config: VisionConfig) -> VisionTower:
    """Load a tower and its connector; raises as :meth:`.WeightReader.read_tensors`."""
    names, connector = config.names, config.connector
    patches = reader.read_tensors(f"{TOWER_PREFIX}{names.patches}.weight").flatten(1)
    bias = reader.read_tensors(f"{TOWER_PREFIX}{names.patches}.bias") if config.biased else None
    positions = None
    if names.positions is not None:
        positions = reader.read_tensors(f"{TOWER_PREFIX}{names.positions}.weight")
    first, last = (
        None if name is None else _load_tower_norm(reader, config, name)
        for name in (names.first_norm, names.last_norm)
    )
    row_norm, cell_norm = (
        None if shape is None else _load_norm(reader, CONNECTOR_PREFIX, shape)
        for shape in (connector.row_norm, connector.cell_norm)
    )
    return VisionTower(
        config,
        PlainLinear(patches, bias),
        positions,
        first,
        tuple(_load_block(reader, config, layer) for layer in range(config.layers)),
        last,
        row_norm,
        cell_norm,
        _load_projections(reader, CONNECTOR_PREFIX, connector.projections),
        reader.dtype,
        reader.device,
    )


def _load_block(reader: WeightReader, config: VisionConfig, layer: int) -> VisionBlock:
    names = config.names
    prefix = f"{names.layers}{layer}."
    found = _load_projections(reader, TOWER_PREFIX, config.layer_projections(layer))
    return VisionBlock(
        _load_tower_norm(reader, config, f"{prefix}{names.attention_norm}"),
        found[:3],
        found[3],
        _load_tower_norm(reader, config, f"{prefix}{names.mlp_norm}"),
        found[4:-1],
        found[-1],
        config.activation,
        config.heads,
    )


def _load_tower_norm(reader: WeightReader, config: VisionConfig, name: str) -> VisionNormLayer:
    shape = NormShape(name=name, kind=config.norm_kind, eps=config.norm_eps)
    return _load_norm(reader, TOWER_PREFIX, shape)


def _load_norm(reader: WeightReader, prefix: str, shape: NormShape) -> VisionNormLayer:
    name = f"{prefix}{shape.name}"
    weight = reader.read_tensors(f"{name}.weight")
    bias = None if shape.kind == "rms" else reader.read_tensors(f"{name}.bias")
    return VisionNormLayer(weight + shape.offset if shape.offset else weight, bias, shape.eps)


def _load_projections(
    reader: WeightReader, prefix: str, shapes: Sequence[LinearShape]
) -> tuple[Projection, ...]:
    return tuple(
        PlainLinear(reader.read_tensors(f"{prefix}{shape.weight_name}").t().contiguous())
        if shape.transposed
        else reader.load_projection([f"{prefix}{shape.name}"], shape.biased)
        for shape in shapes
    )
