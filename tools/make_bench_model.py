"""A random model for benchmarks, as safetensors and (for llama.cpp) as f16 GGUF in one folder.

    python -m tools.make_bench_model FOLDER            # about 340 M parameters, 690 MB per format
    python -m tools.make_bench_model FOLDER --no-gguf
    python -m tools.make_bench_model FOLDER --no-gguf --wide --layers 8     # 2007 M parameters

A Llama of 24 layers: hidden 1024, 16 query and 4 key-value heads, ffn 2816, 32 000 tokens, bf16.
With ``--wide`` its layers have the shapes of Llama 3 8B's.
The weights are random, and the same in both files. GGUF needs ``pip install gguf``.
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
    """Shape of a layer."""

    hidden: int
    heads: int
    kv_heads: int
    inner: int

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads


SMALL, WIDE = Shape(1024, 16, 4, 2816), Shape(4096, 32, 8, 14336)


def main() -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--wide", action="store_true", help="layers as Llama 3 8B has them")
    parser.add_argument("--gguf", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    folder: Path = options.folder
    shape = WIDE if options.wide else SMALL
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
    """Names as in Hugging Face's Llama, values of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int) -> Tensor:
        weight = torch.randn(rows, columns, generator=generator)
        return weight.mul_(columns**-0.5).to(torch.bfloat16)

    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    yield "model.embed_tokens.weight", draw(VOCABULARY, shape.hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", ones.clone()
        yield f"{prefix}post_attention_layernorm.weight", ones.clone()
        for name, rows, columns in (
            ("self_attn.q_proj", shape.hidden, shape.hidden),
            ("self_attn.k_proj", shape.kv_heads * shape.head_dim, shape.hidden),
            ("self_attn.v_proj", shape.kv_heads * shape.head_dim, shape.hidden),
            ("self_attn.o_proj", shape.hidden, shape.hidden),
            ("mlp.gate_proj", shape.inner, shape.hidden),
            ("mlp.up_proj", shape.inner, shape.hidden),
            ("mlp.down_proj", shape.hidden, shape.inner),
        ):
            yield f"{prefix}{name}.weight", draw(rows, columns)
    yield "model.norm.weight", ones.clone()
    yield "lm_head.weight", draw(VOCABULARY, shape.hidden)


def model_config(layers: int, shape: Shape) -> dict[str, object]:
    """Its ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
    """The same weights for llama.cpp: f16 matrices, f32 norms."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("molink-bench")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, tensor in tensors.items():
        found = names.get_name(name, try_suffixes=(".weight",))
        if found is None:
            raise ValueError(f"GGUF has no name for {name}")
        if "q_proj" in name:
            tensor = _interleave_heads(tensor, shape.heads)
        elif "k_proj" in name:
            tensor = _interleave_heads(tensor, shape.kv_heads)
        kind = torch.float32 if tensor.dim() == 1 else torch.float16
        writer.add_tensor(found, tensor.to(kind).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave_heads(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k in the order of llama.cpp's rotary pairs: neighbours, not halves."""
    halves = weight.view(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    main()
