"""A vision tower with its connector, as :mod:`molink.checkpoint.vision` describes it.

A forward pass processes one image. Rows are patches, line by line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor
from torch.nn.functional import (
    gelu,
    interpolate,
    layer_norm,
    rms_norm,
    scaled_dot_product_attention,
    silu,
)

from molink.checkpoint.vision import (
    TOWER_PREFIX,
    ConnectorShape,
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
    """LayerNorm with a bias, or RMSNorm without, perhaps without weights.

    Computes in the rows' type.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(rows, rows.shape[-1:], self.weight, self.eps)
        return layer_norm(rows, rows.shape[-1:], self.weight, self.bias, self.eps)

    @property
    def nbytes(self) -> int:
        return total_bytes(self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows within which patches attend: patch indices ``places`` ``[windows, most]``.

    Windows at the edges have fewer patches; their ``hidden`` places repeat one.
    """

    places: Tensor
    hidden: Tensor

    @classmethod
    def of_grid(cls, lines: int, columns: int, side: int, device: torch.device) -> "Windows":
        """Divide a grid of patches into squares of ``side`` patches, smaller at the edges."""
        padded = -(-lines // side) * side, -(-columns // side) * side
        grid = torch.full(padded, -1, device=device)
        grid[:lines, :columns] = torch.arange(lines * columns, device=device).view(lines, columns)
        squares = grid.view(padded[0] // side, side, padded[1] // side, side)
        places = squares.transpose(1, 2).reshape(-1, side * side)
        hidden = places < 0
        return cls(torch.where(hidden, places.amax(dim=1, keepdim=True), places), hidden)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, windows: Windows | None, scale: float | None
) -> Tensor:
    """Attend with ``[T, heads, head_dim]``, among all patches or within windows."""
    if windows is None:
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        attended = scaled_dot_product_attention(query, key, value, scale=scale)
        return attended[0].transpose(0, 1)
    seen, result = ~windows.hidden, torch.empty_like(query)
    query, key, value = (part[windows.places].transpose(1, 2) for part in (query, key, value))
    mask = seen[:, None, None, :]
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    attended = attended.transpose(1, 2)
    result[windows.places[seen]] = attended[seen]
    return result


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each head's queries and keys; values are normed without weights."""

    query: VisionNormLayer
    key: VisionNormLayer

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        bare = VisionNormLayer(None, None, self.query.eps)
        return self.query(query), self.key(key), bare(value)

    @property
    def nbytes(self) -> int:
        return self.query.nbytes + self.key.nbytes


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """Attention among patches, then an MLP."""

    attention_norm: VisionNormLayer
    #: Projections to queries, keys and values, or one merged projection.
    heads: tuple[Projection, ...]
    #: With them, scores are not scaled.
    head_norms: HeadNorms | None
    output: Projection
    after_attention: VisionNormLayer | None
    mlp_norm: VisionNormLayer
    #: Gate (if gated) and up.
    ups: tuple[Projection, ...]
    down: Projection
    after_mlp: VisionNormLayer | None
    activation: VisionActivation
    num_heads: int

    def __call__(
        self, rows: Tensor, angles: Sequence[Tensor], windows: "Windows | None" = None
    ) -> Tensor:
        """Compute a layer; ``angles`` are those of equal parts of a head, if it is rotated."""
        normed = self.attention_norm(rows)
        parts = [project(normed) for project in self.heads]
        parts = list(parts[0].chunk(3, dim=1)) if len(parts) == 1 else parts
        query, key, value = (part.reshape(len(rows), self.num_heads, -1) for part in parts)
        scale = None
        if self.head_norms is not None:
            (query, key, value), scale = self.head_norms(query, key, value), 1.0
        for heads in (query, key):
            for index, turned in enumerate(angles):
                rotate_half(heads.chunk(len(angles), -1)[index], turned)
        attended = self.output(_attend(query, key, value, windows, scale).flatten(1))
        rows = rows + (self.after_attention(attended) if self.after_attention else attended)
        normed = self.mlp_norm(rows)
        gate, *ups = (project(normed) for project in self.ups)
        inner = _ACTIVATIONS[self.activation](gate)
        made = self.down(inner * ups[0] if ups else inner)
        return rows + (self.after_mlp(made) if self.after_mlp else made)

    @property
    def nbytes(self) -> int:
        parts = (*self.heads, *self.ups, self.output, self.down)
        norms = self.attention_norm, self.mlp_norm
        others = self.head_norms, self.after_attention, self.after_mlp
        return sum(part.nbytes for part in (*parts, *norms, *others) if part is not None)


@dataclass(frozen=True, slots=True)
class Connector:
    """Merges rows into cells and projects these to the decoder's width."""

    shape: ConnectorShape
    #: Bias and scale of merged rows, if they are standardized.
    standard: tuple[Tensor, Tensor] | None
    row_norm: VisionNormLayer | None
    cell_norm: VisionNormLayer | None
    projections: tuple[Projection, ...]

    def __call__(self, rows: Tensor, lines: int, columns: int) -> Tensor:
        """Return cells ``[T, hidden]`` for the rows of ``lines * columns`` patches."""
        if self.row_norm is not None:
            rows = self.row_norm(rows)
        cells = _merge_cells(rows.view(lines, columns, -1), self.shape.side, self.shape.merging)
        if self.shape.scale != 1:
            cells = self._scale(cells)
        if self.cell_norm is not None:
            cells = self.cell_norm(cells).to(rows.dtype)
        for shape, project in zip(self.shape.projections, self.projections, strict=True):
            cells = gelu(project(cells)) if shape.activated else project(cells)
        return cells

    def _scale(self, cells: Tensor) -> Tensor:
        """Scale merged rows, in float32, since products may be too large for 16 bits."""
        cells = cells.float() * self.shape.scale
        if self.standard is None:
            return cells
        bias, scale = self.standard
        return (cells - bias.float()) * scale.float()

    @property
    def nbytes(self) -> int:
        parts = (self.row_norm, self.cell_norm, *self.projections)
        own = 0 if self.standard is None else total_bytes(*self.standard)
        return own + sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Turns an image into rows of the decoder, one for each cell of its patches.

    With DeepStack, a row concatenates one row of the decoder's width from each connector.
    """

    config: VisionConfig
    pixel_norm: VisionNormLayer | None
    patches: PlainLinear
    patch_norm: VisionNormLayer | None
    #: Learned positions ``[side * side, hidden]``; by axis ``[2, count, hidden]``.
    positions: Tensor | None
    first_norm: VisionNormLayer | None
    blocks: tuple[VisionBlock, ...]
    last_norm: VisionNormLayer | None
    connector: Connector
    #: Connectors by the tower layer whose rows they take, in the order of the decoder's layers.
    deepstack: dict[int, Connector]
    dtype: torch.dtype
    device: torch.device

    @torch.inference_mode()
    def encode_image(self, pixels: Tensor) -> Tensor:
        """Encode an image of ``pixels`` (uint8 ``[height, width, 3]``).

        Returns:
            Rows ``[cells, hidden]`` of the decoder in the compute type, on the device. Those of
            DeepStack follow in each row: ``[cells, hidden * (1 + layers)]``.

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
        rows = self._split_patches(pixels)
        if self.pixel_norm is not None:
            rows = self.pixel_norm(rows)
        rows = self.patches(rows)
        if self.patch_norm is not None:
            rows = self.patch_norm(rows)
        if self.positions is not None:
            find = _sum_positions if self.config.axis_positions else _resize_positions
            rows = rows + find(self.positions, lines, columns)
        if self.first_norm is not None:
            rows = self.first_norm(rows)
        config = self.config
        angles = self._compute_angles(lines, columns) if config.rope_theta else ()
        windows = None
        if config.window:
            windows = Windows.of_grid(lines, columns, config.window, self.device)
        inner: dict[int, Tensor] = {}
        for layer, block in enumerate(self.blocks):
            rows = block(rows, angles, None if layer in config.full_layers else windows)
            if layer in self.deepstack:
                inner[layer] = self.deepstack[layer](rows, lines, columns)
        rows = rows if self.last_norm is None else self.last_norm(rows)
        rows = self.connector(rows, lines, columns)
        assert len(rows) == cells
        return torch.cat((rows, *(inner[layer] for layer in self.deepstack)), dim=1)

    def _split_patches(self, pixels: Tensor) -> Tensor:
        """Split into normalized patches ``[lines * columns, 3 * patch * patch]``, by channel.

        Flat patches are by pixel.
        """
        rules, patch = self.config.rules, self.config.patch_size
        height, width, channels = pixels.shape
        mean, std = (torch.tensor(each, device=self.device) for each in (rules.mean, rules.std))
        scaled = ((pixels.to(self.device).float() / 255 - mean) / std).to(self.dtype)
        split = scaled.view(height // patch, patch, width // patch, patch, channels)
        order = (0, 2, 1, 3, 4) if self.config.flat_patches else (0, 2, 4, 1, 3)
        return split.permute(order).reshape(-1, channels * patch * patch)

    def _compute_angles(self, lines: int, columns: int) -> tuple[Tensor, ...]:
        """Compute angles ``[T, 1, 2, head_dim]`` for :func:`.rotate_half`: lines, then columns.

        With ``split_rope`` they are those of half a head each: columns, then lines.
        """
        size = self.config.head_dim
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        frequencies = 1.0 / self.config.rope_theta**exponents
        by_line = frequencies[0::2]
        by_column = frequencies[1::2] if self.config.alternating else by_line
        line, column = torch.meshgrid(torch.arange(lines), torch.arange(columns), indexing="ij")
        of_line, of_column = line.reshape(-1, 1) * by_line, column.reshape(-1, 1) * by_column
        if self.config.split_rope:
            return tuple(map(self._make_angles, (of_column, of_line)))
        return (self._make_angles(torch.cat((of_line, of_column), dim=1)),)

    def _make_angles(self, radians: Tensor) -> Tensor:
        cos, sin = radians.cos(), radians.sin()
        both = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), dim=1)
        return both[:, None].to(self.device, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        connectors = (self.connector, *self.deepstack.values())
        norms = (self.pixel_norm, self.patch_norm, self.first_norm, self.last_norm)
        parts = (self.patches, *self.blocks, *connectors, *norms)
        return total_bytes(self.positions) + sum(part.nbytes for part in parts if part is not None)


def _resize_positions(table: Tensor, lines: int, columns: int) -> Tensor:
    """Resize learned positions ``[side * side, hidden]`` to ``[lines * columns, hidden]``."""
    side = isqrt(len(table))
    if (lines, columns) == (side, side):
        return table
    grid = table.float().t().view(1, -1, side, side)
    resized = interpolate(grid, (lines, columns), mode="bilinear", align_corners=True)
    return resized.view(-1, lines * columns).t().to(table.dtype)


def _sum_positions(table: Tensor, lines: int, columns: int) -> Tensor:
    """Add learned positions of columns, then lines (``[2, n, hidden]``) on a grid of patches."""
    by_column, by_line = table[0], table[1]
    return (by_line[:lines, None] + by_column[:columns]).flatten(0, 1)


def _merge_cells(rows: Tensor, side: int, merging: Merging) -> Tensor:
    """Merge rows ``[lines, columns, hidden]`` to cells ``[T, hidden or side**2 * hidden]``."""
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
    """Load a tower and its connectors; raises as :meth:`.WeightReader.read_tensors`."""
    names = config.names
    patches = reader.read_tensors(f"{TOWER_PREFIX}{names.patches}.weight")
    if config.frames > 1:
        patches = patches.float().sum(dim=2).to(patches.dtype)
    bias = None
    if config.patch_biased:
        bias = reader.read_tensors(f"{TOWER_PREFIX}{names.patches}.bias")
    positions = None
    if names.positions is not None:
        end = "" if config.axis_positions else ".weight"
        positions = reader.read_tensors(f"{TOWER_PREFIX}{names.positions}{end}")
        if config.paired_positions:
            positions = positions.transpose(0, 1).contiguous()
    outer = names.pixel_norm, names.patch_norm, names.first_norm, names.last_norm
    pixel, patch, first, last = (
        None if name is None else _load_tower_norm(reader, config, name) for name in outer
    )
    return VisionTower(
        config,
        pixel,
        PlainLinear(patches.flatten(1), bias),
        patch,
        positions,
        first,
        tuple(_load_block(reader, config, layer) for layer in range(config.layers)),
        last,
        _load_connector(reader, config.connector),
        {layer: _load_connector(reader, shape) for layer, shape in config.deepstack},
        reader.dtype,
        reader.device,
    )


def _load_connector(reader: WeightReader, shape: ConnectorShape) -> Connector:
    row_norm, cell_norm = (
        None if norm is None else _load_norm(reader, shape.prefix, norm)
        for norm in (shape.row_norm, shape.cell_norm)
    )
    projections = _load_projections(reader, shape.prefix, shape.projections)
    standard = None
    if shape.standardized:
        bias, scale = (f"{TOWER_PREFIX}{name}" for name in ("std_bias", "std_scale"))
        standard = reader.read_tensors(bias), reader.read_tensors(scale)
    return Connector(shape, standard, row_norm, cell_norm, projections)


def _load_block(reader: WeightReader, config: VisionConfig, layer: int) -> VisionBlock:
    names = config.names
    prefix = f"{names.layers}{layer}."
    found = _load_projections(reader, TOWER_PREFIX, config.layer_projections(layer))
    heads = len(names.heads)
    head_norms = None
    if names.query_norm is not None:
        norms = (f"{prefix}{names.attention}.{one}" for one in (names.query_norm, names.key_norm))
        head_norms = HeadNorms(*(_load_tower_norm(reader, config, norm) for norm in norms))
    after_attention, after_mlp = (
        None if name is None else _load_tower_norm(reader, config, f"{prefix}{name}")
        for name in (names.after_attention, names.after_mlp)
    )
    return VisionBlock(
        _load_tower_norm(reader, config, f"{prefix}{names.attention_norm}"),
        found[:heads],
        head_norms,
        found[heads],
        after_attention,
        _load_tower_norm(reader, config, f"{prefix}{names.mlp_norm}"),
        found[heads + 1 : -1],
        found[-1],
        after_mlp,
        config.activation,
        config.heads,
    )


def _load_tower_norm(reader: WeightReader, config: VisionConfig, name: str) -> VisionNormLayer:
    shape = NormShape(name=name, kind=config.norm_kind, eps=config.norm_eps)
    return _load_norm(reader, TOWER_PREFIX, shape)


def _load_norm(reader: WeightReader, prefix: str, shape: NormShape) -> VisionNormLayer:
    name = f"{prefix}{shape.name}"
    if shape.kind == "bare rms":
        return VisionNormLayer(None, None, shape.eps)
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
