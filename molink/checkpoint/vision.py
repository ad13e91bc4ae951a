"""Describes a vision tower of any family, and how images become tokens.

A tower turns patches of an image into rows; its connector merges neighbouring rows into cells and
projects these to the decoder's width. Each cell fills one placeholder token of the prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Literal

#: molink's prefixes of all tensors of a tower and of a connector.
TOWER_PREFIX, CONNECTOR_PREFIX = "vision.", "vision_connector."
#: Maximum edge of a resized image, in pixels.
MAX_SIDE = 8192

#: Of LayerNorm or RMSNorm, the latter perhaps without weights.
VisionNorm = Literal["rms", "bare rms", "biased layer"]
VisionActivation = Literal["silu", "gelu", "gelu_tanh"]
#: How a cell's rows are merged: their mean, or their elements concatenated by row or by channel.
Merging = Literal["mean", "by row", "by channel"]
#: How an image is prepared. ``square``: resized to one square. ``tiles``: cut into tiles, plus a
#: thumbnail. ``lines`` and ``cells``: resized to whole cells; with ``lines`` each line of cells
#: ends with a token. ``budget``: as many whole cells as an image may have, also of small images.
ImageLayout = Literal["square", "tiles", "lines", "cells", "budget"]


@dataclass(frozen=True, slots=True)
class TowerNames:
    """Names of a tower's modules; those of a layer follow ``layers.INDEX.``; ``None`` if absent.

    ``pixel_norm`` norms a patch's pixels, ``patch_norm`` a projected patch, ``first_norm`` one with
    its position. With ``query_norm`` and ``key_norm`` each head's queries and keys are normed,
    values too, but without weights, and scores are not scaled.
    """

    pixel_norm: str | None = None
    patches: str = "embeddings.patch_embedding"
    patch_norm: str | None = None
    positions: str | None = "embeddings.position_embedding"
    first_norm: str | None = None
    last_norm: str | None = "post_layernorm"
    layers: str = "encoder.layers."
    attention_norm: str = "layer_norm1"
    attention: str = "self_attn"
    #: Queries, keys and values: three tensors, or one merged tensor.
    heads: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    query_norm: str | None = None
    key_norm: str | None = None
    output: str = "out_proj"
    after_attention: str | None = None
    mlp_norm: str = "layer_norm2"
    after_mlp: str | None = None
    #: Gate (if gated), up and down.
    mlp: tuple[str, ...] = ("mlp.fc1", "mlp.fc2")


@dataclass(frozen=True, slots=True, kw_only=True)
class NormShape:
    """A norm of rows; ``offset`` is added to its weights."""

    name: str
    kind: VisionNorm
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A projection ``[outputs, inputs]``; stored as ``[inputs, outputs]`` if ``transposed``."""

    name: str
    inputs: int
    outputs: int
    biased: bool = False
    transposed: bool = False
    #: Whether GELU follows it.
    activated: bool = False

    @property
    def weight_name(self) -> str:
        """Name of its weight."""
        return self.name if self.transposed else f"{self.name}.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorShape:
    """A connector's shape. It merges cells of ``side * side`` tower rows and projects them.

    The names of its tensors begin with ``prefix``. Merged rows are multiplied by ``scale``, and if
    ``standardized`` they become ``(row - std_bias) * std_scale``, of tensors in the tower.
    """

    side: int
    merging: Merging
    projections: tuple[LinearShape, ...]
    row_norm: NormShape | None = None
    cell_norm: NormShape | None = None
    prefix: str = CONNECTOR_PREFIX
    scale: float = 1.0
    standardized: bool = False

    def list_tensors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the connector's tensor shapes by name, for rows of ``hidden_size`` elements."""
        shapes: dict[str, tuple[int, ...]] = {}
        cell = hidden_size if self.merging == "mean" else hidden_size * self.side**2
        for norm, width in ((self.row_norm, hidden_size), (self.cell_norm, cell)):
            if norm is not None:
                shapes |= _norm_tensors(f"{self.prefix}{norm.name}", norm.kind, width)
        for each in self.projections:
            shapes |= _linear_tensors(self.prefix, each)
        if self.standardized:
            shapes |= {f"{TOWER_PREFIX}{name}": (cell,) for name in ("std_bias", "std_scale")}
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """How images are prepared, and how a prompt shows them.

    A pixel becomes ``(pixel / 255 - mean) / std``, by channel. ``size`` is the side of a square or
    tile, or the longest edge of an image; ``longest`` is the longest edge before an image is cut
    into tiles, 0 for no tiles. ``resample`` is Pillow's filter number. A template writes
    ``placeholder`` for an image, which becomes ``opening``, one ``token`` per row, and ``closing``.
    Each line but the last ends with ``line_end``. Images with layout ``cells`` have
    ``least_pixels`` to ``most_pixels``, those with layout ``budget`` at most ``most_pixels``.
    """

    layout: ImageLayout
    placeholder: str
    token: str
    size: int
    opening: str = ""
    closing: str = ""
    line_end: str = ""
    longest: int = 0
    least_pixels: int = 0
    most_pixels: int = 0
    resample: int = 3
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A vision tower: its size, tensor names and connector, and the rules for its images.

    ``position_side`` is the side of the table of learned positions, which is resized to an image's
    grid; with ``axis_positions`` there is instead a table of that many columns and one of as many
    lines, or one of ``paired_positions`` of both. ``flat_patches`` are projected as pixels line by
    line, others as by a convolution. With ``rope_theta``, queries and keys are rotated by a patch's
    row and column, with the same frequencies for both, or ``alternating`` ones; with ``split_rope``
    the column rotates the first half of a head, the row its second. A ``gated`` MLP is ``act(gate)
    * up``. A patch attends to the patches of its window, a square of ``window * window`` patches,
    and in ``full_layers`` to all patches (``window`` 0: in all layers). The patch projection has
    weights for ``frames`` frames; an image is repeated for each of them.

    With ``whole_images``, an image's rows in the decoder attend to the whole image, with
    ``causal_full_layers`` only in layers with a window. ``deepstack`` lists tower layers with
    connectors: the connectors' rows are added to the image's rows after the decoder's first layers,
    one connector per layer (DeepStack, arXiv 2406.04334).
    """

    layers: int
    hidden_size: int
    heads: int
    intermediate_size: int
    patch_size: int
    norm_kind: VisionNorm
    norm_eps: float
    activation: VisionActivation
    connector: ConnectorShape
    rules: ImageRules
    names: TowerNames = field(default_factory=TowerNames)
    gated: bool = False
    biased: bool = True
    patch_biased: bool = True
    position_side: int = 0
    axis_positions: int = 0
    paired_positions: bool = False
    flat_patches: bool = False
    rope_theta: float = 0.0
    alternating: bool = False
    split_rope: bool = False
    window: int = 0
    full_layers: frozenset[int] = frozenset()
    frames: int = 1
    whole_images: bool = False
    causal_full_layers: bool = False
    deepstack: tuple[tuple[int, ConnectorShape], ...] = ()

    @property
    def connectors(self) -> tuple[ConnectorShape, ...]:
        """All connectors. An encoded row concatenates one decoder row from each of them."""
        return self.connector, *(connector for _, connector in self.deepstack)

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.heads

    @property
    def cell_pixels(self) -> int:
        """Side of a cell in pixels."""
        return self.patch_size * self.connector.side

    def count_rows(self, height: int, width: int) -> int:
        """Count the rows of an image of that many pixels.

        Raises:
            ValueError: it doesn't consist of whole cells, or isn't of the tower's only size.
        """
        side, cell = self.rules.size, self.cell_pixels
        if self.rules.most_pixels and height * width > self.rules.most_pixels:
            raise ValueError(f"{width}x{height} pixels; at most {self.rules.most_pixels}")
        if height % cell or width % cell or not 0 < height <= side or not 0 < width <= side:
            raise ValueError(f"{width}x{height} pixels are not whole cells of {cell} up to {side}")
        if self.rules.layout in ("square", "tiles") and (height, width) != (side, side):
            raise ValueError(f"{width}x{height} pixels, not {side}x{side}")
        return height // cell * (width // cell)

    @property
    def image_elements(self) -> int:
        """Peak number of elements of the rows of the largest image in a layer.

        They are the residual, its norm, queries, keys and values (twice if rotated, again for
        windows) and attended rows, or what an MLP keeps; rows of inner layers, and all rows of the
        decoder, which a step may need meanwhile.
        """
        pixels = self.rules.most_pixels or self.rules.size**2
        patches = pixels // self.patch_size**2
        copies = 2 * bool(self.rope_theta) + 4 * bool(self.window)
        copies += 3 * (self.names.query_norm is not None)
        attended = (6 + copies) * self.hidden_size
        inner = (2 + self.gated) * self.intermediate_size + 3 * self.hidden_size
        cells = patches // self.connector.side**2
        kept = (1 + 2 * len(self.deepstack)) * self.connector.projections[-1].outputs
        return patches * max(attended, inner) + cells * kept

    @property
    def projections(self) -> Iterator[str]:
        """Names of all projections but that of patches."""
        for layer in range(self.layers):
            yield from (f"{TOWER_PREFIX}{each.name}" for each in self.layer_projections(layer))
        for connector in self.connectors:
            yield from (f"{connector.prefix}{each.name}" for each in connector.projections)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """All tensors with their shapes."""
        names, width, shapes = self.names, self.hidden_size, dict[str, tuple[int, ...]]()
        frames = () if self.frames == 1 else (self.frames,)
        patch = 3, *frames, self.patch_size, self.patch_size
        pixels = (prod(patch),) if self.flat_patches else patch
        shapes[f"{TOWER_PREFIX}{names.patches}.weight"] = width, *pixels
        if self.patch_biased:
            shapes[f"{TOWER_PREFIX}{names.patches}.bias"] = (width,)
        if names.positions is not None:
            shapes |= self._position_tensors(f"{TOWER_PREFIX}{names.positions}")
        if names.pixel_norm is not None:
            name = f"{TOWER_PREFIX}{names.pixel_norm}"
            shapes |= _norm_tensors(name, self.norm_kind, prod(patch))
        outer = names.patch_norm, names.first_norm, names.last_norm
        norms = [name for name in outer if name is not None]
        for layer in range(self.layers):
            prefix = f"{names.layers}{layer}."
            inner = names.attention_norm, names.after_attention, names.mlp_norm, names.after_mlp
            norms += [f"{prefix}{name}" for name in inner if name is not None]
            for name in filter(None, (names.query_norm, names.key_norm)):
                shapes[f"{TOWER_PREFIX}{prefix}{names.attention}.{name}.weight"] = (self.head_dim,)
            for each in self.layer_projections(layer):
                shapes |= _linear_tensors(TOWER_PREFIX, each)
        for name in norms:
            shapes |= _norm_tensors(f"{TOWER_PREFIX}{name}", self.norm_kind, width)
        for connector in self.connectors:
            shapes |= connector.list_tensors(width)
        return shapes

    def _position_tensors(self, name: str) -> dict[str, tuple[int, ...]]:
        if self.axis_positions:
            count, width = self.axis_positions, self.hidden_size
            return {name: (count, 2, width) if self.paired_positions else (2, count, width)}
        return {f"{name}.weight": (self.position_side**2, self.hidden_size)}

    def layer_projections(self, layer: int) -> tuple[LinearShape, ...]:
        """List a layer's projections: queries, keys, values, output; gate (if gated), up, down."""
        names, width, inner = self.names, self.hidden_size, self.intermediate_size
        prefix = f"{names.layers}{layer}."
        each = 3 * width // len(names.heads)
        outputs = {**dict.fromkeys(names.heads, each), names.output: width}
        attention = (
            LinearShape(
                name=f"{prefix}{names.attention}.{name}",
                inputs=width,
                outputs=rows,
                biased=self.biased,
            )
            for name, rows in outputs.items()
        )
        *wide, down = names.mlp
        ups = (
            LinearShape(name=f"{prefix}{name}", inputs=width, outputs=inner, biased=self.biased)
            for name in wide
        )
        last = LinearShape(name=f"{prefix}{down}", inputs=inner, outputs=width, biased=self.biased)
        return (*attention, *ups, last)


def _norm_tensors(name: str, kind: VisionNorm, width: int) -> dict[str, tuple[int, ...]]:
    kinds: dict[VisionNorm, tuple[str, ...]] = {"rms": ("weight",), "bare rms": ()}
    ends = kinds.get(kind, ("weight", "bias"))
    return {f"{name}.{end}": (width,) for end in ends}


def _linear_tensors(prefix: str, each: LinearShape) -> dict[str, tuple[int, ...]]:
    shape = (each.inputs, each.outputs) if each.transposed else (each.outputs, each.inputs)
    found: dict[str, tuple[int, ...]] = {f"{prefix}{each.weight_name}": shape}
    if each.biased:
        found[f"{prefix}{each.name}.bias"] = (each.outputs,)
    return found
