"""Parses the vision towers of ``config.json``, by architecture.

Only this module knows architectures; :mod:`molink.checkpoint.vision` has the traits in which they
differ.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from molink.checkpoint.config_fields import ConfigFields
from molink.checkpoint.vision import (
    MAX_SIDE,
    TOWER_PREFIX,
    ConnectorShape,
    ImageRules,
    LinearShape,
    NormShape,
    TowerNames,
    VisionActivation,
    VisionConfig,
)
from molink.errors import BrokenModel, UnsupportedModel

_MAX_LAYERS, _MAX_WIDTH, _MAX_PATCH = 256, 2**16, 64
_CLIP_MEAN = 0.48145466, 0.4578275, 0.40821073
_CLIP_STD = 0.26862954, 0.26130258, 0.27577711
_ACTIVATIONS: dict[str, VisionActivation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class _TextShape:
    """Facts of the text model that a connector needs."""

    hidden_size: int
    norm_eps: float


def parse_vision(
    raw: Mapping[str, Any], where: str, hidden_size: int, norm_eps: float
) -> VisionConfig | None:
    """Parse the vision tower of a ``config.json``; ``None`` if there is none that molink supports.

    ``hidden_size`` and ``norm_eps`` are the text model's. Rules are those of the released models;
    :func:`.read_image_rules` replaces them.

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
    size = fields.get_integer("image_size", maximum=MAX_SIDE)
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
    """Gemma 3 (arXiv 2503.19786, §2.1): the mean of each cell; an image has 256 tokens."""
    width = inner.get_integer("hidden_size", maximum=_MAX_WIDTH)
    tokens = outer.get_integer("mm_tokens_per_image", 256, MAX_SIDE)
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


#: Names of Pixtral's modules.
_PIXTRAL_NAMES = TowerNames(
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
)


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
            size=inner.get_integer("image_size", maximum=MAX_SIDE),
            mean=_CLIP_MEAN,
            std=_CLIP_STD,
        ),
        names=_PIXTRAL_NAMES,
        gated=True,
        biased=False,
        patch_biased=False,
        rope_theta=theta,
        alternating=True,
    )


#: Names of Qwen2.5-VL's modules.
_QWEN_NAMES = TowerNames(
    patches="patch_embed.proj",
    positions=None,
    last_norm=None,
    layers="blocks.",
    attention_norm="norm1",
    attention="attn",
    heads=("qkv",),
    output="proj",
    mlp_norm="norm2",
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def _qwen_names(inner: ConfigFields) -> TowerNames:
    """Names of a Qwen's modules; llama.cpp may split queries, keys and values (``split_qkv``)."""
    is_split = inner.get_boolean("split_qkv", False)
    return replace(_QWEN_NAMES, heads=("q", "k", "v")) if is_split else _QWEN_NAMES


def _qwen2_5(outer: ConfigFields, inner: ConfigFields, text: _TextShape) -> VisionConfig:
    """Qwen2.5-VL (arXiv 2502.13923, §2.1.1): windows in most layers."""
    width, side = (
        inner.get_integer("hidden_size", maximum=_MAX_WIDTH),
        inner.get_integer("spatial_merge_size", maximum=_MAX_PATCH),
    )
    patch = inner.get_integer("patch_size", maximum=_MAX_PATCH)
    cell = patch * side
    merged = width * side**2
    return VisionConfig(
        layers=inner.get_integer("depth", maximum=_MAX_LAYERS),
        hidden_size=width,
        heads=inner.get_integer("num_heads", maximum=_MAX_WIDTH),
        intermediate_size=inner.get_integer("intermediate_size", maximum=_MAX_WIDTH),
        patch_size=patch,
        norm_kind="rms",
        norm_eps=1e-6,
        activation=_parse_activation(inner, "hidden_act", "silu"),
        connector=ConnectorShape(
            side=side,
            merging="by row",
            row_norm=NormShape(name="ln_q", kind="rms", eps=1e-6),
            projections=(
                LinearShape(
                    name="mlp.0", inputs=merged, outputs=merged, biased=True, activated=True
                ),
                LinearShape(name="mlp.2", inputs=merged, outputs=text.hidden_size, biased=True),
            ),
        ),
        rules=ImageRules(
            layout="cells",
            placeholder="<|image_pad|>",
            token="<|image_pad|>",
            size=MAX_SIDE // cell * cell,
            least_pixels=56 * 56,
            most_pixels=28 * 28 * 1280,
            mean=_CLIP_MEAN,
            std=_CLIP_STD,
        ),
        names=_qwen_names(inner),
        gated=True,
        patch_biased=False,
        rope_theta=10000.0,
        window=inner.get_integer("window_size", maximum=MAX_SIDE) // cell * side,
        full_layers=frozenset(inner.get_integers("fullatt_block_indexes")),
        frames=inner.get_integer("temporal_patch_size", maximum=_MAX_PATCH),
    )


def _qwen3(outer: ConfigFields, inner: ConfigFields, text: _TextShape) -> VisionConfig:
    """Parse Qwen3-VL's (arXiv 2511.21631, §2) or Qwen3.5's tower: learned and rotary positions."""
    side = inner.get_integer("spatial_merge_size", maximum=_MAX_PATCH)
    patch = inner.get_integer("patch_size", maximum=_MAX_PATCH)
    width, layers = (
        inner.get_integer("hidden_size", maximum=_MAX_WIDTH),
        inner.get_integer("depth", maximum=_MAX_LAYERS),
    )
    rope = ConfigFields(inner.get_object("rope_parameters"), inner.where)
    cell, merged = patch * side, width * side**2
    after = inner.get_integers("deepstack_visual_indexes")
    if len({*after}) < len(after) or not all(0 <= layer < layers for layer in after):
        raise BrokenModel(
            f"{inner.where}: deepstack_visual_indexes {list(after)[:9]} of {layers} layers"
        )
    connector = ConnectorShape(
        side=side,
        merging="by row",
        row_norm=NormShape(name="norm", kind="biased layer", eps=1e-6),
        projections=(
            LinearShape(
                name="linear_fc1", inputs=merged, outputs=merged, biased=True, activated=True
            ),
            LinearShape(name="linear_fc2", inputs=merged, outputs=text.hidden_size, biased=True),
        ),
    )
    later = replace(connector, row_norm=None, cell_norm=connector.row_norm)
    return VisionConfig(
        layers=layers,
        hidden_size=width,
        heads=inner.get_integer("num_heads", maximum=_MAX_WIDTH),
        intermediate_size=inner.get_integer("intermediate_size", maximum=_MAX_WIDTH),
        patch_size=patch,
        norm_kind="biased layer",
        norm_eps=1e-6,
        activation=_parse_activation(inner, "hidden_act", "gelu_pytorch_tanh"),
        connector=connector,
        rules=ImageRules(
            layout="cells",
            placeholder="<|image_pad|>",
            token="<|image_pad|>",
            size=MAX_SIDE // cell * cell,
            least_pixels=256 * 256,
            most_pixels=4096 * 4096,
        ),
        names=replace(
            _qwen_names(inner), positions="pos_embed", mlp=("mlp.linear_fc1", "mlp.linear_fc2")
        ),
        position_side=isqrt(inner.get_integer("num_position_embeddings", maximum=MAX_SIDE**2)),
        rope_theta=rope.get_positive("rope_theta", 10000.0),
        frames=inner.get_integer("temporal_patch_size", maximum=_MAX_PATCH),
        deepstack=tuple(
            (layer, replace(later, prefix=f"{TOWER_PREFIX}deepstack_merger_list.{index}."))
            for layer, index in sorted((layer, index) for index, layer in enumerate(after))
        ),
    )


#: Names of Gemma 4's modules.
_GEMMA4_NAMES = TowerNames(
    patches="patch_embedder.input_proj",
    positions="patch_embedder.position_embedding_table",
    last_norm=None,
    attention_norm="input_layernorm",
    heads=("q_proj.linear", "k_proj.linear", "v_proj.linear"),
    query_norm="q_norm",
    key_norm="k_norm",
    output="o_proj.linear",
    after_attention="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp=("mlp.gate_proj.linear", "mlp.up_proj.linear", "mlp.down_proj.linear"),
    after_mlp="post_feedforward_layernorm",
)


def _gemma4(outer: ConfigFields, inner: ConfigFields, text: _TextShape) -> VisionConfig:
    """Gemma 4: positions by axis, norms of heads and after modules, the mean of each cell."""
    for name in ("use_clipped_linears", "attention_bias"):
        if inner.get_boolean(name, False):
            raise UnsupportedModel(f"{inner.where}: {name} is not supported")
    width, heads = (
        inner.get_integer("hidden_size", maximum=_MAX_WIDTH),
        inner.get_integer("num_attention_heads", maximum=_MAX_WIDTH),
    )
    sizes = heads * inner.get_integer("head_dim"), inner.get_integer("num_key_value_heads")
    if sizes != (width, heads):
        raise UnsupportedModel(f"{inner.where}: heads other than {heads} of {width // heads}")
    side, patch = (
        inner.get_integer("pooling_kernel_size", maximum=_MAX_PATCH),
        inner.get_integer("patch_size", maximum=_MAX_PATCH),
    )
    positions = inner.get_integer("position_embedding_size", maximum=MAX_SIDE**2)
    rope = ConfigFields(inner.get_object("rope_parameters"), inner.where)
    connector = _gemma4_connector(inner, width, text)
    return VisionConfig(
        layers=inner.get_integer("num_hidden_layers", maximum=_MAX_LAYERS),
        hidden_size=width,
        heads=heads,
        intermediate_size=inner.get_integer("intermediate_size", maximum=_MAX_WIDTH),
        patch_size=patch,
        norm_kind="rms",
        norm_eps=inner.get_positive("rms_norm_eps"),
        activation=_parse_activation(inner, "hidden_activation", "gelu_pytorch_tanh"),
        connector=replace(
            connector,
            side=side,
            scale=width**0.5,
            standardized=inner.get_boolean("standardize", False),
        ),
        rules=_gemma4_rules(patch * side, positions * patch),
        names=_GEMMA4_NAMES,
        gated=True,
        biased=False,
        patch_biased=False,
        axis_positions=positions,
        flat_patches=True,
        rope_theta=rope.get_positive("rope_theta", 100.0),
        split_rope=True,
        whole_images=_attends_to_images(outer),
        causal_full_layers=True,
    )


def _gemma4_connector(inner: ConfigFields, width: int, text: _TextShape) -> ConnectorShape:
    project = LinearShape(name="embedding_projection", inputs=width, outputs=text.hidden_size)
    norm = NormShape(
        name="embedding_pre_projection_norm",
        kind="bare rms",
        eps=inner.get_positive("rms_norm_eps"),
    )
    return ConnectorShape(side=1, merging="mean", projections=(project,), cell_norm=norm)


def _gemma4_rules(cell: int, longest: int) -> ImageRules:
    """Rules for cells of that many pixels a side, and images of up to ``longest``."""
    return ImageRules(
        layout="budget",
        placeholder="<|image|>",
        token="<|image|>",
        opening="<|image>",
        closing="<image|>",
        size=min(longest, MAX_SIDE) // cell * cell,
        most_pixels=280 * cell**2,
    )


def _attends_to_images(outer: ConfigFields) -> bool:
    """Whether rows of an image attend to all of it in a Gemma 4's layers with a window."""
    return outer.get_object("text_config").get("use_bidirectional_attention") == "vision"


#: Names of the modules of Gemma 4 12B.
_UNIFIED_NAMES = TowerNames(
    pixel_norm="patch_ln1",
    patches="patch_dense",
    patch_norm="patch_ln2",
    positions="pos_embedding",
    first_norm="pos_norm",
    last_norm=None,
)


def _gemma4_unified(outer: ConfigFields, inner: ConfigFields, text: _TextShape) -> VisionConfig:
    """Gemma 4 12B, whose patches are cells, and whose tower has no layers."""
    width = inner.get_integer("mm_embed_dim", maximum=_MAX_WIDTH)
    if inner.get_integer("output_proj_dims", width) != width:
        raise UnsupportedModel(f"{inner.where}: output_proj_dims other than {width}")
    cell = inner.get_integer("patch_size", maximum=_MAX_PATCH) * inner.get_integer(
        "pooling_kernel_size", maximum=_MAX_PATCH
    )
    positions = inner.get_integer("mm_posemb_size", maximum=MAX_SIDE**2)
    rules = _gemma4_rules(cell, positions * cell)
    return VisionConfig(
        layers=0,
        hidden_size=width,
        heads=1,
        intermediate_size=width,
        patch_size=cell,
        norm_kind="biased layer",
        norm_eps=1e-5,
        activation="gelu_tanh",
        connector=_gemma4_connector(inner, width, text),
        rules=replace(rules, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
        names=_UNIFIED_NAMES,
        axis_positions=positions,
        paired_positions=True,
        flat_patches=True,
        whole_images=_attends_to_images(outer),
        causal_full_layers=True,
    )


_IDEFICS_DEFAULTS = {
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 32,
}
_QWEN35_DEFAULTS = {
    "hidden_size": 1152,
    "depth": 27,
    "num_heads": 16,
    "intermediate_size": 4304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}
_QWEN3_DEFAULTS = {**_QWEN35_DEFAULTS, "deepstack_visual_indexes": [8, 16, 24]}
#: Default values of fields that a tower's config omits.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen3VLForConditionalGeneration": _QWEN3_DEFAULTS,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_DEFAULTS,
    "Qwen3_5ForConditionalGeneration": _QWEN35_DEFAULTS,
    "Qwen3_5MoeForConditionalGeneration": _QWEN35_DEFAULTS,
    "Qwen2_5_VLForConditionalGeneration": {
        "hidden_size": 3584,
        "depth": 32,
        "num_heads": 16,
        "intermediate_size": 3420,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "SmolVLMForConditionalGeneration": _IDEFICS_DEFAULTS,
    "Idefics3ForConditionalGeneration": _IDEFICS_DEFAULTS,
    "Gemma4UnifiedForConditionalGeneration": {
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "mm_embed_dim": 3840,
        "mm_posemb_size": 1120,
        "rms_norm_eps": 1e-6,
    },
    "Gemma4ForConditionalGeneration": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "pooling_kernel_size": 3,
        "patch_size": 16,
        "position_embedding_size": 10240,
    },
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
    "Gemma4ForConditionalGeneration": _gemma4,
    "Gemma4UnifiedForConditionalGeneration": _gemma4_unified,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5,
    "Qwen3VLForConditionalGeneration": _qwen3,
    "Qwen3VLMoeForConditionalGeneration": _qwen3,
    "Qwen3_5ForConditionalGeneration": _qwen3,
    "Qwen3_5MoeForConditionalGeneration": _qwen3,
}


def _parse_activation(fields: ConfigFields, name: str, default: str) -> VisionActivation:
    found = fields.get_string(name, default)
    if found not in _ACTIVATIONS:
        raise UnsupportedModel(f"{fields.where}: {name} {found[:40]!a} is not supported")
    return _ACTIVATIONS[found]
