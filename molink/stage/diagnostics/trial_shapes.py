"""Shapes for kernel trials: a model's, or typical ones."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.experts import Routing
from molink.checkpoint.low_bit import find_resident_format
from molink.checkpoint.safetensors_header import TensorSpec
from molink.checkpoint.tensor_layout import (
    attention_projections,
    layer_tensors,
    mlp_projections,
    mtp_layers,
    stage_tensors,
)
from molink.checkpoint.traits import Activation
from molink.gguf.block_formats import BLOCK_FORMATS, BlockFormat, fits_planes
from molink.stage.attention.base import AttentionShape

#: A window that excludes some of a trial's rows.
_WINDOW = 33
#: Maximum weights of a trial, larger on a GPU, which chooses kernels by the whole shape.
_MAX_WEIGHTS = {"cpu": 1 << 23, "cuda": 1 << 26}
#: Output sizes are reduced by multiples of this, which preserves their remainder.
_CUT_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class TrialShapes:
    """Shapes and formats of a model's operators.

    ``products`` are ``[out, in]``; rows of width ``hidden`` are normed, of ``inner`` gated.
    ``rotary`` has the rotated dimensions of heads. ``formats`` are the formats of weights that stay
    low-bit on a CPU; ``planes`` has formats and columns of those on a GPU. ``experts`` says how
    experts are chosen; ``expert_planes`` has formats and columns of their weights on a GPU, without
    a format if they don't stay low-bit.
    """

    products: tuple[tuple[int, int], ...]
    hidden: int
    inner: tuple[int, ...]
    rotary: tuple[int, ...]
    eps: float
    activations: tuple[Activation, ...]
    attention: AttentionShape
    block_size: int
    planes: tuple[tuple[BlockFormat, int], ...] = ()
    formats: tuple[BlockFormat, ...] = ()
    experts: Routing | None = None
    expert_planes: tuple[tuple[BlockFormat | None, int], ...] = ()

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        block_size: int,
        device: torch.device,
        tensors: Mapping[str, TensorSpec] | None = None,
    ) -> "TrialShapes":
        """Collect the shapes of a model's layers; very large products are cut to fewer outputs.

        ``tensors`` are known tensors of its files.
        """
        layers, most = (0, config.layers), _MAX_WEIGHTS[device.type]
        attention = AttentionShape.from_config(config, layers)
        windows = sorted({min(window, _WINDOW) for window in attention.windows})
        found = _find_low_bit(config, tensors or {})
        experts = [config.layer_experts(layer) for layer in range(*layers)]
        inner = {
            config.intermediate_size if one is None else one.intermediate_size for one in experts
        } | {
            one.shared_intermediate_size for one in experts if one and one.shared_intermediate_size
        }
        return cls(
            products=tuple(
                sorted({_cut_shape(shape, most) for shape in _projection_shapes(config)})
            ),
            hidden=config.hidden_size,
            inner=tuple(sorted(inner)),
            rotary=tuple(
                sorted({rope.rotary_dim(config.head_dim) for rope in config.rope_configs})
            ),
            eps=config.norm_eps,
            # Kernels support gated activations only.
            activations=(config.activation if config.is_gated else "silu",),
            attention=replace(attention, windows=tuple(windows), kv_kinds=2),
            block_size=block_size,
            planes=find_planes(config, tensors or {}) if device.type == "cuda" else (),
            formats=()
            if device.type == "cuda"
            else tuple(sorted({form for form, _ in found if form.fits_cpu}, key=repr)),
            experts=config.experts,
            expert_planes=_find_expert_planes(config, tensors or {}),
        )


#: Shapes of the self-test without a model.
USUAL_SHAPES = TrialShapes(
    products=((96, 64), (256, 704), (1024, 128)),
    hidden=192,
    inner=(96,),
    rotary=(64,),
    eps=1e-5,
    activations=("silu", "gelu_tanh"),
    attention=AttentionShape(kv_heads=2, groups=4, head_dim=64, scale=0.125, windows=(0, _WINDOW)),
    block_size=16,
    experts=Routing(num_experts=32, top_k=4, renormalize=True),
    expert_planes=((None, 192), (BLOCK_FORMATS["q4_k"], 512)),
)


def find_planes(
    config: ModelConfig, tensors: Mapping[str, TensorSpec]
) -> tuple[tuple[BlockFormat, int], ...]:
    """Find formats and columns of a model's weights that stay low-bit on a GPU."""
    found = _find_low_bit(config, tensors)
    planes = {(form, shape[1]) for form, shape in found if fits_planes(form, shape)}
    return tuple(sorted(planes, key=repr))


def _find_expert_planes(
    config: ModelConfig, tensors: Mapping[str, TensorSpec]
) -> tuple[tuple[BlockFormat | None, int], ...]:
    """Find formats and columns of experts' weights on a GPU."""
    found: set[tuple[BlockFormat | None, int]] = set()
    for name, shape in stage_tensors(config, 0, config.layers).items():
        if ".experts." in name and len(shape) == 2:
            form = find_resident_format(name, shape, tensors, config.low_bit)
            found.add((form if form and fits_planes(form, shape) else None, shape[1]))
    return tuple(sorted(found, key=repr))


def _find_low_bit(
    config: ModelConfig, tensors: Mapping[str, TensorSpec]
) -> set[tuple[BlockFormat, tuple[int, ...]]]:
    """Find formats and shapes of weights that may stay low-bit."""
    shapes = stage_tensors(config, 0, config.layers)
    found = (
        (find_resident_format(name, shape, tensors, config.low_bit), shape)
        for name, shape in shapes.items()
    )
    return {(form, shape) for form, shape in found if form is not None}


def _projection_shapes(config: ModelConfig) -> set[tuple[int, int]]:
    """Collect the shapes of all projections, including merged ones."""
    found = {(config.vocab_size, config.hidden_size)}
    if config.mtp is not None:
        found.add((config.hidden_size, 2 * config.hidden_size))
    for layer in (*range(config.layers), *mtp_layers(config)):
        weights = {
            name.removeprefix(config.layer_prefix(layer)).removesuffix(".weight"): (
                shape[0],
                shape[1],
            )
            for name, shape in layer_tensors(config, layer).items()
            if len(shape) == 2
        }
        shape = config.recurrent
        recurrent = () if shape is None else (shape.projections, shape.rate_projections)
        for together in (
            attention_projections(config, layer),
            mlp_projections(config)[0],
            *recurrent,
        ):
            merged = [weights.pop(name) for name in together if name in weights]
            if merged:
                found.add((sum(shape[0] for shape in merged), merged[0][1]))
        found.update(weights.values())
    return found


def _cut_shape(shape: tuple[int, int], most: int) -> tuple[int, int]:
    out, width = shape
    above = max(0, out - max(_CUT_MULTIPLE, most // width))
    return out - -(-above // _CUT_MULTIPLE) * _CUT_MULTIPLE, width
