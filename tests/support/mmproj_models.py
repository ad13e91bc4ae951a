"""GGUF files of small models that see, with mmproj files as llama.cpp's converter writes them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from molink.checkpoint.config import ModelConfig
from tests.support.gguf_models import Kind, add_value, load_tensors, write_gguf

#: GGUF's architecture of the text model.
_TEXT_NAMES = {
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
    "smolvlm": "llama",
    "mistral3": "llama",
}
_PROJECTORS = {
    "gemma3": "gemma3",
    "smolvlm": "idefics3",
    "mistral3": "pixtral",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_vl_moe": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
}


@dataclass
class _Writer:
    """Tensors of an mmproj file, and the values that they hold by their names in the folder."""

    config: Mapping[str, Any]
    kind: Kind
    written: dict[str, tuple[Any, Kind]] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)

    @property
    def vision(self) -> Mapping[str, Any]:
        """The tower's config."""
        found: Mapping[str, Any] = self.config["vision_config"]
        return found

    def put(self, theirs: str, rows: Any, *, kind: Kind | None = None) -> Any:
        """Add a tensor; the values that it holds."""
        kind = self.kind if kind is None else kind
        if rows.ndim < 2:
            kind = Kind.F32
        if kind is Kind.Q8_0 and (rows.ndim != 2 or rows.shape[-1] % 32):
            kind = Kind.F16
        rows = np.ascontiguousarray(rows, np.float32)
        packed = quantize(rows, kind)
        self.written[theirs] = packed, kind
        return dequantize(packed, kind).reshape(rows.shape)


def write_seeing_gguf(
    folder: Path,
    into: Path,
    kind: Kind = Kind.F32,
    *,
    exact: Path | None = None,
    swapped: bool = False,
    metadata: Mapping[str, Any] | None = None,
    without: str = "",
) -> Path:
    """The model of ``folder`` as ``tiny.gguf`` in ``into``, beside ``mmproj-tiny-KIND.gguf``.

    The text model has its values, the tower has ``kind`` where llama.cpp's has. ``exact`` becomes
    a copy of the folder with the tower's values. ``swapped`` exchanges the MLPs' names, as
    converters did before May 2025. ``metadata`` replace those of the tower's file; it leaves out
    the tensor ``without``.
    """
    into.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family, tensors = config["model_type"], load_tensors(folder)
    text = {_text_name(name): rows for name, rows in tensors.items() if not _is_tower(name)}
    path = _write_text(folder, into, config, _cut_experts(text))
    writer = _Writer(config, kind)
    for name, rows in tensors.items():
        if _is_tower(name):
            writer.held[name] = _WRITERS[family](writer, name, rows)
    _write_tower(
        into / f"mmproj-tiny-{kind.name}.gguf",
        writer,
        {**_metadata(folder, config), **(metadata or {})},
        swapped=swapped,
        without=without,
    )
    if exact is not None:
        _write_exact(folder, exact, {**tensors, **writer.held})
    return path


def _write_text(
    folder: Path, into: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Path:
    from safetensors.numpy import save_file

    text, family = into / "text", config["model_type"]
    text.mkdir()
    inner = {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]}
    (text / "config.json").write_text(json.dumps(inner))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (text / name).write_bytes((folder / name).read_bytes())
    save_file(dict(tensors), text / "model.safetensors")
    name = _TEXT_NAMES.get(family, "")
    sections = (inner.get("rope_parameters") or {}).get("mrope_section")
    metadata: dict[str, Any] = {}
    if sections:
        known = name or "qwen35"
        metadata[f"{known}.rope.dimension_sections"] = [*sections, 0]
    if name.startswith("qwen3vl"):
        deep = config["vision_config"]["deepstack_visual_indexes"]
        metadata[f"{name}.n_deepstack_layers"] = len(deep)
    return write_gguf(text, into / "tiny.gguf", metadata=metadata, architecture=name)


def _cut_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of Qwen3-VL, which transformers saves as ``[experts, out, in]``, each by itself."""
    made: dict[str, Any] = {}
    for name, rows in tensors.items():
        module, _, projection = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        if not module.endswith(".experts"):
            made[name] = rows
            continue
        for index, entry in enumerate(rows):
            cut = np.split(entry, len(parts[projection]))
            for part, own in zip(parts[projection], cut, strict=True):
                made[f"{module}.{index}.{part}.weight"] = own
    return made


def _is_tower(name: str) -> bool:
    marks = ("vision_tower", "vision_model", "visual", "multi_modal_projector", "connector")
    return any(f"{mark}." in name for mark in marks)


def _text_name(name: str) -> str:
    for prefix in ("model.language_model.", "model.text_model.", "language_model.model."):
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.")


def _map_name(name: str) -> str:
    """GGUF's name by the package's table, which knows names of several ages."""
    bare = name.removeprefix("model.")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 16)
    for known in (name, bare, bare.replace("vision_tower.", "vision_tower.vision_model.")):
        found = table.get_name(known, try_suffixes=(".weight", ".bias"))
        if found is not None:
            return found
    raise AssertionError(name)


def _put_siglip(writer: _Writer, name: str, rows: Any) -> Any:
    if name.endswith("mm_input_projection_weight"):
        return writer.put("mm.input_projection.weight", rows, kind=_at_most_16(writer.kind))
    if name.endswith("mm_soft_emb_norm.weight"):
        return writer.put("mm.soft_emb_norm.weight", rows + 1) - 1
    if ".head." in name:  # what nobody reads
        return rows
    kind = Kind.F32 if ".embeddings." in name else writer.kind
    return writer.put(_map_name(name), rows, kind=kind)


def _at_most_16(kind: Kind) -> Kind:
    return Kind.F16 if kind is Kind.Q8_0 else kind


def _put_pixtral(writer: _Writer, name: str, rows: Any) -> Any:
    """Of queries and keys, pairs that are rotated lie side by side."""
    if name.split(".")[-2] not in ("q_proj", "k_proj"):
        return writer.put(_map_name(name), rows)
    heads, shape = writer.vision["num_attention_heads"], rows.shape
    turned = rows.reshape(heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)
    held = writer.put(_map_name(name), turned)
    return held.reshape(heads, -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _put_qwen2_5(writer: _Writer, name: str, rows: Any) -> Any:
    if "patch_embed" in name:
        return _put_frames(writer, rows)
    if ".qkv." not in name:
        return writer.put(_map_name(name), rows)
    parts = zip("qkv", np.split(rows, 3), strict=True)
    return np.concatenate(
        [writer.put(_map_name(name.replace("qkv", part)), own) for part, own in parts]
    )


def _put_qwen3(writer: _Writer, name: str, rows: Any) -> Any:
    bare = name.removeprefix("model.visual.")
    kind = bare.rpartition(".")[2]
    match bare.split("."):
        case ["deepstack_merger_list", index, part, _]:
            layer = writer.vision["deepstack_visual_indexes"][int(index)]
            theirs = f"v.deepstack.{layer}.{part.removeprefix('linear_')}"
        case ["merger", "norm", _]:
            theirs = "v.post_ln"
        case ["merger", part, _]:
            theirs = {"linear_fc1": "mm.0", "linear_fc2": "mm.2"}[part]
        case ["patch_embed", "proj", "weight"]:
            return _put_frames(writer, rows)
        case _:
            return writer.put(_map_name(name), rows)
    return writer.put(f"{theirs}.{kind}", rows)


def _put_frames(writer: _Writer, rows: Any) -> Any:
    frames = [
        writer.put(f"v.patch_embd.weight{end}", rows[:, :, frame], kind=_at_most_16(writer.kind))
        for frame, end in enumerate(("", ".1"))
    ]
    return np.stack(frames, axis=2)


_WRITERS = {
    "gemma3": _put_siglip,
    "smolvlm": _put_siglip,
    "mistral3": _put_pixtral,
    "qwen2_5_vl": _put_qwen2_5,
    "qwen3_vl": _put_qwen3,
    "qwen3_vl_moe": _put_qwen3,
    "qwen3_5": _put_qwen3,
}


def _metadata(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    vision, family = config["vision_config"], config["model_type"]
    text = config["text_config"]
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    seen = ModelConfig.load_folder(folder).vision
    assert seen is not None
    rules = seen.rules
    layers = vision.get("num_hidden_layers", vision.get("depth"))
    fields = {
        "block_count": layers,
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "attention.head_count": vision.get("num_attention_heads", vision.get("num_heads")),
        "attention.layer_norm_epsilon": float(vision.get("layer_norm_eps", 1e-6)),
        "image_size": vision.get("image_size", 560),
        "patch_size": vision["patch_size"],
        "projection_dim": text["hidden_size"],
        "image_mean": list(rules.mean),
        "image_std": list(rules.std),
    }
    if family == "gemma3":
        cells = int(config["mm_tokens_per_image"] ** 0.5)
        fields["projector.scale_factor"] = vision["image_size"] // vision["patch_size"] // cells
    if family == "smolvlm":
        fields["projector.scale_factor"] = config["scale_factor"]
        fields["preproc_image_size"] = processor["size"]["longest_edge"]
    if family == "mistral3":
        fields["spatial_merge_size"] = config["spatial_merge_size"]
    if family.startswith("qwen"):
        fields["spatial_merge_size"] = vision["spatial_merge_size"]
        # llama.cpp's files of these families have no bounds.
        fields |= {"image_min_pixels": rules.least_pixels, "image_max_pixels": rules.most_pixels}
    if family == "qwen2_5_vl":
        fields["n_wa_pattern"] = vision["fullatt_block_indexes"][0] + 1
        fields["window_size"] = vision["window_size"]
    elif family.startswith("qwen3"):
        deep = vision.get("deepstack_visual_indexes", [])
        fields["is_deepstack_layers"] = [layer in deep for layer in range(layers)]
    return {
        "general.type": "mmproj",
        "clip.projector_type": _PROJECTORS[family],
        "clip.has_vision_encoder": True,
        "clip.use_gelu": vision.get("hidden_act") != "silu",
        "clip.use_silu": vision.get("hidden_act") == "silu",
        **{f"clip.vision.{key}": value for key, value in fields.items()},
    }


def _write_tower(
    path: Path, written: _Writer, metadata: Mapping[str, Any], *, swapped: bool, without: str
) -> None:
    writer = gguf.GGUFWriter(path, metadata.get("general.architecture", "clip"))
    for key, value in metadata.items():
        if key != "general.architecture":
            add_value(writer, key, value)
    for name, (packed, kind) in written.written.items():
        if name != without:
            writer.add_tensor(_swap_name(name) if swapped else name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _swap_name(name: str) -> str:
    up, down = ".ffn_up.", ".ffn_down."
    return name.replace(up, down) if up in name else name.replace(down, up)


def _write_exact(folder: Path, exact: Path, tensors: Mapping[str, Any]) -> None:
    from safetensors.numpy import save_file

    exact.mkdir(parents=True)
    for file in folder.glob("*.json"):
        (exact / file.name).write_bytes(file.read_bytes())
    made = {name: np.ascontiguousarray(rows) for name, rows in tensors.items()}
    save_file(made, exact / "model.safetensors", metadata={"format": "pt"})
