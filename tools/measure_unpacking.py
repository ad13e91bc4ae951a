"""Rates at which a stage loads checkpoints of few bits: ``python -m tools.measure_unpacking``.

A layer of a 7B model's shapes with random numbers, each format in a file of its own: unpacked to
bf16, and as it stays packed where a CPU can multiply by it.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.low_bit import can_be_low_bit
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.tensor_layout import stage_tensors
from molink.stage.stage import Stage

_GPTQ = {"quant_method": "gptq", "group_size": 128, "checkpoint_format": "gptq"}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "GPTQ 4 bit": {**_GPTQ, "bits": 4},
    "GPTQ 8 bit": {**_GPTQ, "bits": 8},
    "GPTQ 4 bit, ordered": {**_GPTQ, "bits": 4, "desc_act": True},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "packed int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"all": {"weights": _INT4}},
    },
    "FP8 in blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
_TYPES = {"I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    print(f"{'':22}{'MB of files':>12}{'bf16: s':>9}{'packed: s':>11}{'MB':>6}")
    for name, section in _FORMATS.items():
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder), section)
            opened = ModelFolder.open(Path(folder), (1, 2))
            nbytes = sum(opened.tensors[name].nbytes for name in opened.stage_tensors(1, 2))
            unpacked, _ = _load(opened, "gguf-blocks")
            packed, resident = _load(opened)
        print(f"{name:22}{nbytes / 1e6:12.0f}{unpacked:9.2f}{packed:11.2f}{resident / 1e6:6.0f}")


def _load(opened: ModelFolder, *avoid: str) -> tuple[float, int]:
    """Seconds (once kernels are compiled) and bytes of a stage."""
    avoided = ("compiled-linear", "packed-linear", *avoid)
    begin = time.perf_counter()
    stage = Stage.load_layers(opened, (1, 2), dtype="bf16", disabled_kernels=avoided)
    return time.perf_counter() - begin, stage.weight_bytes


def _write(folder: Path, section: dict[str, Any]) -> None:
    config = {**_CONFIG, "quantization_config": section} if section else _CONFIG
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    parsed, tensors = ModelConfig.load_folder(folder), dict[str, torch.Tensor]()
    for name, shape in stage_tensors(parsed, 1, 2).items():
        scheme = parsed.low_bit
        if scheme is None or not can_be_low_bit(name, shape):
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        for part, stored in scheme.required_tensors(name, (shape[0], shape[1]), {}).items():
            dtype = _TYPES.get(stored.dtypes[0], torch.float16)
            tensors[part] = torch.ones(stored.shape, dtype=dtype)
            if part == scheme.order_name(name):
                tensors[part] = torch.randperm(shape[1]).int() // scheme.scale_block[1]
    save_file(tensors, folder / "model.safetensors")


if __name__ == "__main__":
    main()
