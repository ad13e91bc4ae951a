"""Row-wise operators of a layer: norms, gate, rotation; torch's or compiled ones."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.stage.cpu_kernels.create import create_rowwise
from molink.stage.cpu_kernels.kernel_shape import supports_gate, supports_rowwise
from molink.stage.decoder.mlp import GateFunction, create_gate
from molink.stage.decoder.norm import CompiledRmsNorm, Norm, create_norm
from molink.stage.decoder.rotary import Rotate, rotate_half, rotate_pairs

if TYPE_CHECKING:
    from molink.stage.cpu_kernels.rowwise import RowwiseKernels


@dataclass(frozen=True, slots=True)
class RowOperators:
    """Operators that all layers of a stage share. ``norm`` creates a norm from its weight."""

    norm: Callable[[Tensor], Norm]
    gate: GateFunction
    rotate: Rotate


def create_operators(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    disabled_kernels: Collection[str] = (),
) -> RowOperators:
    """Create operators for rows of ``dtype``: compiled ones unless unsupported or disabled."""
    gate = create_gate(config.activation, config.activation_limit)
    turn = rotate_pairs if config.interleaved_rope else rotate_half
    compiled = (
        None if "compiled-rows" in disabled_kernels else _create_compiled(config, dtype, device)
    )
    if compiled is None:
        return RowOperators(partial(create_norm, config), gate, turn)

    def norm(weight: Tensor) -> Norm:
        return CompiledRmsNorm(weight.float().add_(config.norm_offset), compiled)

    # Compiled code lacks interleaved RoPE and interleaved gates.
    return RowOperators(
        norm,
        compiled.apply_gate if supports_gate(config.activation) else gate,
        turn if config.interleaved_rope else compiled.rotate_heads,
    )


def _create_compiled(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> "RowwiseKernels | None":
    experts = config.experts
    inner = [] if experts is None else [experts.intermediate_size, experts.shared_intermediate_size]
    widths = [config.hidden_size, config.intermediate_size, *inner]
    turned = () if config.interleaved_rope else config.rope_configs
    rotary = [rope.rotary_dim(config.head_dim) for rope in turned]
    if device.type != "cpu" or not supports_rowwise(widths, rotary):
        return None
    activation = config.activation if supports_gate(config.activation) else "silu"
    return create_rowwise(dtype, config.norm_eps, activation, torch.get_num_threads())
