"""Maps a GGUF file's tensors to Hugging Face names.

llama.cpp permutes query and key rows of ``llama`` and similar architectures: rotated pairs are
neighbours there, and lie in two halves here. It stores the norms of Gemma and Qwen3.5 with the 1
that the model adds. All experts of a layer are one tensor.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from molink.errors import BrokenModel, UnsupportedModel
from molink.gguf.architecture import ROPE_FREQS, ROPE_LONG, ROPE_SHORT
from molink.gguf.ggml_types import packed_name, packed_shape
from molink.gguf.gguf_file import GgufFile, GgufTensor

_LAYER_PATTERN = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)")
_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "output_norm.bias": "model.norm.bias",
    "output.bias": "lm_head.bias",
    # LFM2's last norm
    "token_embd_norm.weight": "model.norm.weight",
}
#: Constants that follow from the metadata or are read together with it.
_CONSTANTS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
#: Families whose query and key rows are permuted.
_PERMUTED_FAMILIES = (
    *("Llama", "Mixtral", "Granite", "GraniteMoe", "GraniteMoeHybrid", "SmolLM3", "Ministral3"),
)
_LAYER_CONSTANTS = "attn_rot_embd"
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_PHI_MODULES = _MODULES | {"ffn_up": "mlp.gate_up_proj"}
_GEMMA_MODULES = _MODULES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM4_MODULES = _PHI_MODULES | {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_MIXTRAL_MODULES = _MODULES | {"ffn_gate_inp": "block_sparse_moe.gate"}
_GPT_OSS_MODULES = _MODULES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
#: Families with experts as in DeepSeek-V3.
_DEEPSEEK_MODULES = _MODULES | {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
_LATENT_MODULES = _DEEPSEEK_MODULES | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
#: Additional tensors of an MTP layer.
_MTP_MODULES = {
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.eh_proj": "eh_proj",
    "nextn.shared_head_norm": "shared_head.norm",
}
#: Copies of the model's embedding and output head.
_MTP_COPIES = ("nextn.embed_tokens", "nextn.shared_head_head")
#: Families whose first MTP layer is used.
_MTP_FAMILIES = ("Glm4Moe", "DeepseekV3", "Glm4MoeLite")
#: Families that name the norm before the MLP so.
_POST_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}
#: The gated delta rule; GGUF names its tensors as Mamba's.
_DELTA_MODULES = (
    _MODULES
    | _POST_ATTENTION
    | {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_in": "linear_attn.in_proj_qkvz",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
)
_DELTA_FAMILIES = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
_MAMBA_MODULES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
#: Granite 4, whose shared experts may be its only ones.
_HYBRID_MODULES = (
    _MODULES
    | _MAMBA_MODULES
    | {
        f"ffn_{part}{end}": f"shared_mlp.{ours}"
        for part, ours in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "output_linear"))
        for end in ("", "_shexp")
    }
    | {"ffn_gate_inp": "block_sparse_moe.router.layer"}
)
_NEMOTRON_MODULES = (
    _DEEPSEEK_MODULES
    | _MAMBA_MODULES
    | {
        "attn_norm": "norm",
        "ffn_latent_down": "mlp.fc1_latent_proj",
        "ffn_latent_up": "mlp.fc2_latent_proj",
    }
)
_FALCON_H1_MODULES = (
    _MODULES
    | _MAMBA_MODULES
    | {"ffn_norm": "pre_ff_layernorm"}
    | {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
)
_MAMBA_NAMES = {"ssm_a": "mamba.A", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
_DELTA_NAMES = {"ssm_a": "linear_attn.A", "ssm_dt.bias": "linear_attn.dt_bias"}
#: Tensors whose names here end neither in ``weight`` nor in ``bias``.
_OTHER_NAMES = {
    **dict.fromkeys(_DELTA_FAMILIES, _DELTA_NAMES),
    "GptOss": {"attn_sinks.weight": "self_attn.sinks"},
    "GraniteMoeHybrid": _MAMBA_NAMES,
    "NemotronH": _MAMBA_NAMES,
    # The converter writes it without ``.weight``.
    "FalconH1": _MAMBA_NAMES | {"ffn_norm": "pre_ff_layernorm.weight"},
}
_LFM2_MODULES = _MODULES | {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
_LLAMA4_MODULES = _MODULES | {
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **{
        f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj"
        for part in ("gate", "up", "down")
    },
}
_HUNYUAN_MODULES = _MODULES | {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_FAMILY_MODULES = {
    "Phi3": _PHI_MODULES,
    "Mixtral": _MIXTRAL_MODULES,
    "Llama4": _LLAMA4_MODULES,
    "GraniteMoeHybrid": _HYBRID_MODULES,
    "GptOss": _GPT_OSS_MODULES,
    "GraniteMoe": _MODULES | {"ffn_gate_inp": "block_sparse_moe.router.layer"},
    "Glm4": _GLM4_MODULES,
    "Glm4Moe": _DEEPSEEK_MODULES | _POST_ATTENTION,
    "DeepseekV2": _LATENT_MODULES,
    "DeepseekV3": _LATENT_MODULES,
    "Dots1": _DEEPSEEK_MODULES,
    "NemotronH": _NEMOTRON_MODULES,
    "FalconH1": _FALCON_H1_MODULES,
    "Ernie4_5_Moe": _DEEPSEEK_MODULES,
    "MiniMaxM2": _MIXTRAL_MODULES,
    "Phimoe": _MIXTRAL_MODULES,
    "HunYuanDenseV1": _HUNYUAN_MODULES,
    "HunYuanMoEV1": _HUNYUAN_MODULES,
    "Lfm2": _LFM2_MODULES,
    "Lfm2Moe": _LFM2_MODULES,
    "SeedOss": _MODULES | _POST_ATTENTION,
    **dict.fromkeys(_DELTA_FAMILIES, _DELTA_MODULES),
    "Exaone4": _GEMMA_MODULES,
    "Olmo2": _GEMMA_MODULES,
    "Olmo3": _GEMMA_MODULES,
    "Gemma2": _GEMMA_MODULES,
    "Gemma3": _GEMMA_MODULES,
}
#: The corrections of experts' scores, which GGUF stores as a bias.
_CORRECTION = "exp_probs_b"
_CORRECTION_NAMES = {
    "Glm4Moe": "mlp.gate.e_score_correction_bias",
    "DeepseekV3": "mlp.gate.e_score_correction_bias",
    "Dots1": "mlp.gate.e_score_correction_bias",
    "NemotronH": "mlp.gate.e_score_correction_bias",
    "Ernie4_5_Moe": "mlp.moe_statics.e_score_correction_bias",
    "MiniMaxM2": "block_sparse_moe.e_score_correction_bias",
    "Lfm2Moe": "feed_forward.expert_bias",
}
#: Config fields that state the number of experts.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: Tensors with all experts of a layer → name of one expert's.
_EXPERTS = {
    name: f"mlp.experts.{{}}.{name.split('_')[1]}_proj"
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
}
_SPARSE_EXPERTS = {
    module: f"block_sparse_moe.{name.removeprefix('mlp.')}" for module, name in _EXPERTS.items()
}
_MIXTRAL_EXPERTS = {
    f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{ours}"
    for part, ours in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_GPT_OSS_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_FAMILY_EXPERTS = {
    "Lfm2Moe": {
        module: name.replace("block_sparse_moe", "feed_forward")
        for module, name in _MIXTRAL_EXPERTS.items()
    },
    "Llama4": {module: f"feed_forward.{name[4:]}" for module, name in _EXPERTS.items()},
    "GptOss": _GPT_OSS_EXPERTS,
    "Mixtral": _MIXTRAL_EXPERTS,
    "MiniMaxM2": _MIXTRAL_EXPERTS,
    "Phimoe": _MIXTRAL_EXPERTS,
    "GraniteMoe": _SPARSE_EXPERTS,
    "GraniteMoeHybrid": _SPARSE_EXPERTS,
}
#: Experts' tensors that molink interleaves row by row with another tensor, by family.
_PAIRED_EXPERTS = {"GptOss": {"ffn_gate_exps": "ffn_up_exps"}}


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor as molink stores it, from ``nbytes`` bytes at ``offset`` of GGUF file ``split``.

    ``dtype`` is the safetensors name; weights in blocks are ``U8``, with the block type in
    ``name``. With ``permuted_heads`` each head's rows are reordered from pairs to halves.
    ``subtract`` is subtracted from each number. With ``paired`` (a file number, an offset and a
    number of rows) half of the bytes come from there, and rows of both sources alternate.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    permuted_heads: int = 0
    subtract: float = 0.0
    split: int = 0
    paired: tuple[int, int, int] | None = None


def map_tensors(file: GgufFile, config: dict[str, Any]) -> Iterator[MappedTensor]:
    """Map the tensors of the model whose ``config`` was built from ``file``.

    Raises:
        BrokenModel: a tensor does not belong to such a model.
        UnsupportedModel: a tensor's type is not supported.
    """
    family = config["architectures"][0].removesuffix("ForCausalLM")
    for tensor in file.tensors.values():
        where = f"{file.path}: tensor {tensor.name}"
        if tensor.name in _CONSTANTS:
            continue
        if tensor.name in _MODEL_TENSORS:
            yield map_tensor(
                _MODEL_TENSORS[tensor.name], tensor, where, less=_norm_offset(family, tensor.name)
            )
            continue
        match = _LAYER_PATTERN.fullmatch(tensor.name)
        other = _OTHER_NAMES.get(family, {}).get(match[2]) if match else None
        if match is not None and other is not None:
            flat = _reshape_tensor(tensor, match[2])
            yield map_tensor(f"model.layers.{match[1]}.{other}", flat, where)
            continue
        module, _, kind = match[2].rpartition(".") if match else ("", "", "")
        if match is None or kind not in ("weight", "bias"):
            raise BrokenModel(f"{where} is unknown in a {family} model")
        behind = _count_behind(file, int(match[1]), config)
        if behind > (family in _MTP_FAMILIES) or (behind and module in _MTP_COPIES):
            continue
        prefix, experts = f"model.layers.{match[1]}.", _FAMILY_EXPERTS.get(family, _EXPERTS)
        pairs = _PAIRED_EXPERTS.get(family, {})
        if module in experts:
            paired = None
            if module in pairs:
                paired = file.tensors.get(f"blk.{match[1]}.{pairs[module]}.{kind}")
                if not _are_alike(tensor, paired):
                    raise BrokenModel(f"{where} and that of {pairs[module]} don't match")
            named = f"{prefix}{experts[module]}.{kind}"
            yield from _map_experts(tensor, named, config, paired, where)
        elif module != _LAYER_CONSTANTS and module not in pairs.values():
            yield from _map_layer_tensor(tensor, prefix, module, kind, family, config)


def _count_behind(file: GgufFile, layer: int, config: dict[str, Any]) -> int:
    """Return the number of an MTP layer, from 1; 0 for other layers."""
    number: int = 1 + layer - config["num_hidden_layers"]
    is_behind = 0 < number <= config.get("num_nextn_predict_layers", 0)
    return number if is_behind and f"blk.{layer}.nextn.eh_proj.weight" in file.tensors else 0


def _map_layer_tensor(
    tensor: GgufTensor, prefix: str, module: str, kind: str, family: str, config: dict[str, Any]
) -> Iterator[MappedTensor]:
    where = f"tensor {tensor.name}"
    if (module, kind) == (_CORRECTION, "bias") and family in _CORRECTION_NAMES:
        if family == "Ernie4_5_Moe":
            tensor = replace(tensor, shape=(1, *tensor.shape))
        yield map_tensor(f"{prefix}{_CORRECTION_NAMES[family]}", tensor, where)
        return
    modules = _FAMILY_MODULES.get(family, _MODULES)
    if family in _MTP_FAMILIES:
        modules = modules | _MTP_MODULES
    ours = modules.get(module)
    if ours is None:
        raise BrokenModel(f"{where} is unknown in a {family} model")
    heads, tensor = 0, _reshape_tensor(tensor, module)
    if family in _PERMUTED_FAMILIES and module in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if module == "attn_q" else "num_key_value_heads"]
        if tensor.shape[0] % (2 * heads):
            raise BrokenModel(
                f"{where}: {tensor.shape[0]} rows can't be divided into {heads} heads"
            )
    less = _norm_offset(family, module)
    yield map_tensor(f"{prefix}{ours}.{kind}", tensor, where, heads=heads, less=less)


def _reshape_tensor(tensor: GgufTensor, module: str) -> GgufTensor:
    """Reshape a tensor to the dimensions that it has in molink."""
    match module, tensor.shape:
        case "ffn_gate_inp_shexp", (columns,):
            # Older converters omit the first dimension.
            return replace(tensor, shape=(1, columns))
        case (("ssm_conv1d" | "shortconv.conv"), (channels, width)):
            return replace(tensor, shape=(channels, 1, width))
        case (("ssm_a" | "ssm_d" | "ssm_norm"), (rows, columns)):
            return replace(tensor, shape=(rows * columns,))
        case (("attn_k_b" | "attn_v_b"), (heads, rows, columns)):
            return replace(tensor, shape=(heads * rows, columns))
    return tensor


def _are_alike(tensor: GgufTensor, other: GgufTensor | None) -> bool:
    found = other and (other.shape, other.ggml_type)
    return found == (tensor.shape, tensor.ggml_type)


def _map_experts(
    tensor: GgufTensor,
    named: str,
    config: dict[str, Any],
    paired: GgufTensor | None,
    where: str,
) -> Iterator[MappedTensor]:
    """Map the tensor of all experts to one tensor per expert, ``named.format(index)``.

    With ``paired``, rows of both tensors alternate.
    """
    if len(tensor.shape) < 2:
        raise BrokenModel(f"{where}: shape {list(tensor.shape)} is not that of all experts")
    count, *shape = tensor.shape
    if count != next((config[name] for name in _EXPERT_COUNTS if name in config), None):
        raise BrokenModel(f"{where} has {count} experts, unlike its metadata")
    nbytes = tensor.nbytes // count
    for index in range(count):
        begin = tensor.offset + index * nbytes
        one = replace(tensor, shape=tuple(shape), offset=begin, nbytes=nbytes)
        made = map_tensor(named.format(index), one, where)
        if paired is not None:
            made = replace(
                made,
                shape=(2 * made.shape[0], *made.shape[1:]),
                nbytes=2 * nbytes,
                paired=(paired.split, paired.offset + index * nbytes, made.shape[0]),
            )
        yield made


def _norm_offset(family: str, name: str) -> float:
    """Return the number that converters add to a norm's weights."""
    name = name.removesuffix(".weight")
    has_offset = family.startswith("Gemma") or family in _DELTA_FAMILIES
    return float(has_offset and name.endswith("norm") and name != "ssm_norm")


def map_tensor(
    name: str, tensor: GgufTensor, where: str, *, heads: int = 0, less: float = 0.0
) -> MappedTensor:
    """Map a tensor to ``name``, with :class:`MappedTensor`'s ``permuted_heads`` and ``subtract``.

    Raises:
        UnsupportedModel: its type is not supported there.
    """
    kind, shape, dtype = tensor.ggml_type, tensor.shape, tensor.ggml_type.safetensors_dtype
    if less and kind.name != "f32":
        raise UnsupportedModel(f"{where}: norms are read as f32 only, not as {kind.name}")
    if not dtype:
        packed = packed_shape(kind, shape)
        if packed is None:
            raise UnsupportedModel(
                f"{where}: {kind.name} with shape {list(shape)} is not supported"
            )
        name, shape, dtype = packed_name(name, kind), packed, "U8"
    return MappedTensor(name, dtype, shape, tensor.offset, tensor.nbytes, heads, less, tensor.split)
