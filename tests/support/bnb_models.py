"""Small models as bitsandbytes writes them, and the values they hold."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from molink.checkpoint.quantized_size import is_quantizable
from molink.stage.linear.nf4 import NF4_VALUES, load_library

EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
FOUR = {
    "quant_method": "bitsandbytes",
    "load_in_8bit": False,
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8",
}
Tensors = dict[str, Tensor]


def as_int8(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """The tensors that bitsandbytes' Linear8bitLt saves, and the weight they represent."""
    data, scales, _ = load_library().functional.int8_vectorwise_quant(weight.half())
    module = name.removesuffix("weight")
    saved = {name: data, f"{module}SCB": scales}
    saved[f"{module}weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return saved, data.float() * scales.unsqueeze(1) / 127


def as_nf4(name: str, weight: Tensor, *, double: bool) -> tuple[Tensors, Tensor]:
    """The tensors that bitsandbytes' Linear4bit saves, and the weight they represent."""
    library = load_library().functional
    data, state = library.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
    saved = {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    scales = state.absmax
    if double:
        scales = library.dequantize_blockwise(scales, state.state2) + state.offset
    codes = torch.stack((data >> 4, data & 15), -1).view(-1, 64).int()
    values = torch.tensor(NF4_VALUES)[codes] * scales.unsqueeze(1)
    return {name: data, **saved}, values.view(weight.shape)


def rewrite(folder: Path, target: Path, change: Callable[[str, Tensor], Tensors]) -> Path:
    shutil.copytree(folder, target)
    for path in target.glob("*.safetensors"):
        tensors: Tensors = {}
        # Windows can't write mapped files.
        for name, tensor in load(path.read_bytes()).items():
            tensors |= change(name, tensor)
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return target


def set_config(folder: Path, section: dict[str, Any] | None) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8")) | {"quantization_config": section}
    path.write_text(json.dumps(raw), encoding="utf-8")


def both(folder: Path, tmp_path: Path, kind: str, left_out: str = "nothing") -> tuple[Path, Path]:
    """The pre-quantized folder, and a plain one with the weights that it represents."""
    stood: Tensors = {}

    def quantize(name: str, weight: Tensor) -> Tensors:
        if not is_quantizable(name, weight.shape) or left_out in name:
            stood[name] = weight
            return {name: weight}
        if kind == "int8":
            saved, stood[name] = as_int8(name, weight)
        else:
            saved, stood[name] = as_nf4(name, weight, double=kind == "double")
        return saved

    made = rewrite(folder, tmp_path / "quantized", quantize)
    set_config(made, EIGHT if kind == "int8" else FOUR)
    return made, rewrite(folder, tmp_path / "plain", lambda name, _: {name: stood[name]})
