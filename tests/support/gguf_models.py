"""GGUF files of small models, written as llama.cpp's converter does, and what their blocks hold."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

#: GGUF's name of an architecture and its further metadata, by family.
_NAMES = {
    "mistral": "llama",
    "mixtral": "llama",
    "llama4_text": "llama4",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "minimax_m2": "minimax-m2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "ministral3": "mistral3",
    "gpt_oss": "gpt-oss",
    # Whose factors, which the converter multiplies weights by, must be 1.
    "falcon_h1": "falcon-h1",
}
#: Granite's stacks of experts, which the converter cuts, and GGUF's names of Mixtral's.
_CUT = {"input_linear": ("w1", "w3"), "output_linear": ("w2",)}
#: Stacks of experts of gpt-oss, whose rows alternate between projections, and of Llama 4, where
#: these follow each other.
_TURNED_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FOLLOWING = "feed_forward"
#: Whose converter lays rotated pairs side by side.
_TURNED = ("llama", "mistral3", "granite", "granitemoe", "granitehybrid", "smollm3")
#: Granite's shared expert, which the converter cuts, too.
_SHARED = {
    "shared_mlp.input_linear": ("gate_proj", "up_proj"),
    "shared_mlp.output_linear": ("down_proj",),
}
#: What configs call the number of experts.
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_COUNTS = ("num_experts_per_tok", "moe_k", "moe_topk")
Kind = gguf.GGMLQuantizationType
#: Kinds that have no quantizer in Python: their bytes are random, with scales of a fair size.
_RANDOM = {
    Kind.Q2_K: (16 + 64, 2),
    Kind.Q3_K: (32 + 64 + 12, 1),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (128 + 64 + 16, 1),
    Kind.IQ4_NL: (0, 1),
    Kind.IQ4_XS: (0, 1),
}


def write_gguf(
    folder: Path,
    path: Path,
    kind: Kind = Kind.F32,
    *,
    exact: Path | None = None,
    others: Mapping[str, Kind] | None = None,
    metadata: Mapping[str, Any] | None = None,
    divisors: Sequence[float] = (),
    part: int = 0,
    architecture: str = "",
) -> Path:
    """The model of ``folder`` (as ``write_model`` makes them) as a GGUF file at ``path``.

    Weights become ``kind``, those of whose GGUF names a part is among the ``others`` that kind.
    ``exact`` becomes a copy of the folder with the values that these
    hold. ``metadata`` are set beside, or instead of, what the config says; ``divisors`` are those
    of the frequencies of rope, as Llama 3 has them. With ``part`` the model comes in several
    files, each with that many tensors at most, and the first of them is returned. ``architecture``:
    as GGUF calls it, where a family has several names.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = config["model_type"]
    name = architecture or _NAMES.get(family, family)
    if family == "nemotron_h" and "moe" in config["layers_block_type"]:
        name = "nemotron_h_moe"
    writer = gguf.GGUFWriter(path, name, split_max_tensors=part)
    stored = load_tensors(folder)
    values = _cut_latents(_cut_stacks(stored), config)
    if name in _DELTA_RULE:
        values = _cut_grouped_rows(values, config)
    blocks = _count_layers(values)
    for key, value in _metadata(config, name, blocks).items():
        add_value(writer, key, value)
    _add_tokenizer(writer, folder)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        add_value(writer, key, value)
    if divisors:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    exact_values = dict(values)
    for theirs, ours in _grouped(values, name, blocks).items():
        mixed = [other for part, other in (others or {}).items() if part in theirs]
        found = mixed[0] if mixed else kind
        packed = _packed(theirs, [values[one] for one in ours], found)
        for one, rows in zip(ours, packed, strict=True):
            kept = rows.dtype == np.float32
            exact_values[one] = rows if kept else dequantize(rows, found)
        _add_tensor(writer, theirs, packed, found, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if exact is not None:
        if name in _DELTA_RULE:
            exact_values = _join_grouped_rows(exact_values, config)
        joined = _join_stacks(_join_latents(exact_values, config), stored)
        _write_exact(folder, exact, joined)
    return path if not part else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def _add_tensor(
    writer: gguf.GGUFWriter, theirs: str, packed: list[Any], kind: Kind, config: Mapping[str, Any]
) -> None:
    turned = [_turned(rows, theirs, config, writer.arch) for rows in packed]
    theirs += ".weight" * theirs.endswith("attn_sinks")
    data = np.stack(turned) if "_exps" in theirs else turned[0]
    data = _converted(data, theirs, config, writer.arch)
    if data.dtype == np.float32:
        writer.add_tensor(theirs, data)
    else:
        writer.add_tensor(theirs, data, raw_dtype=kind)


def load_tensors(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {name: np.array(tensor) for name, tensor in load_file(file).items()}
    return found


def _cut_stacks(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of Granite, gpt-oss and Llama 4, each by itself."""
    made: dict[str, Any] = {}
    for name, value in stored.items():
        if cut := _shared_names(name, stored):
            made |= dict(zip(cut, np.split(value, len(cut)), strict=True))
            continue
        module, _, projection = name.removesuffix(".weight").rpartition(".")
        parts, kind = _alternating(name)
        if parts:
            rows = value if kind == "bias" else value.swapaxes(1, 2)
            for index, entry in enumerate(rows):
                follow = np.split(entry, len(parts)) if _FOLLOWING in name else None
                for at, ours in enumerate(parts):
                    cut = entry[at :: len(parts)] if follow is None else follow[at]
                    made[f"{module}.{index}.{ours}.{kind}"] = cut.copy()
            continue
        if projection not in _CUT:
            made[name] = value
            continue
        for index, entry in enumerate(value):
            parts = np.split(entry, len(_CUT[projection]))
            for ours, rows in zip(_CUT[projection], parts, strict=True):
                made[f"{module}.experts.{index}.{ours}.weight"] = rows
    return made


def _shared_names(name: str, stored: Mapping[str, Any]) -> list[str]:
    """As GGUF's names know what Granite's shared expert consists of."""
    module = "mlp.shared_expert" if any("moe" in one for one in stored) else "mlp"
    for ours, parts in _SHARED.items():
        if name.endswith(f"{ours}.weight"):
            return [name.replace(ours, f"{module}.{part}") for part in parts]
    return []


def _alternating(name: str) -> tuple[tuple[str, ...], str]:
    """The projections whose rows alternate in a stack ``[experts, in, out]``, and what they are."""
    projection = name.rpartition(".")[2]
    kind = "bias" if projection.endswith("_bias") else "weight"
    return _TURNED_STACKS.get(projection.removesuffix("_bias"), ()), kind


def _join_stacks(values: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`_cut_stacks`."""
    made: dict[str, Any] = {}
    for name, value in stored.items():
        if cut := _shared_names(name, stored):
            made[name] = np.concatenate([values[one] for one in cut])
            continue
        module, _, projection = name.removesuffix(".weight").rpartition(".")
        parts, kind = _alternating(name)
        if parts:
            rows = [
                np.stack(
                    [values[f"{module}.{index}.{ours}.{kind}"] for ours in parts],
                    0 if _FOLLOWING in name else 1,
                )
                for index in range(len(value))
            ]
            whole = np.stack([each.reshape(-1, *each.shape[2:]) for each in rows])
            made[name] = whole if kind == "bias" else whole.swapaxes(1, 2)
            continue
        if projection not in _CUT:
            made[name] = values[name]
            continue
        cut = [f"{module}.experts.{{}}.{ours}.weight" for ours in _CUT[projection]]
        entries = [[values[one.format(index)] for one in cut] for index in range(len(value))]
        made[name] = np.stack([np.concatenate(parts) for parts in entries])
    return made


def _cut_latents(values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Projections of latents to keys, transposed, and to values, each by themselves."""
    made: dict[str, Any] = {}
    for name, value in values.items():
        if not name.endswith("kv_b_proj.weight"):
            made[name] = value
            continue
        heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
        of_heads = value.reshape(heads, -1, value.shape[1])
        keys, others = of_heads[:, :plain].swapaxes(1, 2), of_heads[:, plain:]
        for part, rows in (("k", keys), ("v", others)):
            flat = np.ascontiguousarray(rows).reshape(-1, rows.shape[2])
            made[name.replace("kv_b_proj", f"{part}_b_proj")] = flat
    return made


def _join_latents(values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`_cut_latents`."""
    made = dict(values)
    for name in values:
        if name.endswith(".k_b_proj.weight"):
            other = name.replace(".k_b_proj", ".v_b_proj")
            parts = [
                made.pop(one).reshape(config["num_attention_heads"], -1, values[one].shape[1])
                for one in (name, other)
            ]
            both = np.concatenate([parts[0].swapaxes(1, 2), parts[1]], axis=1)
            made[name.replace(".k_b_proj", ".kv_b_proj")] = both.reshape(-1, both.shape[2])
    return made


def _converted(data: Any, theirs: str, config: Mapping[str, Any], name: str) -> Any:
    """A tensor with the shape and the numbers that the converter gives it."""
    if "exp_probs_b" in theirs:
        data = data.squeeze()
    if "shortconv.conv.weight" in theirs:
        data = data.squeeze(1)
    if name in _MAMBA:
        data = _as_mamba(data, theirs.split(".")[2:], config)
    if "attn_k_b" in theirs or "attn_v_b" in theirs:
        data = data.reshape(config["num_attention_heads"], -1, data.shape[1])
    has_offset = name.startswith("gemma") or name in _DELTA_RULE
    if has_offset and theirs.endswith("norm.weight") and "ssm_norm" not in theirs:
        data = data + 1
    if name in _DELTA_RULE and theirs.startswith("blk."):
        data = _as_delta_rule(data, theirs, config, tiled=name != "qwen3next")
    return data


def _as_mamba(data: Any, module: Sequence[str], config: Mapping[str, Any]) -> Any:
    match module:
        case ["ssm_a"]:
            return -np.exp(data).reshape(-1, 1)
        case ["ssm_d"]:
            return data.reshape(-1, 1)
        case ["ssm_norm", _]:
            return data.reshape(config.get("mamba_n_groups", config.get("n_groups")), -1)
        case ["ssm_conv1d", "weight"]:
            return data.squeeze(1)
    return data


#: Whose layers have Mamba-2.
_MAMBA = ("falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe")
#: Whose layers have the gated delta rule.
_DELTA_RULE = ("qwen3next", "qwen35", "qwen35moe")


def _row_parts(config: Mapping[str, Any]) -> list[int]:
    """Of each key head: its query, its key, its values and their gates."""
    key, heads = config["linear_key_head_dim"], config["linear_num_key_heads"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    return [key, key, values, values]


def _cut_grouped_rows(values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3-Next's rows by key head, as all queries, keys and values, and all gates."""
    made, sizes = {}, _row_parts(config)
    for name, value in values.items():
        if not name.endswith("in_proj_qkvz.weight"):
            made[name] = value
            continue
        grouped = value.reshape(config["linear_num_key_heads"], sum(sizes), -1)
        parts = np.split(grouped, np.cumsum(sizes)[:-1], axis=1)
        flat = [part.reshape(-1, value.shape[1]) for part in parts]
        made[name.replace("qkvz", "qkv")] = np.concatenate(flat[:3])
        made[name.replace("qkvz", "z")] = flat[3]
    return made


def _join_grouped_rows(values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse, for Qwen3-Next."""
    if config["model_type"] != "qwen3_next":
        return values
    made, sizes, heads = {}, _row_parts(config), config["linear_num_key_heads"]
    for name, value in values.items():
        if name.endswith("in_proj_qkv.weight"):
            gates = values[name.replace("qkv", "z")]
            ends = np.cumsum([heads * size for size in sizes[:3]])[:-1]
            parts = [*np.split(value, ends), gates]
            grouped = [part.reshape(heads, -1, value.shape[1]) for part in parts]
            joined = np.concatenate(grouped, axis=1).reshape(-1, value.shape[1])
            made[name.replace("qkv", "qkvz")] = joined
        elif not name.endswith("in_proj_z.weight"):
            made[name] = value
    return made


def _as_delta_rule(data: Any, theirs: str, config: Mapping[str, Any], *, tiled: bool) -> Any:
    """As the converter has it: decays themselves, and values that share a key apart."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_rows, module = 2 * keys * config["linear_key_head_dim"], theirs.split(".")[2]
    if module == "ssm_a":
        data = -np.exp(data)
    if module == "ssm_conv1d":
        data = data.squeeze(1)

    def apart(rows: Any) -> Any:
        shaped = rows.reshape(keys, values // keys, -1, *rows.shape[1:])
        return np.ascontiguousarray(shaped.swapaxes(0, 1)).reshape(rows.shape)

    if not tiled:
        return data
    if module in ("attn_qkv", "ssm_conv1d"):
        return np.concatenate((data[:key_rows], apart(data[key_rows:])))
    if module in ("attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):
        return apart(data)
    return data if module != "ssm_out" else np.ascontiguousarray(apart(data.T).T)


def _count_layers(values: Mapping[str, Any]) -> int:
    """With those for multi-token prediction."""
    return 1 + max(int(one.split(".")[2]) for one in values if ".layers." in one)


def _grouped(values: Mapping[str, Any], name: str, layers: int) -> dict[str, list[str]]:
    """GGUF's tensors, and which of ours each consists of."""
    architecture = next(one for one, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    names = gguf.get_tensor_name_map(architecture, layers)
    found: dict[str, list[str]] = {}
    for one in values:
        parts = one.split(".")
        # All experts of a layer are one tensor; numbers are in order, as files have them sorted.
        merged = [part for part in parts if not ("experts" in parts and part.isdigit())]
        if "experts" in parts:
            merged.insert(2, parts[2])
        named = ".".join(merged).replace("e_score_correction_bias", "e_score_correction.bias")
        named = named.replace(".dt_bias", ".dt_proj.bias")
        named = named.replace("expert_bias", "expert_bias.bias")
        if "mixer.experts" in named:
            named = named.replace("backbone", "model").replace("mixer", "mlp")
        if "feed_forward.experts.w" in named:
            named = named.removeprefix("model.")
        theirs = names.get_name(named, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, one
        found.setdefault(theirs, []).append(one)
    for ours in found.values():
        ours.sort(key=lambda one: [int(part) for part in one.split(".") if part.isdigit()])
    return found


#: What is never packed.
_UNPACKED = (
    *("gate_inp.weight", "gate_inp_shexp.weight", "exp_probs_b.bias"),
    *("ssm_conv1d.weight", "shortconv.conv.weight", "_norm.weight"),
)


def _packed(theirs: str, parts: list[Any], kind: Kind) -> list[Any]:
    keeps = parts[0].ndim < 2 or kind is Kind.F32 or theirs.endswith(_UNPACKED)
    if keeps:
        return [part.astype(np.float32) for part in parts]
    if kind not in _RANDOM:
        return [quantize(part.astype(np.float32), kind) for part in parts]
    return [random_blocks(kind, part.shape, seed=len(theirs)) for part in parts]


def random_rows(kind: Kind, shape: tuple[int, int]) -> Any:
    """Bytes ``[rows, bytes of a row]`` of random weights ``shape``."""
    if kind in _RANDOM:
        return random_blocks(kind, shape)
    return quantize(np.random.default_rng(0).standard_normal(shape).astype(np.float32), kind)


def random_blocks(kind: Kind, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Random blocks ``[rows, bytes of a row]`` with scales that make weights of usual size."""
    weights, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(seed)
    blocks = rows.integers(0, 256, (shape[0], shape[1] // weights, nbytes), dtype=np.uint8)
    at, count = _RANDOM[kind]
    # The whole numbers beside them go up to 127 in Q6_K, codes to 32: to 63 and 15 in Q4_K.
    size = 0.25 if kind is Kind.Q6_K else 1.0
    scales = rows.uniform(size * 1e-4, size * 3e-4, (*blocks.shape[:2], count)).astype(np.float16)
    blocks[..., at : at + 2 * count] = scales.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _turned(rows: Any, theirs: str, config: Mapping[str, Any], name: str) -> Any:
    """Rows of queries and keys as ``llama`` has them: pairs that are rotated lie side by side."""
    module = theirs.rpartition(".")[0].rpartition(".")[2]
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(module)
    if name not in _TURNED or heads is None:
        return rows
    split = rows.reshape(config[heads], 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def _metadata(config: Mapping[str, Any], name: str, blocks: int) -> dict[str, Any]:
    fields = {
        "block_count": blocks,
        "nextn_predict_layers": blocks - config.get("num_hidden_layers", blocks) or None,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size_mlp", config.get("intermediate_size")),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        **_norm_metadata(config),
        **_rope_metadata(config, name),
        **_expert_metadata(config, name),
        "attention.sliding_window": config.get("sliding_window"),
        "attention.sliding_window_pattern": _pattern(config)
        if name in ("olmo2", "exaone4")
        else None,
        "attention.scale": config.get("attention_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "logit_scale": config.get("logits_scaling", config.get("logit_scale")),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    if name == "deepseek2":
        fields |= _latent_metadata(config)
    if name in _DELTA_RULE:
        fields |= _delta_rule_metadata(config)
    if name == "granitehybrid":
        fields |= _mamba_metadata(config)
    if name == "falcon-h1":
        fields |= _mamba_sizes(config, config["mamba_d_ssm"])
    if name.startswith("nemotron_h"):
        fields |= _nemotron_metadata(config)
    if name.startswith("lfm2"):
        fields |= _short_conv_metadata(config)
    return {f"{name}.{key}": value for key, value in fields.items() if value is not None}


def _rope_metadata(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    ropes = config.get("rope_parameters") or {}
    full, local = ropes.get("full_attention", ropes), ropes.get("sliding_attention", {})
    kind = full.get("rope_type")
    return {
        "rope.dimension_count": int(
            config.get("head_dim", 0) * full.get("partial_rotary_factor", 1)
        ),
        "rope.freq_base": float(full.get("rope_theta", 10000.0)),
        "rope.freq_base_swa": float(local["rope_theta"]) if local else None,
        "rope.scaling.type": kind if kind in ("linear", "yarn") else None,
        "rope.scaling.original_context_length": full.get("original_max_position_embeddings"),
        "rope.scaling.factor": full.get("factor"),
        "rope.scaling.yarn_log_multiplier": full.get("mscale_all_dim")
        if name == "mistral3"
        else None,
        "attention.temperature_scale": full.get("llama_4_scaling_beta"),
    }


def _expert_metadata(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    inner_is_expert = name in ("minimax-m2", "hunyuan-moe", "gpt-oss", "llama4")
    return {
        "expert_count": next((config[name] for name in _EXPERT_COUNTS if config.get(name)), None),
        "expert_used_count": next((config[one] for one in _CHOSEN_COUNTS if one in config), None),
        "expert_feed_forward_length": config.get(
            "moe_intermediate_size", config.get("intermediate_size") if inner_is_expert else None
        ),
        "expert_shared_feed_forward_length": config.get(
            "shared_expert_intermediate_size",
            config["intermediate_size"] if name == "hunyuan-moe" else None,
        ),
        "expert_shared_count": config.get("n_shared_experts", config.get("moe_num_shared_experts")),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_gating_func": 2 if "n_group" in config or name == "minimax-m2" else None,
        "expert_weights_norm": config.get("norm_topk_prob") if "n_group" in config else None,
        "expert_weights_scale": config.get("routed_scaling_factor"),
        "leading_dense_block_count": config.get(
            "first_k_dense_replace", config.get("moe_layer_start_index")
        ),
        "interleave_moe_layer_step": config.get(
            "moe_layer_interval", config.get("interleave_moe_layer_step")
        ),
    }


def _norm_metadata(config: Mapping[str, Any]) -> dict[str, float]:
    if "layer_norm_eps" in config:
        return {"attention.layer_norm_epsilon": config["layer_norm_eps"]}
    names = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
    eps = next((config[name] for name in names if name in config), 1e-6)
    return {"attention.layer_norm_rms_epsilon": float(eps)}


def _delta_rule_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = config["layer_types"]
    regular = [(layer + 1) % 4 == 0 for layer in range(len(kinds))]
    marks = [kind == "linear_attention" for kind in kinds]
    is_regular = marks == [not attends for attends in regular]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "full_attention_interval": 4 if is_regular else None,
        "attention.recurrent_layers": None if is_regular else marks,
    }


def _kv_heads(config: Mapping[str, Any], kinds: Sequence[str]) -> list[int]:
    """Of each layer; none where it has no attention."""
    return [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds]


def _mamba_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    experts, shared = config["num_local_experts"], config["shared_intermediate_size"]
    return {
        **_mamba_sizes(config, config["mamba_expand"] * config["hidden_size"]),
        "attention.head_count_kv": _kv_heads(config, config["layer_types"]),
        "feed_forward_length": config["intermediate_size"] if experts else shared,
        "expert_shared_feed_forward_length": shared,
        "expert_used_count": config["num_experts_per_tok"] if experts else None,
    }


def _mamba_sizes(config: Mapping[str, Any], inner: int) -> dict[str, int]:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.inner_size": inner,
    }


def _nemotron_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = config["layers_block_type"]
    widths = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
    is_mixture = "moe" in kinds
    shared = config["moe_shared_expert_intermediate_size"] if is_mixture else None
    return {
        "moe_latent_size": config.get("moe_latent_size"),
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "attention.head_count_kv": _kv_heads(config, kinds),
        "feed_forward_length": [widths.get(kind, 0) for kind in kinds],
        "expert_shared_feed_forward_length": shared,
    }


def _short_conv_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "shortconv.l_cache": config["conv_L_cache"],
        "attention.head_count_kv": _kv_heads(config, config["layer_types"]),
        "leading_dense_block_count": config.get("num_dense_layers"),
        "expert_gating_func": 2 if "num_dense_layers" in config else None,
    }


def _latent_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    rotary, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    rope = config["rope_parameters"]
    scaled = rope.get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotary,
        "rope.scaling.type": "yarn" if rope["rope_type"] == "yarn" else None,
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
        "rope.scaling.yarn_log_multiplier": 0.1 * scaled if scaled else None,
        "leading_dense_block_count": config.get("mlp_layer_types", ["dense"]).count("dense"),
        "expert_gating_func": 1 if config["model_type"] == "deepseek_v2" else 2,
    }


def _pattern(config: Mapping[str, Any]) -> list[bool] | None:
    """Which layers have a window, in OLMo 3 and EXAONE 4."""
    types = config.get("layer_types") if config.get("sliding_window") else None
    return types and [kind == "sliding_attention" for kind in types]


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    tokens = {index: text for text, index in tokenizer["model"]["vocab"].items()} | added
    # The format knows no empty list: a merge of bytes that no text has next to each other.
    high, higher = tokens[254], tokens[255]
    tokens[len(tokens)] = high + higher
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens[index] for index in range(len(tokens))])
    writer.add_token_types([3 if index in added else 1 for index in range(len(tokens))])
    writer.add_token_merges([f"{high} {higher}"])
    ids = {text: index for index, text in tokens.items()}
    writer.add_eos_token_id(ids[config["eos_token"]])
    writer.add_chat_template(config["chat_template"])


def _write_exact(folder: Path, exact: Path, values: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    exact.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, exact)
    whole = {name: np.ascontiguousarray(value) for name, value in values.items()}
    save_file(whole, exact / "model.safetensors", metadata={"format": "pt"})
