"""Random LoRA adapters in PEFT's layout, and models with them merged by hand."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    model: Path,
    targets: Sequence[str] = (*ATTENTION, *MLP),
    seed: int = 1,
    *,
    rank: int = 4,
    layers: Sequence[int] | None = None,
    dtype: str = "float32",
    **fields: Any,
) -> Path:
    """Write an adapter of the weights of ``model`` whose modules are called as ``targets`` say.

    Its vision tower is left out.

    ``fields`` are those of its config. It is strong enough to change most greedy tokens.
    """
    import torch
    from safetensors.torch import load_file, save_file

    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/base",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": list(targets),
        "bias": "none",
        "inference_mode": True,
        **fields,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            parts = name.split(".")
            chosen = parts[-1] == "weight" and parts[-2] in targets and "vision_tower" not in parts
            if not chosen or (
                layers is not None and int(parts[parts.index("layers") + 1]) not in layers
            ):
                continue
            projection = name.removesuffix(".weight")
            here = settings.get("rank_pattern", {}).get(".".join(parts[-3:-1]), rank)
            down = torch.randn(here, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
            up = torch.randn(weight.shape[0], here, generator=generator) * 0.3
            tensors[f"{_PREFIX}{projection}.lora_A.weight"] = down.to(getattr(torch, dtype))
            tensors[f"{_PREFIX}{projection}.lora_B.weight"] = up.to(getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def merge_adapter(model: Path, adapter: Path, into: Path, scales: Mapping[str, float]) -> Path:
    """Copy ``model`` with ``W + scale * B A`` as the weights that ``adapter`` changes.

    ``scales`` has the scale by the end of a projection's name; the first that fits counts.
    """
    from safetensors.torch import load, load_file, save_file

    shutil.copytree(model, into)
    matrices = load_file(adapter / "adapter_model.safetensors")
    for file in sorted(into.glob("*.safetensors")):
        # Windows writes no file that is mapped.
        tensors = load(file.read_bytes())
        for name, weight in tensors.items():
            start = f"{_PREFIX}{name.removesuffix('.weight')}.lora_"
            if f"{start}A.weight" in matrices:
                scale = next(
                    s for end, s in scales.items() if name.removesuffix(".weight").endswith(end)
                )
                down, up = (matrices[f"{start}{part}.weight"].double() for part in "AB")
                tensors[name] = (weight.double() + scale * (up @ down)).to(weight.dtype)
        save_file(tensors, file, {"format": "pt"})
    return into


def stable_scale(alpha: float, rank: int) -> float:
    """The scale of rank-stabilized LoRA."""
    return alpha / math.sqrt(rank)
