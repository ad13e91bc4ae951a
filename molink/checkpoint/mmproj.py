"""Translates an mmproj file, in which llama.cpp keeps a GGUF model's vision tower.

Names and values are those of llama.cpp's converter (``conversion/``, ``tools/mtmd``). Its
metadata, ``clip.*``, become the fields of a multimodal model's ``config.json`` and of its image
processor.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.families import ARCHITECTURES
from molink.checkpoint.multimodal import UNREAD_TOWER
from molink.checkpoint.vision import TOWER_PREFIX, ConnectorShape, VisionConfig
from molink.errors import BrokenModel
from molink.gguf.architecture import MMPROJ_ARCHITECTURE
from molink.gguf.gguf_file import GgufFile, GgufTensor
from molink.gguf.tensor_mapping import MappedTensor, map_tensor

_VISION, _PATCHES = "clip.vision.", "v.patch_embd"
#: A patch's weights for the second frame.
_SECOND_FRAME = f"{_PATCHES}.weight.1"
#: The embedding of ``[IMG_BREAK]``, which the text model has, and audio.
_UNREAD = ("v.token_embd.", "a.", "mm.a.")
_MAX_SIZE = 1 << 20
#: Side of Qwen2.5-VL's windows in pixels, which llama.cpp's files don't state.
_QWEN_WINDOW = 112

#: Fields of ``config.json``, of its ``vision_config`` and of the image processor.
_Fields = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Projector:
    """How a projector type is translated.

    ``architectures`` has the multimodal ``architectures`` entry by that of the text model. The
    connector's norm and projections have the GGUF names ``norm`` and ``projections``.
    """

    architectures: Mapping[str, str]
    describe: Callable[["_ClipFile"], _Fields]
    norm: str
    projections: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VisionFile:
    """A vision tower in molink's terms, or the reason why it is left out.

    ``config`` is the multimodal model's ``config.json``, ``processor`` its
    ``preprocessor_config.json``.
    """

    config: dict[str, Any]
    processor: dict[str, Any]
    tensors: list[MappedTensor]


@dataclass(frozen=True, slots=True)
class _ClipFile:
    """Access to an mmproj file; errors name the file."""

    file: GgufFile

    @property
    def projector(self) -> str:
        """The projector type; files with audio, too, have one for each."""
        found = self.file.metadata
        key = "clip.projector_type"
        return found.get_string(f"{_VISION}projector_type" if key not in found else key)

    def get_size(self, key: str, default: int | None = None) -> int:
        return self.file.metadata.get_integer(f"{_VISION}{key}", default, _MAX_SIZE)

    def get_pixels(self, key: str, default: int) -> int:
        return self.file.metadata.get_integer(f"{_VISION}{key}", default)

    def get_shape(self, name: str, dimensions: int = 2) -> tuple[int, ...]:
        tensor = self.file.tensors.get(name)
        if tensor is None or len(tensor.shape) != dimensions:
            raise BrokenModel(
                f"{self.file.path}: there is no tensor {name} of {dimensions} dimensions"
            )
        return tensor.shape

    @property
    def inner_size(self) -> int:
        """Width of the MLPs; their metadata are 0 in older files."""
        return next(
            (side for side in self.get_shape("v.blk.0.ffn_up.weight") if side != self.width),
            self.width,
        )

    @property
    def width(self) -> int:
        return self.get_size("embedding_length")

    @property
    def is_mlp_swapped(self) -> bool:
        """Whether ``ffn_up`` and ``ffn_down`` have each other's names, as in older files."""
        return self.get_shape("v.blk.0.ffn_up.weight") == (self.width, self.inner_size) and (
            self.inner_size != self.width
        )

    @property
    def pixel_scales(self) -> dict[str, Any]:
        """Fields of the image processor that scale pixels."""
        found = self.file.metadata
        return {
            f"image_{name}": found.get_numbers(f"{_VISION}image_{name}", 3)
            for name in ("mean", "std")
        }


def read_vision_file(file: GgufFile, text: dict[str, Any], model: str) -> VisionFile:
    """Translate an mmproj file beside the GGUF file ``model``, whose config is ``text``.

    A tower that is not supported, or another model's, is left out, and the config says why: one
    file in a folder of several models must not keep the others from being served.

    Raises:
        BrokenModel: the file is inconsistent.
    """
    found = file.metadata.get_string("general.architecture")
    if found != MMPROJ_ARCHITECTURE:
        raise BrokenModel(f"{file.path} is not a vision tower (mmproj), but {found[:80]!r}")
    clip, (name,) = _ClipFile(file), text["architectures"]
    projector = _PROJECTORS.get(clip.projector)
    outer = None if projector is None else projector.architectures.get(name)
    if projector is None or outer is None:
        return _leave_out(file, text, f"has the projector {clip.projector[:40]!a}")
    inner = {key: value for key, value in text.items() if key != "architectures"}
    about, tower, processor = projector.describe(clip)
    config = {
        "architectures": [outer],
        "text_config": {**inner, "model_type": ARCHITECTURES[name]},
        "vision_config": tower,
        **about,
    }
    parsed = ModelConfig.parse_config(config, str(file.path))
    if parsed.vision is None:
        return VisionFile(config, processor, [])
    vision = parsed.vision
    width, deepstack = _read_width(clip, projector, vision), len(vision.deepstack)
    if width != parsed.hidden_size:
        wrong = f"its rows have {width} elements, those of {model} {parsed.hidden_size}"
        return _leave_out(file, text, f"belongs to another model: {wrong}")
    if deepstack != text.get("deepstack_layers", deepstack):
        wrong = f"it has rows for {deepstack} layers, {model} takes {text['deepstack_layers']}"
        return _leave_out(file, text, f"belongs to another model: {wrong}")
    return VisionFile(config, processor, [*_map_tower(clip, projector, vision)])


def _leave_out(file: GgufFile, text: dict[str, Any], reason: str) -> VisionFile:
    return VisionFile({**text, UNREAD_TOWER: f"{file.path.name} {reason}"}, {}, [])


def _read_width(clip: _ClipFile, projector: _Projector, vision: VisionConfig) -> int:
    """Return the number of elements of the connector's rows."""
    last = vision.connector.projections[-1]
    return clip.get_shape(f"{projector.projections[-1]}.weight")[int(last.transposed)]


def _map_tower(
    clip: _ClipFile, projector: _Projector, vision: VisionConfig
) -> Iterator[MappedTensor]:
    names = _list_names(clip, projector, vision)
    second = clip.file.tensors.get(_SECOND_FRAME)
    for tensor in clip.file.tensors.values():
        where = f"{clip.file.path}: tensor {tensor.name}"
        if tensor.name.startswith(_UNREAD) or tensor.name == _SECOND_FRAME:
            continue
        ours = names.get(tensor.name)
        if ours is None:
            raise BrokenModel(f"{where} is unknown in a tower with {clip.projector!r}")
        is_turned = tensor.name.rpartition(".")[0].endswith((".attn_q", ".attn_k"))
        heads = vision.heads if is_turned and clip.projector == "pixtral" else 0
        less = 1.0 if tensor.name == "mm.soft_emb_norm.weight" else 0.0
        made = map_tensor(ours, tensor, where, heads=heads, less=less)
        is_patch = tensor.name == f"{_PATCHES}.weight" and vision.frames > 1
        yield _pair_frames(made, tensor, second, where) if is_patch else made


def _pair_frames(
    made: MappedTensor, tensor: GgufTensor, second: GgufTensor | None, where: str
) -> MappedTensor:
    """Join the weights ``[hidden, 3, side, side]`` of two frames to one tensor."""
    if second is None or (second.shape, second.ggml_type) != (tensor.shape, tensor.ggml_type):
        raise BrokenModel(f"{where} and {_SECOND_FRAME} don't match")
    return replace(
        made,
        shape=(*made.shape[:2], 2, *made.shape[2:]),
        nbytes=2 * made.nbytes,
        paired=(second.split, second.offset, prod(made.shape[:2])),
    )


def _list_names(clip: _ClipFile, projector: _Projector, vision: VisionConfig) -> dict[str, str]:
    """Map GGUF's tensor names to molink's."""
    names, modules = vision.names, dict[str, str | None]()
    modules |= {
        _PATCHES: names.patches,
        "v.position_embd": names.positions,
        "v.pre_ln": names.first_norm,
        "v.post_ln": names.last_norm,
    }
    ups = ("ffn_down", "ffn_up") if clip.is_mlp_swapped else ("ffn_up", "ffn_down")
    heads = ("attn_qkv",) if len(names.heads) == 1 else ("attn_q", "attn_k", "attn_v")
    for layer in range(vision.layers):
        theirs, ours = f"v.blk.{layer}.", f"{names.layers}{layer}."
        modules |= {
            f"{theirs}ln1": f"{ours}{names.attention_norm}",
            f"{theirs}ln2": f"{ours}{names.mlp_norm}",
            f"{theirs}attn_out": f"{ours}{names.attention}.{names.output}",
        }
        for head, name in zip(heads, names.heads, strict=True):
            modules[f"{theirs}{head}"] = f"{ours}{names.attention}.{name}"
        for part, name in zip(("ffn_gate", *ups)[-len(names.mlp) :], names.mlp, strict=True):
            modules[f"{theirs}{part}"] = f"{ours}{name}"
    found = {
        f"{theirs}.{kind}": f"{TOWER_PREFIX}{ours}.{kind}"
        for theirs, ours in modules.items()
        if ours is not None
        for kind in ("weight", "bias")
    }
    found |= _connector_names(vision.connector, projector.norm, projector.projections)
    for layer, connector in vision.deepstack:
        theirs = f"v.deepstack.{layer}."
        found |= _connector_names(connector, f"{theirs}norm", (f"{theirs}fc1", f"{theirs}fc2"))
    return found


def _connector_names(
    shape: ConnectorShape, norm: str, projections: tuple[str, ...]
) -> dict[str, str]:
    found = {}
    ours = shape.row_norm or shape.cell_norm
    if ours is not None:
        for kind in ("weight", "bias"):
            found[f"{norm}.{kind}"] = f"{shape.prefix}{ours.name}.{kind}"
    for theirs, each in zip(projections, shape.projections, strict=True):
        found[f"{theirs}.weight"] = f"{shape.prefix}{each.weight_name}"
        found[f"{theirs}.bias"] = f"{shape.prefix}{each.name}.bias"
    return found


# --- projector types -----------------------------------------------------------------------------


def _describe_siglip(clip: _ClipFile) -> dict[str, Any]:
    return {
        "hidden_size": clip.width,
        "intermediate_size": clip.inner_size,
        "num_hidden_layers": clip.get_size("block_count"),
        "num_attention_heads": clip.get_size("attention.head_count"),
        "image_size": clip.get_size("image_size"),
        "patch_size": clip.get_size("patch_size"),
        "layer_norm_eps": clip.file.metadata.get_number(
            f"{_VISION}attention.layer_norm_epsilon", 1e-6
        ),
    }


def _describe_gemma3(clip: _ClipFile) -> _Fields:
    tower, side = _describe_siglip(clip), clip.get_size("image_size")
    patches, factor = side // tower["patch_size"], clip.get_size("projector.scale_factor", 4)
    if patches % factor:
        raise BrokenModel(
            f"{clip.file.path}: {patches} patches a side do not fit clip.vision.projector."
            f"scale_factor {factor}"
        )
    cells = patches // factor
    size = {"height": side, "width": side}
    about = {"mm_tokens_per_image": cells**2}
    return about, tower, {"size": size, "resample": 2, **clip.pixel_scales}


def _describe_idefics3(clip: _ClipFile) -> _Fields:
    tower, side = _describe_siglip(clip), clip.get_size("image_size")
    # Without the key, as in the released models: 4 x 4 tiles.
    longest = clip.get_size("preproc_image_size", 4 * side)
    processor = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    about = {"scale_factor": clip.get_size("projector.scale_factor", 2)}
    return about, tower, {**processor, **clip.pixel_scales}


def _describe_pixtral(clip: _ClipFile) -> _Fields:
    """Mistral 3's; Pixtral 12B, which doesn't merge patches, lacks the tensors for that."""
    side, found = clip.get_size("image_size"), clip.file.metadata
    tower = {
        "model_type": "pixtral",
        "hidden_act": "silu" if found.get_boolean("clip.use_silu", False) else "gelu",
        **_describe_siglip(clip),
    }
    about = {
        "spatial_merge_size": clip.get_size("spatial_merge_size", 1),
        "multimodal_projector_bias": "mm.1.bias" in clip.file.tensors,
    }
    size = {"longest_edge": clip.get_size("preproc_image_size", side)}
    return about, tower, {"size": size, **clip.pixel_scales}


def _describe_qwen(clip: _ClipFile) -> dict[str, Any]:
    return {
        "hidden_size": clip.width,
        "intermediate_size": clip.inner_size,
        "depth": clip.get_size("block_count"),
        "num_heads": clip.get_size("attention.head_count"),
        "patch_size": clip.get_size("patch_size"),
        "spatial_merge_size": clip.get_size("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "split_qkv": "v.blk.0.attn_q.weight" in clip.file.tensors,
    }


def _describe_qwen2_5(clip: _ClipFile) -> _Fields:
    """Qwen2.5-VL's; the size of windows and of images are those of the released models."""
    tower, interval = _describe_qwen(clip), clip.get_size("n_wa_pattern")
    full = [layer for layer in range(tower["depth"]) if not (layer + 1) % interval]
    windows = {
        "window_size": clip.get_size("window_size", _QWEN_WINDOW),
        "fullatt_block_indexes": full,
    }
    return {}, {**tower, **windows}, _pixel_bounds(clip, 56 * 56, 28 * 28 * 16384)


def _describe_qwen3(clip: _ClipFile) -> _Fields:
    """Qwen3-VL's and Qwen3.5's; the sizes of images are those of the released models."""
    tower, found, key = _describe_qwen(clip), clip.file.metadata, f"{_VISION}is_deepstack_layers"
    marks = found.get_integers(key, tower["depth"]) if key in found else []
    positions, _ = clip.get_shape("v.position_embd.weight")
    own = {
        "num_position_embeddings": positions,
        "deepstack_visual_indexes": [layer for layer, mark in enumerate(marks) if mark],
    }
    return {}, {**tower, **own}, _pixel_bounds(clip, 256 * 256, 4096 * 4096)


def _pixel_bounds(clip: _ClipFile, least: int, most: int) -> dict[str, Any]:
    size = {
        "shortest_edge": clip.get_pixels("image_min_pixels", least),
        "longest_edge": clip.get_pixels("image_max_pixels", most),
    }
    return {"size": size, **clip.pixel_scales}


_PROJECTORS = {
    "gemma3": _Projector(
        {"Gemma3ForCausalLM": "Gemma3ForConditionalGeneration"},
        _describe_gemma3,
        "mm.soft_emb_norm",
        ("mm.input_projection",),
    ),
    "idefics3": _Projector(
        {"LlamaForCausalLM": "Idefics3ForConditionalGeneration"},
        _describe_idefics3,
        "",
        ("mm.model.fc",),
    ),
    "pixtral": _Projector(
        {
            "LlamaForCausalLM": "Mistral3ForConditionalGeneration",
            "Ministral3ForCausalLM": "Mistral3ForConditionalGeneration",
        },
        _describe_pixtral,
        "mm.input_norm",
        ("mm.patch_merger", "mm.1", "mm.2"),
    ),
    "qwen2.5vl_merger": _Projector(
        {"Qwen2ForCausalLM": "Qwen2_5_VLForConditionalGeneration"},
        _describe_qwen2_5,
        "v.post_ln",
        ("mm.0", "mm.2"),
    ),
    "qwen3vl_merger": _Projector(
        {
            "Qwen3ForCausalLM": "Qwen3VLForConditionalGeneration",
            "Qwen3MoeForCausalLM": "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
        },
        _describe_qwen3,
        "v.post_ln",
        ("mm.0", "mm.2"),
    ),
}
