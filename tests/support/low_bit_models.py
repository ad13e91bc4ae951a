"""Small models in the formats of GPTQ, AWQ, FP8 and compressed-tensors, and their values.

Packed number by number from the formats' documentation, without molink's code.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

#: Ends of names of layers' projections, and one that is left in full.
PROJECTIONS = ("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
LEFT_OUT = "layers.1.self_attn.o_proj"


@dataclass(frozen=True)
class Numbers:
    """A weight ``[out, in]`` as codes: ``(codes - zeros[:, groups]) * scales[:, groups]``."""

    codes: Any
    zeros: Any
    scales: Any
    groups: Any

    def values(self) -> torch.Tensor:
        found = (self.codes - self.zeros[:, self.groups]) * self.scales[:, self.groups]
        return torch.from_numpy(found.astype(np.float32))


def write_low_bit(folder: Path, target: Path, exact: Path, section: Mapping[str, Any]) -> Path:
    """The model of ``folder``, stored as the ``quantization_config`` ``section`` says.

    ``exact`` becomes a copy of it with the values that are stored, as usual weights.
    """
    tensors = load_file(folder / "model.safetensors")
    stored, values = {}, {}
    random = np.random.default_rng(5)
    for name, tensor in tensors.items():
        inner = ".layers." in name and name.endswith(PROJECTIONS) and LEFT_OUT not in name
        if inner:
            made, values[name] = _pack(tensor.float().numpy(), section, random)
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{end}": part for end, part in made.items()}
        else:
            stored[name] = values[name] = tensor
    stored |= {name: tensor for name, tensor in values.items() if name.endswith(".bias")}
    for path, content, extra in (
        (target, stored, {"quantization_config": section}),
        (exact, values, {}),
    ):
        shutil.copytree(folder, path)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (path / "config.json").write_text(json.dumps({**config, **extra}), encoding="utf-8")
        whole = {name: part.contiguous() for name, part in content.items()}
        save_file(whole, path / "model.safetensors", metadata={"format": "pt"})
    return target


def _pack(weight: Any, section: Mapping[str, Any], random: Any) -> tuple[dict[str, Any], Any]:
    method = section["quant_method"]
    if method == "gptq":
        return _gptq(weight, section, random)
    if method == "awq":
        return _awq(weight, section)
    if method == "fp8":
        block = section.get("weight_block_size") or weight.shape
        scale = "weight_scale_inv" if section.get("weight_block_size") else "weight_scale"
        return _eight_bits(weight, block, torch.float8_e4m3fn, scale)
    (group,) = section["config_groups"].values()
    weights = group["weights"]
    if section["format"] == "pack-quantized":
        return _compressed(weight, weights, random)
    if "fp4" in section["format"]:
        return _four_bit_floats(weight, weights["group_size"])
    block = {
        "tensor": weight.shape,
        "channel": (1, weight.shape[1]),
        "group": (1, weights.get("group_size")),
        "block": weights.get("block_structure"),
    }[weights["strategy"]]
    kind = torch.int8 if weights["type"] == "int" else torch.float8_e4m3fn
    return _eight_bits(weight, block, kind, "weight_scale")


def _numbers(
    weight: Any,
    bits: int,
    size: int,
    symmetric: bool,
    groups: Any = None,
    kept: torch.dtype = torch.float16,
) -> Numbers:
    """Quantize to ``bits`` in groups of ``size`` columns (-1: all)."""
    rows, width = weight.shape
    size = width if size == -1 else size
    if groups is None:
        groups = np.arange(width) // size
    count, top = -(-width // size), 2**bits - 1
    zeros, scales = np.zeros((rows, count), np.int64), np.zeros((rows, count), np.float32)
    for group in range(count):
        part = weight[:, groups == group]
        if symmetric:
            spread = 2 * np.abs(part).max(axis=1) / top
            zero = np.full(rows, 2 ** (bits - 1))
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            spread = (high - low) / top
            zero = np.clip(np.round(-low / spread), 0, top)
        zeros[:, group] = zero
        scales[:, group] = torch.from_numpy(spread).to(kept).float()
    codes = np.round(weight / scales[:, groups]) + zeros[:, groups]
    return Numbers(np.clip(codes, 0, top).astype(np.int64), zeros, scales, groups)


def _words(numbers: Any, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 words of the numbers along the last axis; ``places[i]`` is at the i-th lowest bits."""
    each = 32 // bits
    places = places or tuple(range(each))
    lacking = -numbers.shape[-1] % each
    numbers = np.pad(numbers, ((0, 0), (0, lacking))).reshape(len(numbers), -1, each)
    words = sum(
        numbers[..., place].astype(np.uint64) << np.uint64(bits * index)
        for index, place in enumerate(places)
    )
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def _gptq(weight: Any, section: Mapping[str, Any], random: Any) -> tuple[dict[str, Any], Any]:
    bits, size, width = section["bits"], section["group_size"], weight.shape[1]
    groups = None
    if section["desc_act"] and size != -1:
        groups = random.permutation(np.arange(width) // size)
    found = _numbers(weight, bits, size, section["sym"], groups)
    less = 0 if section.get("checkpoint_format") == "gptq_v2" else 1
    return {
        "qweight": _words(found.codes, bits).T,
        "qzeros": _words((found.zeros.T - less) % 2**bits, bits),
        "scales": torch.from_numpy(found.scales.T).half(),
        "g_idx": torch.from_numpy(found.groups.astype(np.int32)),
        "bias": torch.zeros(len(weight), dtype=torch.float16),
    }, found.values()


def _awq(weight: Any, section: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    found = _numbers(weight, 4, section["group_size"], symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _words(found.codes.T, 4, order),
        "qzeros": _words(found.zeros.T, 4, order),
        "scales": torch.from_numpy(found.scales.T).half(),
    }, found.values()


def _compressed(weight: Any, weights: Mapping[str, Any], random: Any) -> tuple[dict[str, Any], Any]:
    bits, width = weights["num_bits"], weight.shape[1]
    size = weights["group_size"] if weights["strategy"] == "group" else -1
    ordered = weights.get("actorder") == "group"
    groups = random.permutation(np.arange(width) // size) if ordered else None
    found = _numbers(weight, bits, size, weights["symmetric"], groups, torch.bfloat16)
    made = {
        "weight_packed": _words(found.codes, bits),
        "weight_scale": torch.from_numpy(found.scales).bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not weights["symmetric"]:
        made["weight_zero_point"] = _words(found.zeros.T, bits).T
    if ordered:
        made["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return made, found.values()


def _eight_bits(
    weight: Any, block: Any, kind: torch.dtype, scale: str
) -> tuple[dict[str, Any], Any]:
    rows, width = weight.shape
    down, across = -(-rows // block[0]), -(-width // block[1])
    numbers, scales = torch.zeros(rows, width, dtype=kind), torch.zeros(down, across)
    values, top = torch.zeros(rows, width), 127 if kind is torch.int8 else 448
    for i in range(down):
        for j in range(across):
            place = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            part = torch.from_numpy(weight[place])
            peak = part.abs().max() / top
            scales[i, j] = peak.bfloat16() if kind is torch.int8 else peak
            exact = (part / scales[i, j]).clamp(-top, top)
            numbers[place] = (exact.round() if kind is torch.int8 else exact).to(kind)
            values[place] = numbers[place].float() * scales[i, j]
    # A whole tensor has a single scale.
    kept = scales.reshape(1) if down == across == 1 and tuple(block) == (rows, width) else scales
    kept = kept.bfloat16() if kind is torch.int8 else kept
    return {"weight": numbers, scale: kept, "input_scale": torch.ones(1)}, values


def _four_bit_floats(weight: Any, size: int) -> tuple[dict[str, Any], Any]:
    """NVFP4 in groups of 16, MXFP4 in groups of 32."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = torch.from_numpy(weight).unflatten(1, (-1, size))
    peaks = groups.abs().amax(2)
    made = {}
    if size == 16:
        whole = 448 * 6 / peaks.max().reshape(1)
        stored = (peaks / 6 * whole).to(torch.float8_e4m3fn)
        scales = stored.float() / whole
        made = {"weight_global_scale": whole, "input_global_scale": torch.ones(1)}
    else:
        exponents = (peaks / 6).log2().ceil()
        stored, scales = (exponents + 127).to(torch.uint8), exponents.exp2()
    scaled = groups / scales.unsqueeze(2).clamp_min(1e-20)
    codes = (scaled.abs().unsqueeze(3) - grid).abs().argmin(3)
    values = (grid[codes] * scaled.sign() * scales.unsqueeze(2)).flatten(1)
    codes = (codes + 8 * (scaled < 0)).flatten(1)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": stored, **made}, values
