"""The bundled model as an F32 GGUF file, and a text that it knows: to compare kinds of blocks.

    python -m tools.make_demo_gguf FOLDER
    llama-quantize --pure FOLDER/demo-F32.gguf FOLDER/demo-Q4_K.gguf Q4_K
    python -m tools.compare_llama FOLDER/demo-Q4_K.gguf FOLDER/held_out.txt --tokens 1500 …

It is small, but trained, and its rows are whole blocks of 256 weights, as those of most models are.
The text are conversations that it was not trained on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

from molink.checkpoint.model_folder import ModelFolder
from tools.demo_model.tokenizer import render
from tools.demo_model.train import conversations
from tools.train_demo_model import FOLDER


def write(source: Path, path: Path) -> None:
    """The model in ``source`` as a GGUF file at ``path``."""
    config = ModelFolder.open(source).config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    _add_tokenizer(writer, source)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.layers)
    for name, tensor in load_file(source / "model.safetensors").items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(theirs, tensor.to(torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    about = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = {one["content"] for one in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"]
    tokens = sorted(ids, key=lambda text: int(ids[text]))
    merges = [
        " ".join(one) if isinstance(one, list) else one for one in tokenizer["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if text in added else normal for text in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(ids[about["eos_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(about["chat_template"])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--conversations", type=int, default=40, help="held-out ones")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write(FOLDER, options.folder / "demo-F32.gguf")
    talks = conversations("held_out", options.conversations, 7)
    text = "".join(map(render, talks))
    (options.folder / "held_out.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
