"""The shape of the model, and its files in the Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from tools.demo_model.tokenizer import TEXT_END, TURN_END, VOCABULARY, save_tokenizer, token_id

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
}


def new_network() -> Qwen2ForCausalLM:
    """An untrained network; its weights follow from torch's seed."""
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE))


def load_network(folder: Path) -> Qwen2ForCausalLM:
    """The trained network in fp32."""
    network = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    network.train(False)
    return network


def save_model(network: Qwen2ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights (bf16), configuration and tokenizer.

    The configuration is written by hand: the keys every reader of the layout knows, and no
    version of a library, so the same weights always give the same files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end, pad = token_id(tokenizer, TURN_END), token_id(tokenizer, TEXT_END)
    marks = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    head = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    _write_json(folder / "config.json", {**head, **SHAPE, **marks, "torch_dtype": "bfloat16"})
    sampling = {"do_sample": True, "temperature": 0.3, "top_p": 0.9, "top_k": 20}
    generation = {**marks, "eos_token_id": [end, pad], **sampling}
    _write_json(folder / "generation_config.json", generation)
    save_tokenizer(tokenizer, folder)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in network.state_dict().items()
        if name != "lm_head.weight"
    }
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
