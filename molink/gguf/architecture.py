"""Translates a GGUF file's metadata to a ``config.json``."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from molink.errors import BrokenModel, UnsupportedModel
from molink.gguf.gguf_file import GgufFile, GgufTensor

#: Tensors with frequency divisors of RoPE.
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
)
_EMBEDDING_NAME = "token_embd.weight"
_MAX_FACTORS = 4096
_MAX_LAYERS = 4096
#: Layers without and with a sliding window.
_LAYER_TYPES = ("full_attention", "sliding_attention")
#: Reads a small tensor of numbers.
ReadTensor = Callable[[GgufTensor], list[float]]


def build_config(file: GgufFile, read: ReadTensor, ends: tuple[int, ...]) -> dict[str, Any]:
    """Build the config of the model in ``file``; ``ends`` are its end-of-sequence ids.

    Raises:
        UnsupportedModel: an architecture or feature is not implemented.
        BrokenModel: metadata are missing or invalid.
    """
    named = file.metadata.get_string("general.architecture")
    maker = _ARCHITECTURES.get(named)
    if maker is None:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise UnsupportedModel(
            f"{file.path}: GGUF architecture {named[:80]!r} is not supported; supported are: "
            f"{known}"
        )
    if file.metadata.get_string("general.type", "model") != "model":
        kind = file.metadata.get_string("general.type")
        raise UnsupportedModel(f"{file.path} holds {kind[:80]!r} (general.type), not a model")
    about = _ArchMetadata(file, named, read)
    return {**_base_config(about), **maker(about), "eos_token_id": list(ends)}


def read_vocab_size(file: GgufFile) -> int:
    """Read the number of embedding rows.

    Raises:
        BrokenModel: there is no embedding.
    """
    tensor = file.tensors.get(_EMBEDDING_NAME)
    if tensor is None or len(tensor.shape) != 2:
        raise BrokenModel(
            f"{file.path}: there is no tensor {_EMBEDDING_NAME} with rows and columns"
        )
    return tensor.shape[0]


class _ArchMetadata:
    """Metadata under the architecture's prefix."""

    def __init__(self, file: GgufFile, name: str, read: ReadTensor) -> None:
        self.file, self.metadata, self.read = file, file.metadata, read
        self._name = name
        self.layers = file.metadata.get_integer(self.full_key("block_count"), maximum=_MAX_LAYERS)

    def full_key(self, key: str) -> str:
        return f"{self._name}.{key}"

    def has_key(self, key: str) -> bool:
        return self.full_key(key) in self.metadata

    def get_integer(self, key: str, default: int | None = None) -> int:
        return self.metadata.get_integer(self.full_key(key), default)

    def get_number(self, key: str, default: float | None = None) -> float:
        return self.metadata.get_number(self.full_key(key), default)

    def get_uniform(self, key: str, layers: int) -> int:
        """Return a number that is equal for all layers."""
        found = set(self.metadata.get_integers(self.full_key(key), layers))
        if len(found) != 1 or 0 in found:
            raise UnsupportedModel(
                f"{self.metadata.where}: {self.full_key(key)} differs between layers, which is not "
                "supported"
            )
        return found.pop()

    def read_factors(self, name: str) -> list[float]:
        """Read the numbers of a small tensor."""
        tensor = self.file.tensors[name]
        if (
            len(tensor.shape) != 1
            or tensor.shape[0] > _MAX_FACTORS
            or tensor.ggml_type.name != "f32"
        ):
            raise BrokenModel(f"{self.file.path}: tensor {name} is not a short list of f32 numbers")
        return self.read(tensor)


def _base_config(about: _ArchMetadata) -> dict[str, Any]:
    layers = about.layers
    hidden = about.get_integer("embedding_length")
    heads = about.get_uniform("attention.head_count", layers)
    head_dim = about.get_integer("attention.key_length", max(1, hidden // heads))
    rotary = about.get_integer("rope.dimension_count", head_dim)
    if rotary > head_dim or (hidden % heads and not about.has_key("attention.key_length")):
        raise BrokenModel(
            f"{about.metadata.where}: {about.full_key('embedding_length')} {hidden} and "
            f"{about.full_key('rope.dimension_count')} {rotary} contradict "
            f"{about.full_key('attention.head_count')} {heads}"
        )
    if about.get_integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(
            f"{about.metadata.where}: {about.full_key('attention.value_length')} is not the "
            "length of "
            "keys, which is not supported"
        )
    key_heads = "attention.head_count_kv"
    context = about.get_integer("context_length")
    return {
        "vocab_size": read_vocab_size(about.file),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": about.get_uniform(key_heads, layers)
        if about.has_key(key_heads)
        else heads,
        "head_dim": head_dim,
        "intermediate_size": about.get_uniform("feed_forward_length", layers),
        "rms_norm_eps": about.get_number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "tie_word_embeddings": "output.weight" not in about.file.tensors,
        "torch_dtype": _find_dtype(about.file.tensors),
        "partial_rotary_factor": rotary / head_dim,
        **_rope_config(about, context),
    }


def _find_dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """Most common type of weights; quantized ones are computed in bf16."""
    kinds = [tensor.ggml_type.name for tensor in tensors.values() if len(tensor.shape) > 1]
    plain: Final = {"f32": "float32", "f16": "float16"}
    return plain.get(max(sorted(set(kinds)), key=kinds.count), "bfloat16")


def _rope_config(about: _ArchMetadata, context: int) -> dict[str, Any]:
    made: dict[str, Any] = {"rope_theta": about.get_number("rope.freq_base", 10_000.0)}
    original = about.get_integer("rope.scaling.original_context_length", context)
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    if ROPE_LONG in about.file.tensors and ROPE_SHORT in about.file.tensors:
        # Phi: LongRoPE.
        scaling["short_factor"] = about.read_factors(ROPE_SHORT)
        scaling["long_factor"] = about.read_factors(ROPE_LONG)
        if about.has_key("rope.scaling.attn_factor"):
            scaling["attention_factor"] = about.get_number("rope.scaling.attn_factor")
        return {**made, "rope_scaling": scaling, "original_max_position_embeddings": original}
    if ROPE_FREQS in about.file.tensors:
        # Llama 3: divisors that apply at any length.
        scaling["short_factor"] = scaling["long_factor"] = about.read_factors(ROPE_FREQS)
        scaling |= {"factor": 1.0, "attention_factor": 1.0}
        return {**made, "rope_scaling": scaling}
    kind = about.metadata.get_string(about.full_key("rope.scaling.type"), "none")
    if kind == "none":
        return made
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"{about.metadata.where}: {about.full_key('rope.scaling.type')} {kind[:80]!r} is not "
            "supported here (only linear and yarn)"
        )
    scaling = {"rope_type": kind, "factor": about.get_number("rope.scaling.factor")}
    if kind == "yarn":
        scaling |= {"original_max_position_embeddings": original, **_yarn_config(about)}
    return {**made, "rope_scaling": scaling}


def _yarn_config(about: _ArchMetadata) -> dict[str, Any]:
    """YaRN settings that differ from the defaults."""
    extrapolated = about.get_number("rope.scaling.yarn_ext_factor", 1.0)
    if extrapolated != 1.0:
        raise UnsupportedModel(
            f"{about.metadata.where}: {about.full_key('rope.scaling.yarn_ext_factor')} "
            f"{extrapolated} "
            "is not supported (only 1)"
        )
    names = {
        "attn_factor": "attention_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "log_multiplier": "mscale_all_dim",
    }
    found: dict[str, Any] = {
        ours: about.get_number(f"rope.scaling.yarn_{theirs}")
        for theirs, ours in names.items()
        if about.has_key(f"rope.scaling.yarn_{theirs}")
    }
    return {**found, "mscale": 1.0} if "mscale_all_dim" in found else found


def _llama_config(about: _ArchMetadata) -> dict[str, Any]:
    biased = {"attention_bias": "blk.0.attn_q.bias" in about.file.tensors}
    if not about.has_key("expert_count"):
        return {"architectures": ["LlamaForCausalLM"], **biased}
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": about.get_integer("expert_count"),
        "num_experts_per_tok": about.get_integer("expert_used_count"),
        "sliding_window": None,
    }


def _mistral3_config(about: _ArchMetadata) -> dict[str, Any]:
    """Mistral Small 3.1 and 3.2, which older files label ``llama``."""
    key = "attention.temperature_scale"
    if about.has_key(key):
        raise UnsupportedModel(
            f"{about.metadata.where}: {about.full_key(key)} (Ministral 3) is not supported"
        )
    return _llama_config(about)


def _granite_config(about: _ArchMetadata) -> dict[str, Any]:
    heads = about.get_uniform("attention.head_count", about.layers)
    head_dim = about.get_integer(
        "attention.key_length", about.get_integer("embedding_length") // heads
    )
    return {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in about.file.tensors,
        "attention_multiplier": about.get_number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": about.get_number("embedding_scale", 1.0),
        "residual_multiplier": about.get_number("residual_scale", 1.0),
        "logits_scaling": about.get_number("logit_scale", 1.0),
    }


def _olmo2_config(about: _ArchMetadata) -> dict[str, Any]:
    """OLMo 2, and OLMo 3, which has windows."""
    if not about.has_key("attention.sliding_window"):
        return {"architectures": ["Olmo2ForCausalLM"]}
    made = {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": about.get_integer("attention.sliding_window"),
    }
    key = "attention.sliding_window_pattern"
    if not about.has_key(key):
        return made  # all layers but every fourth
    windowed = about.metadata.get_integers(about.full_key(key), about.layers)
    if not set(windowed) <= {0, 1}:
        raise BrokenModel(
            f"{about.metadata.where}: metadata {about.full_key(key)} doesn't tell each layer's "
            "window"
        )
    return {**made, "layer_types": [_LAYER_TYPES[each] for each in windowed]}


def _glm4_config(about: _ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Glm4ForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in about.file.tensors,
    }


def _plain_config(architecture: str) -> Callable[[_ArchMetadata], dict[str, Any]]:
    return lambda about: {"architectures": [architecture]}


def _qwen2_moe_config(about: _ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": about.get_integer("expert_count"),
        "num_experts_per_tok": about.get_integer("expert_used_count"),
        "moe_intermediate_size": about.get_integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": about.get_integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "qkv_bias": "blk.0.attn_q.bias" in about.file.tensors,
    }


def _qwen3_moe_config(about: _ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": about.get_integer("expert_count"),
        "num_experts_per_tok": about.get_integer("expert_used_count"),
        "moe_intermediate_size": about.get_integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _phi3_config(about: _ArchMetadata) -> dict[str, Any]:
    window = about.metadata.get_index(about.full_key("attention.sliding_window"))
    return {"architectures": ["Phi3ForCausalLM"], "sliding_window": window or None}


def _gemma2_config(about: _ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": _attention_scalar(about, largest=46),
        "sliding_window": about.get_integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": about.get_number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": about.get_number("final_logit_softcapping", 30.0),
    }


def _gemma3_config(about: _ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": _attention_scalar(about, largest=62),
        "sliding_window": about.get_integer("attention.sliding_window"),
        "rope_local_base_freq": about.get_number("rope.freq_base_swa", 10_000.0),
    }


def _attention_scalar(about: _ArchMetadata, largest: int) -> int:
    """Square of the divisor of attention scores; only the layer count identifies 27B models."""
    heads = about.get_uniform("attention.head_count", about.layers)
    share = about.get_integer("embedding_length") // heads
    is_largest = about.layers == largest
    return share if is_largest else about.get_integer("attention.key_length", share)


_ARCHITECTURES: dict[str, Callable[[_ArchMetadata], dict[str, Any]]] = {
    "llama": _llama_config,
    "mistral3": _mistral3_config,
    "granite": _granite_config,
    "smollm3": _plain_config("SmolLM3ForCausalLM"),
    "olmo2": _olmo2_config,
    "glm4": _glm4_config,
    "qwen2moe": _qwen2_moe_config,
    "qwen2": _plain_config("Qwen2ForCausalLM"),
    "qwen3": _plain_config("Qwen3ForCausalLM"),
    "qwen3moe": _qwen3_moe_config,
    "phi3": _phi3_config,
    "gemma2": _gemma2_config,
    "gemma3": _gemma3_config,
}
