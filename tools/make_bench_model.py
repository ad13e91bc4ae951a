"""A random model for benchmarks, as safetensors and (for llama.cpp) as f16 GGUF in one folder.

    python -m tools.make_bench_model FOLDER            # 340 M, 690 MB per format
    python -m tools.make_bench_model FOLDER --no-gguf
    python -m tools.make_bench_model FOLDER --no-gguf --shape wide --layers 8   # 2007 M
    python -m tools.make_bench_model FOLDER --shape experts --layers 4          # 2640 M

A Llama of 24 layers: hidden 1024, 16 query and 4 key-value heads, ffn 2816, 32 000 tokens, bf16.
``wide``: layers with the shapes of Llama 3 8B's. ``experts``: of Qwen3-30B-A3B's, 128 experts, 8 of
which compute a row. The weights are random, and the same in both files. GGUF needs ``pip install
gguf``.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

LAYERS = 24
VOCABULARY = 32_000
CONTEXT = 8192
#: The tokenizer's only merge, required by llama.cpp.
MERGE = ("t", "h")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a layer: a Llama's, or with ``experts`` a Qwen3-MoE's."""

    hidden: int
    heads: int
    kv_heads: int
    #: Elements of a head.
    head_dim: int
    #: Width of the MLP, or of each expert.
    inner: int
    experts: int = 0
    #: Experts that compute a row.
    active: int = 0


SMALL, WIDE = Shape(1024, 16, 4, 64, 2816), Shape(4096, 32, 8, 128, 14336)
EXPERTS = Shape(2048, 32, 4, 128, 768, experts=128, active=8)
SHAPES = {"small": SMALL, "wide": WIDE, "experts": EXPERTS}


def main() -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--gguf", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    folder: Path = options.folder
    shape = SHAPES[options.shape]
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(make_tensors(options.layers, shape))
    config = model_config(options.layers, shape)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tokens = write_tokenizer(folder)
    if options.gguf:
        write_gguf(folder / "model-f16.gguf", tensors, tokens, options.layers, shape)
    print(f"{folder}: {parameters / 1e6:.0f} M parameters")


def make_tensors(layers: int, shape: Shape) -> Iterator[tuple[str, Tensor]]:
    """Names as in Hugging Face, values of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int) -> Tensor:
        weight = torch.randn(rows, columns, generator=generator)
        return weight.mul_(columns**-0.5).to(torch.bfloat16)

    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", draw(VOCABULARY, shape.hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", ones.clone()
        yield f"{prefix}post_attention_layernorm.weight", ones.clone()
        yield f"{prefix}self_attn.q_proj.weight", draw(queries, shape.hidden)
        yield f"{prefix}self_attn.k_proj.weight", draw(keys, shape.hidden)
        yield f"{prefix}self_attn.v_proj.weight", draw(keys, shape.hidden)
        yield f"{prefix}self_attn.o_proj.weight", draw(shape.hidden, queries)
        if shape.experts:
            yield f"{prefix}self_attn.q_norm.weight", ones[: shape.head_dim].clone()
            yield f"{prefix}self_attn.k_norm.weight", ones[: shape.head_dim].clone()
            yield f"{prefix}mlp.gate.weight", draw(shape.experts, shape.hidden)
        mlps = [f"experts.{expert}." for expert in range(shape.experts)] or [""]
        for mlp in mlps:
            yield f"{prefix}mlp.{mlp}gate_proj.weight", draw(shape.inner, shape.hidden)
            yield f"{prefix}mlp.{mlp}up_proj.weight", draw(shape.inner, shape.hidden)
            yield f"{prefix}mlp.{mlp}down_proj.weight", draw(shape.hidden, shape.inner)
    yield "model.norm.weight", ones.clone()
    yield "lm_head.weight", draw(VOCABULARY, shape.hidden)


def model_config(layers: int, shape: Shape) -> dict[str, object]:
    """Its ``config.json``."""
    experts = {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.active,
        "moe_intermediate_size": shape.inner,
        "norm_topk_prob": True,
    }
    return {
        "architectures": ["Qwen3MoeForCausalLM" if shape.experts else "LlamaForCausalLM"],
        "model_type": "qwen3_moe" if shape.experts else "llama",
        **(experts if shape.experts else {}),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 256,
        "eos_token_id": 258,
    }


def write_tokenizer(folder: Path, vocabulary_size: int = VOCABULARY) -> list[str]:
    """A byte-level tokenizer (nearly a token per byte); returns all tokens by id."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = [f"tok{index}" for index in range(vocabulary_size - len(letters) - len(SPECIAL) - 1)]
    tokens = [*letters, *SPECIAL, "".join(MERGE), *fillers]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[MERGE]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "chat_template": TEMPLATE,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return tokens


def write_gguf(
    path: Path, tensors: dict[str, Tensor], tokens: list[str], layers: int, shape: Shape
) -> None:
    """The same weights for llama.cpp: f16 matrices, f32 norms and routers."""
    import gguf

    arch = gguf.MODEL_ARCH.QWEN3MOE if shape.experts else gguf.MODEL_ARCH.LLAMA
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_name("molink-bench")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.active)
        writer.add_expert_feed_forward_length(shape.inner)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [
        gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens
    ]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_eos_token_id(258)
    writer.add_bos_token_id(256)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(arch, layers)
    for name, tensor in _stack_experts(tensors, shape.experts):
        found = names.get_name(name, try_suffixes=(".weight",))
        if found is None:
            raise ValueError(f"GGUF has no name for {name}")
        if not shape.experts and "q_proj" in name:
            tensor = _interleave_heads(tensor, shape.heads)
        elif not shape.experts and "k_proj" in name:
            tensor = _interleave_heads(tensor, shape.kv_heads)
        plain = tensor.dim() == 1 or "mlp.gate." in name
        writer.add_tensor(found, tensor.to(torch.float32 if plain else torch.float16).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stack_experts(tensors: dict[str, Tensor], experts: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors with those of a layer's experts as one, as GGUF has them."""
    for name, tensor in tensors.items():
        if ".experts." not in name:
            yield name, tensor
        elif ".experts.0." in name:
            each = [name.replace(".experts.0.", f".experts.{one}.") for one in range(experts)]
            stacked = torch.stack([tensors[one] for one in each])
            yield name.replace(".experts.0.", ".experts."), stacked


def _interleave_heads(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k in the order of llama.cpp's rotary pairs: neighbours, not halves."""
    halves = weight.view(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    main()
