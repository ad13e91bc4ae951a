"""Translates a GGUF file's metadata to a ``config.json``."""

from collections.abc import Mapping
from typing import Any, Final

from molink.errors import BrokenModel, UnsupportedModel
from molink.gguf.arch_metadata import ArchMetadata, ReadTensor
from molink.gguf.family_configs import FAMILY_CONFIGS
from molink.gguf.gguf_file import GgufFile, GgufTensor
from molink.gguf.metadata import GgufMetadata

#: Tensors with frequency divisors of RoPE.
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
)
#: Architecture of the files with vision towers (mmproj).
MMPROJ_ARCHITECTURE = "clip"
_EMBEDDING_NAME = "token_embd.weight"
#: llama.cpp's numbers of pooling types.
_NOT_POOLED, _LAST_ROW = 0, 3


def build_config(file: GgufFile, read: ReadTensor, ends: tuple[int, ...]) -> dict[str, Any]:
    """Build the config of the model in ``file``; ``ends`` are its end-of-sequence ids.

    Raises:
        UnsupportedModel: an architecture or feature is not implemented.
        BrokenModel: metadata are missing or invalid.
    """
    named = check_architecture(file)
    about = ArchMetadata(file, named, read)
    return {**_base_config(about), **FAMILY_CONFIGS[named](about), "eos_token_id": list(ends)}


def check_architecture(file: GgufFile) -> str:
    """Return the architecture of the model in ``file``.

    Raises:
        UnsupportedModel: it is not implemented, or the file holds no model.
    """
    named = file.metadata.get_string("general.architecture")
    if named == MMPROJ_ARCHITECTURE:
        raise UnsupportedModel(
            f"{file.path} holds a vision tower (mmproj): name the model, which is another file"
        )
    if named not in FAMILY_CONFIGS:
        known = ", ".join(sorted(FAMILY_CONFIGS))
        raise UnsupportedModel(
            f"{file.path}: GGUF architecture {named[:80]!r} is not supported; supported are: "
            f"{known}"
        )
    if file.metadata.get_string("general.type", "model") != "model":
        kind = file.metadata.get_string("general.type")
        raise UnsupportedModel(f"{file.path} holds {kind[:80]!r} (general.type), not a model")
    return named


def is_embedding_model(metadata: GgufMetadata) -> bool:
    """Whether the model embeds a text as its last row."""
    key = f"{metadata.get_string('general.architecture')}.pooling_type"
    kind = metadata.get_count(key) if key in metadata else _NOT_POOLED
    if kind not in (_NOT_POOLED, _LAST_ROW):
        raise UnsupportedModel(
            f"{metadata.where}: {key} {kind} is not supported: molink serves embedding models that "
            f"pool by the last token ({_LAST_ROW}), and rerankers without a head of their own"
        )
    return kind == _LAST_ROW


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


def _base_config(about: ArchMetadata) -> dict[str, Any]:
    context = about.get_integer("context_length")
    return {
        "vocab_size": read_vocab_size(about.file),
        "hidden_size": about.get_integer("embedding_length"),
        "num_hidden_layers": about.layers,
        "num_attention_heads": about.get_uniform("attention.head_count"),
        **({} if about.is_latent else _head_config(about)),
        # The other layers of Nemotron-H have no MLP.
        "intermediate_size": about.get_uniform(
            _inner_key(about), ignores_zeros=about.name.startswith("nemotron_h")
        ),
        **_norm_config(about),
        "max_position_embeddings": context,
        "tie_word_embeddings": "output.weight" not in about.file.tensors,
        "torch_dtype": _find_dtype(about.file.tensors),
        **_rope_config(about, context),
    }


def _norm_config(about: ArchMetadata) -> dict[str, Any]:
    """Read the epsilon of RMSNorm or of LayerNorm."""
    key = "attention.layer_norm_epsilon"
    if about.has_key(key):
        return {"layer_norm_eps": about.get_number(key)}
    return {"rms_norm_eps": about.get_number("attention.layer_norm_rms_epsilon")}


def _inner_key(about: ArchMetadata) -> str:
    """Return the key of the MLPs' width; a model may have experts only."""
    key = "feed_forward_length"
    return key if about.has_key(key) else f"expert_{key}"


def _head_config(about: ArchMetadata) -> dict[str, Any]:
    hidden, heads = about.get_integer("embedding_length"), about.get_uniform("attention.head_count")
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
    return {
        "num_key_value_heads": about.get_uniform(key_heads, ignores_zeros=True)
        if about.has_key(key_heads)
        else heads,
        "head_dim": head_dim,
        "partial_rotary_factor": rotary / head_dim,
    }


def _find_dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """Find the most common type of weights; quantized weights compute in bf16."""
    kinds = [tensor.ggml_type.name for tensor in tensors.values() if len(tensor.shape) > 1]
    plain: Final = {"f32": "float32", "f16": "float16"}
    return plain.get(max(sorted(set(kinds)), key=kinds.count), "bfloat16")


def _rope_config(about: ArchMetadata, context: int) -> dict[str, Any]:
    made = _scaled_rope_config(about, context)
    key = about.full_key("rope.dimension_sections")
    if key in about.metadata:
        # Pairs of an image's position, row and column; the fourth is 0.
        sections = about.metadata.get_integers(key, 4)
        if sections[3]:
            raise UnsupportedModel(f"{about.metadata.where}: a fourth section of {key}")
        scaling = made.get("rope_scaling", {"rope_type": "default"})
        made["rope_scaling"] = {**scaling, "mrope_section": sections[:3]}
    return made


def _scaled_rope_config(about: ArchMetadata, context: int) -> dict[str, Any]:
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
        # Llama 3: frequency divisors that apply at any length.
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
    key = "attention.temperature_scale"
    if about.has_key(key):
        scaling["llama_4_scaling_beta"] = about.get_number(key)
    if kind == "yarn":
        scaling |= {"original_max_position_embeddings": original, **_yarn_config(about)}
        if about.name == "gpt-oss":
            # The released model's value; GGUF has no key for it.
            scaling["truncate"] = False
    return {**made, "rope_scaling": scaling}


def _yarn_config(about: ArchMetadata) -> dict[str, Any]:
    """Read YaRN settings that differ from the defaults."""
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
    if "mscale_all_dim" not in found:
        return found
    if not about.is_latent:
        return {**found, "mscale": 1.0}
    # In this architecture only, llama.cpp's converter writes a tenth of it.
    scale = 10.0 * found["mscale_all_dim"]
    return {**found, "mscale": scale, "mscale_all_dim": scale}
