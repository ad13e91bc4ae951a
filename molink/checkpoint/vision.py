"""The vision tower of a model that sees, and how its images become tokens: facts of all families.

A tower turns patches of an image into rows; its connector merges neighbouring rows into cells and
projects these to the decoder's width. A cell stands for one placeholder token of the prompt.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from molink.checkpoint.config_fields import ConfigFields, read_json
from molink.errors import BrokenModel, UnsupportedModel

#: Prefixes of all tensors of a tower and of a connector, whatever the checkpoint calls them.
TOWER_PREFIX, CONNECTOR_PREFIX = "vision.", "vision_connector."
PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"

VisionNorm = Literal["rms", "biased layer"]
VisionActivation = Literal["silu", "gelu", "gelu_tanh"]
#: How a cell is made of its rows: their mean, or their elements side by side, by row or by channel.
Merging = Literal["mean", "by row", "by channel"]
#: How an image is cut: resized to one square; into tiles and a small whole one; to whole cells, and
#: each line of these ends with a token.
ImageLayout = Literal["square", "tiles", "lines"]

_MAX_LAYERS, _MAX_WIDTH, _MAX_PATCH, _MAX_SIDE = 256, 2**16, 64, 8192
_ACTIVATIONS: dict[str, VisionActivation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class TowerNames:
    """Names of a tower's modules; those of a layer follow ``layers.INDEX.``; ``None`` if absent."""

    patches: str = "embeddings.patch_embedding"
    positions: str | None = "embeddings.position_embedding"
    first_norm: str | None = None
    last_norm: str | None = "post_layernorm"
    layers: str = "encoder.layers."
    attention_norm: str = "layer_norm1"
    attention: str = "self_attn"
    output: str = "out_proj"
    mlp_norm: str = "layer_norm2"
    #: Gate, if there is one, up and down.
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
    """A projection ``[outputs, inputs]``; a ``transposed`` one is stored the other way round."""

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
    """From a tower's rows to rows of the decoder: cells of ``side * side`` rows, projected."""

    side: int
    merging: Merging
    projections: tuple[LinearShape, ...]
    row_norm: NormShape | None = None
    cell_norm: NormShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """How images are prepared, and how a prompt shows them.

    Pixels are divided by 255, less ``mean``, divided by ``std``, each by channel. ``size`` is the
    side of a square or tile, or the longest edge of an image; ``longest`` that of an image before
    it is cut into tiles, 0 for no tiles. ``resample`` is Pillow's number of a filter. A template
    writes ``placeholder`` for an image; ``token`` stands for each of its rows, between ``opening``
    and ``closing``. Each line but the last ends with ``line_end``.
    """

    layout: ImageLayout
    placeholder: str
    token: str
    size: int
    opening: str = ""
    closing: str = ""
    line_end: str = ""
    longest: int = 0
    resample: int = 3
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A vision tower: its size, names and connector, and the rules of its images.

    ``position_side`` is the side of the table of learned positions; ``rope_theta`` rotates queries
    and keys by a patch's line and column. A ``gated`` MLP is ``act(gate) * up``. With
    ``whole_images`` an image's rows in the decoder attend to all of the image.
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
    position_side: int = 0
    rope_theta: float = 0.0
    whole_images: bool = False

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.heads

    @property
    def cell_pixels(self) -> int:
        """Side of a cell in pixels."""
        return self.patch_size * self.connector.side

    def count_rows(self, height: int, width: int) -> int:
        """Rows of an image of that many pixels.

        Raises:
            ValueError: it has no whole cells, or isn't of the tower's only size.
        """
        side, cell = self.rules.size, self.cell_pixels
        if height % cell or width % cell or not 0 < height <= side or not 0 < width <= side:
            raise ValueError(f"{width}x{height} pixels are not whole cells of {cell} up to {side}")
        if self.rules.layout != "lines" and (height, width) != (side, side):
            raise ValueError(f"{width}x{height} pixels, not {side}x{side}")
        return height // cell * (width // cell)

    @property
    def image_elements(self) -> int:
        """Peak number of elements of the rows of the largest image in a layer.

        They are the residual, its norm, queries, keys and values (twice if rotated) and attended
        rows, or what an MLP keeps.
        """
        patches = (self.rules.size // self.patch_size) ** 2
        attended = (6 + 2 * bool(self.rope_theta)) * self.hidden_size
        inner = (2 + self.gated) * self.intermediate_size + 3 * self.hidden_size
        return patches * max(attended, inner)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """All tensors with their shapes."""
        names, width, shapes = self.names, self.hidden_size, dict[str, tuple[int, ...]]()
        patch = 3, self.patch_size, self.patch_size
        shapes[f"{TOWER_PREFIX}{names.patches}.weight"] = width, *patch
        if self.biased:
            shapes[f"{TOWER_PREFIX}{names.patches}.bias"] = (width,)
        if names.positions is not None:
            table = self.position_side**2, width
            shapes[f"{TOWER_PREFIX}{names.positions}.weight"] = table
        norms = [name for name in (names.first_norm, names.last_norm) if name is not None]
        for layer in range(self.layers):
            prefix = f"{names.layers}{layer}."
            norms += [f"{prefix}{names.attention_norm}", f"{prefix}{names.mlp_norm}"]
            for each in self.layer_projections(layer):
                shapes |= _linear_tensors(TOWER_PREFIX, each)
        for name in norms:
            shapes |= _norm_tensors(f"{TOWER_PREFIX}{name}", self.norm_kind, width)
        return shapes | self._connector_tensors

    def layer_projections(self, layer: int) -> tuple[LinearShape, ...]:
        """A layer's projections: queries, keys, values, output; gate if there is one, up, down."""
        names, width, inner = self.names, self.hidden_size, self.intermediate_size
        prefix = f"{names.layers}{layer}."
        attention = (
            LinearShape(
                name=f"{prefix}{names.attention}.{name}",
                inputs=width,
                outputs=width,
                biased=self.biased,
            )
            for name in ("q_proj", "k_proj", "v_proj", names.output)
        )
        *wide, down = names.mlp
        ups = (
            LinearShape(name=f"{prefix}{name}", inputs=width, outputs=inner, biased=self.biased)
            for name in wide
        )
        last = LinearShape(name=f"{prefix}{down}", inputs=inner, outputs=width, biased=self.biased)
        return (*attention, *ups, last)

    @property
    def _connector_tensors(self) -> dict[str, tuple[int, ...]]:
        connector, shapes = self.connector, dict[str, tuple[int, ...]]()
        for norm in (connector.row_norm, connector.cell_norm):
            if norm is not None:
                name = f"{CONNECTOR_PREFIX}{norm.name}"
                shapes |= _norm_tensors(name, norm.kind, self.hidden_size)
        for each in connector.projections:
            shapes |= _linear_tensors(CONNECTOR_PREFIX, each)
        return shapes


def _norm_tensors(name: str, kind: VisionNorm, width: int) -> dict[str, tuple[int, ...]]:
    ends = ("weight",) if kind == "rms" else ("weight", "bias")
    return {f"{name}.{end}": (width,) for end in ends}


def _linear_tensors(prefix: str, each: LinearShape) -> dict[str, tuple[int, ...]]:
    shape = (each.inputs, each.outputs) if each.transposed else (each.outputs, each.inputs)
    found: dict[str, tuple[int, ...]] = {f"{prefix}{each.weight_name}": shape}
    if each.biased:
        found[f"{prefix}{each.name}.bias"] = (each.outputs,)
    return found


# --- families ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TextShape:
    """What a connector takes from the text model."""

    hidden_size: int
    norm_eps: float


def parse_vision(
    raw: Mapping[str, Any], where: str, hidden_size: int, norm_eps: float
) -> VisionConfig | None:
    """Parse the vision tower of a ``config.json``; ``None`` if there is none that molink computes.

    ``hidden_size`` and ``norm_eps`` are the text model's. Rules are those of the released models;
    :func:`read_image_rules` replaces them.

    Raises:
        BrokenModel: a field is invalid.
        UnsupportedModel: a feature of such a tower is not implemented.
    """
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or name not in _TOWERS:
        return None
    parse = _TOWERS[name]
    outer = ConfigFields(raw, where)
    given = outer.get_object("vision_config").items()
    fields = _DEFAULTS[name] | {key: value for key, value in given if value is not None}
    inner = ConfigFields(fields, f"{where}: vision_config")
    vision = parse(outer, inner, _TextShape(hidden_size, norm_eps))
    if vision.hidden_size % vision.heads or vision.head_dim % 4:
        raise BrokenModel(f"{inner.where}: {vision.hidden_size} is not {vision.heads} whole heads")
    return vision


def _siglip(
    fields: ConfigFields,
    connector: ConnectorShape,
    rules: ImageRules,
    *,
    whole_images: bool = False,
) -> VisionConfig:
    """SigLIP (arXiv 2303.15343), also with Idefics' or SmolVLM's name."""
    patch = fields.get_integer("patch_size", maximum=_MAX_PATCH)
    size = fields.get_integer("image_size", maximum=_MAX_SIDE)
    return VisionConfig(
        layers=fields.get_integer("num_hidden_layers", 12, _MAX_LAYERS),
        hidden_size=fields.get_integer("hidden_size", maximum=_MAX_WIDTH),
        heads=fields.get_integer("num_attention_heads", maximum=_MAX_WIDTH),
        intermediate_size=fields.get_integer("intermediate_size", maximum=_MAX_WIDTH),
        patch_size=patch,
        norm_kind="biased layer",
        norm_eps=fields.get_positive("layer_norm_eps", 1e-6),
        activation=_parse_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
        connector=connector,
        rules=replace(rules, size=size),
        position_side=size // patch,
        whole_images=whole_images,
    )


def _idefics3(outer: ConfigFields, inner: ConfigFields, text: _TextShape) -> VisionConfig:
    """Idefics 3 (arXiv 2408.12637, §2.2) and SmolVLM: pixel shuffle and one projection."""
    side = outer.get_integer("scale_factor", 2, _MAX_PATCH)
    width = inner.get_integer("hidden_size", maximum=_MAX_WIDTH)
    project = LinearShape(
        name="modality_projection.proj", inputs=width * side**2, outputs=text.hidden_size
    )
    connector = ConnectorShape(side=side, merging="by row", projections=(project,))
    rules = ImageRules(
        layout="tiles",
        placeholder="<image>",
        token="<image>",
        opening="<fake_token_around_image><global-img>",
        closing="<fake_token_around_image>",
        size=0,
        longest=1456,
        resample=1,
    )
    return _siglip(inner, connector, rules)


def _gemma3(outer: ConfigFields, inner: ConfigFields, text: _TextShape) -> VisionConfig:
    """Gemma 3 (arXiv 2503.19786, §2.1): means of cells, so many that an image has 256 tokens."""
    width = inner.get_integer("hidden_size", maximum=_MAX_WIDTH)
    tokens = outer.get_integer("mm_tokens_per_image", 256, _MAX_SIDE)
    patches = inner.get_integer("image_size") // inner.get_integer("patch_size")
    cells = int(tokens**0.5)
    if cells**2 != tokens or patches % cells:
        raise BrokenModel(
            f"{outer.where}: mm_tokens_per_image {tokens} does not fit {patches} patches a side"
        )
    project = LinearShape(
        name="mm_input_projection_weight", inputs=width, outputs=text.hidden_size, transposed=True
    )
    eps = inner.get_positive("layer_norm_eps", 1e-6)
    connector = ConnectorShape(
        side=patches // cells,
        merging="mean",
        projections=(project,),
        cell_norm=NormShape(name="mm_soft_emb_norm", kind="rms", eps=eps, offset=1.0),
    )
    rules = ImageRules(
        layout="square",
        placeholder="<start_of_image>",
        token="<image_soft_token>",
        opening="\n\n<start_of_image>",
        closing="<end_of_image>\n\n",
        size=0,
        resample=2,
    )
    return _siglip(inner, connector, rules, whole_images=True)


def _mistral3(outer: ConfigFields, inner: ConfigFields, text: _TextShape) -> VisionConfig:
    """Pixtral's tower (arXiv 2410.07073, §2.2) with Mistral 3's merged patches."""
    kind = inner.get_string("model_type", "pixtral")
    if kind != "pixtral" or outer.get_value("vision_feature_layer") not in (None, -1):
        raise UnsupportedModel(f"{outer.where}: not the last layer of Pixtral, but {kind[:40]!a}")
    width, hidden = inner.get_integer("hidden_size", maximum=_MAX_WIDTH), text.hidden_size
    side = outer.get_integer("spatial_merge_size", 2, _MAX_PATCH)
    biased = outer.get_boolean("multimodal_projector_bias", False)
    connector = ConnectorShape(
        side=side,
        merging="by channel",
        row_norm=NormShape(name="norm", kind="rms", eps=text.norm_eps),
        projections=(
            LinearShape(name="patch_merger.merging_layer", inputs=width * side**2, outputs=width),
            LinearShape(
                name="linear_1", inputs=width, outputs=hidden, biased=biased, activated=True
            ),
            LinearShape(
                name="linear_2", inputs=text.hidden_size, outputs=text.hidden_size, biased=biased
            ),
        ),
    )
    if _parse_activation(outer, "projector_hidden_act", "gelu") != "gelu":
        raise UnsupportedModel(f"{outer.where}: projector_hidden_act is not gelu")
    rope = ConfigFields(inner.get_object("rope_parameters"), inner.where)
    theta = rope.get_positive("rope_theta", inner.get_positive("rope_theta", 10000.0))
    return VisionConfig(
        layers=inner.get_integer("num_hidden_layers", maximum=_MAX_LAYERS),
        hidden_size=width,
        heads=inner.get_integer("num_attention_heads", maximum=_MAX_WIDTH),
        intermediate_size=inner.get_integer("intermediate_size", maximum=_MAX_WIDTH),
        patch_size=inner.get_integer("patch_size", maximum=_MAX_PATCH),
        norm_kind="rms",
        norm_eps=1e-5,
        activation=_parse_activation(inner, "hidden_act", "gelu"),
        connector=connector,
        rules=ImageRules(
            layout="lines",
            placeholder="[IMG]",
            token="[IMG]",
            closing="[IMG_END]",
            line_end="[IMG_BREAK]",
            size=inner.get_integer("image_size", maximum=_MAX_SIDE),
            mean=(0.48145466, 0.4578275, 0.40821073),
            std=(0.26862954, 0.26130258, 0.27577711),
        ),
        names=TowerNames(
            patches="patch_conv",
            positions=None,
            first_norm="ln_pre",
            last_norm=None,
            layers="transformer.layers.",
            attention_norm="attention_norm",
            attention="attention",
            output="o_proj",
            mlp_norm="ffn_norm",
            mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
        ),
        gated=True,
        biased=False,
        rope_theta=theta,
    )


_IDEFICS_DEFAULTS = {
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 32,
}
#: Defaults of absent fields of towers.
_DEFAULTS: dict[str, dict[str, int]] = {
    "SmolVLMForConditionalGeneration": _IDEFICS_DEFAULTS,
    "Idefics3ForConditionalGeneration": _IDEFICS_DEFAULTS,
    "Gemma3ForConditionalGeneration": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "image_size": 224,
        "patch_size": 16,
    },
    "Mistral3ForConditionalGeneration": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "image_size": 1540,
        "patch_size": 14,
    },
}
_TOWERS: dict[str, Callable[[ConfigFields, ConfigFields, _TextShape], VisionConfig]] = {
    "SmolVLMForConditionalGeneration": _idefics3,
    "Idefics3ForConditionalGeneration": _idefics3,
    "Mistral3ForConditionalGeneration": _mistral3,
    "Gemma3ForConditionalGeneration": _gemma3,
}


def _parse_activation(fields: ConfigFields, name: str, default: str) -> VisionActivation:
    found = fields.get_string(name, default)
    if found not in _ACTIVATIONS:
        raise UnsupportedModel(f"{fields.where}: {name} {found[:40]!a} is not supported")
    return _ACTIVATIONS[found]


# --- images --------------------------------------------------------------------------------------


def read_image_rules(folder: Path, vision: VisionConfig) -> VisionConfig | None:
    """Return the tower with the image rules of its folder; ``None`` if the folder has none.

    Raises:
        BrokenModel: the file is invalid, or contradicts the tower.
        UnsupportedModel: it asks for something that is not implemented.
    """
    for name in (PREPROCESSOR_FILE, PROCESSOR_FILE):
        path = folder / name
        if path.is_file():
            fields = ConfigFields(read_json(path), str(path))
            inner = fields.get_object("image_processor")
            if name == PREPROCESSOR_FILE or inner:
                fields = ConfigFields(inner, str(path)) if inner else fields
                return replace(vision, rules=_parse_rules(fields, vision))
    return None


def _parse_rules(fields: ConfigFields, vision: VisionConfig) -> ImageRules:
    rules, where = vision.rules, fields.where
    for name in ("do_rescale", "do_normalize", "do_resize"):
        if not fields.get_boolean(name, True):
            raise UnsupportedModel(f"{where}: {name} false is not supported")
    if abs(fields.get_positive("rescale_factor", 1 / 255) - 1 / 255) > 1e-6:
        raise UnsupportedModel(f"{where}: a rescale_factor other than 1/255 is not supported")
    resample = fields.get_count("resample", rules.resample, 5)
    mean, std = (_parse_channels(fields, f"image_{name}") for name in ("mean", "std"))
    made = replace(rules, resample=resample, mean=mean or rules.mean, std=std or rules.std)
    if any(number <= 0 for number in made.std):
        raise BrokenModel(f"{where}: image_std must be positive")
    size = ConfigFields(fields.get_object("size"), f"{where}: size")
    longest = size.get_integer("longest_edge", max(rules.longest, rules.size), _MAX_SIDE)
    if rules.layout == "lines":
        return replace(made, size=longest // vision.cell_pixels * vision.cell_pixels)
    side = size.get_integer("height", rules.size, _MAX_SIDE)
    if rules.layout == "tiles":
        tile = ConfigFields(fields.get_object("max_image_size"), f"{where}: max_image_size")
        side = tile.get_integer("longest_edge", rules.size, _MAX_SIDE)
        tiled = fields.get_boolean("do_image_splitting", True)
        made = replace(made, longest=longest * tiled)
    if side != rules.size:
        raise BrokenModel(f"{where}: images of {side} pixels a side, in config.json {rules.size}")
    return made


def _parse_channels(fields: ConfigFields, name: str) -> tuple[float, float, float] | None:
    if fields.get_value(name) is None:
        return None
    numbers = fields.get_numbers(name)
    if len(numbers) != 3:
        raise BrokenModel(f"{fields.where}: {name} must have three numbers")
    return numbers[0], numbers[1], numbers[2]
