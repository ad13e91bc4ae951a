"""Row-wise operators of a layer (norms, gate, rotation): torch's, compiled or fused ones."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.facts.model import BLOCK_SIZE
from molink.stage.cpu_kernels.create import create_rowwise
from molink.stage.cpu_kernels.kernel_shape import supports_gate, supports_rowwise
from molink.stage.decoder.append_heads import AppendHeads, SeparateAppend
from molink.stage.decoder.mlp import BoundedGate, GateFunction, apply_bounded, create_gate
from molink.stage.decoder.norm import (
    AddResidual,
    CompiledRmsNorm,
    Norm,
    add_residual,
    create_norm,
)
from molink.stage.decoder.rotary import rotate_half, rotate_pairs
from molink.stage.diagnostics.trial_shapes import TrialShapes
from molink.stage.gpu_kernels.triton_support import find_triton_problem

if TYPE_CHECKING:
    from molink.stage.cpu_kernels.rowwise import RowwiseKernels


#: Maximum row width of fused norms, which hold a row in registers.
MAX_FUSED_WIDTH = 1 << 14


@dataclass(frozen=True, slots=True)
class RowOperators:
    """Operators that all layers of a stage share. ``norm`` creates a norm from its weight."""

    norm: Callable[[Tensor], Norm]
    gate: GateFunction
    bounded_gate: BoundedGate
    add_residual: AddResidual
    append_heads: AppendHeads


def create_operators(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    disabled_kernels: Collection[str] = (),
) -> RowOperators:
    """Create operators for rows of ``dtype``.

    They are fused or compiled unless that is unsupported, wrong on this device, or disabled.
    """
    gate = create_gate(config.activation, config.activation_limit)
    turn = rotate_pairs if config.interleaved_rope else rotate_half
    allowed = "compiled-rows" not in disabled_kernels
    if allowed and _can_fuse(config, dtype, device):
        fused = create_fused(config, dtype)
        if config.is_gated:
            return fused
        return replace(fused, gate=gate, bounded_gate=partial(apply_bounded, gate))
    compiled = _create_compiled(config, dtype, device) if allowed else None
    if compiled is None:
        return RowOperators(
            norm=partial(create_norm, config),
            gate=gate,
            bounded_gate=partial(apply_bounded, gate),
            add_residual=add_residual,
            append_heads=SeparateAppend(turn),
        )

    def norm(weight: Tensor) -> Norm:
        return CompiledRmsNorm(weight.float().add_(config.norm_offset), compiled)

    # Compiled operators support neither interleaved RoPE nor interleaved gates.
    if supports_gate(config.activation):
        gate = compiled.apply_gate
    return RowOperators(
        norm=norm,
        gate=gate,
        bounded_gate=partial(apply_bounded, gate),
        add_residual=add_residual,
        append_heads=SeparateAppend(
            turn if config.interleaved_rope else compiled.rotate_heads,
            compiled.normalize_heads,
        ),
    )


def create_fused(config: ModelConfig, dtype: torch.dtype) -> RowOperators:
    """Create operators that are GPU kernels."""
    from molink.stage.decoder.fused import FusedOperators

    fused = FusedOperators.from_config(config, dtype)
    return RowOperators(
        norm=fused.create_norm,
        gate=fused.apply_gate,
        bounded_gate=fused.apply_bounded,
        add_residual=fused.add_residual,
        append_heads=fused.append_heads,
    )


def _can_fuse(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Check that fused operators work on ``device``; benchmarks run no other check."""
    if device.type != "cuda" or config.hidden_size > MAX_FUSED_WIDTH or find_triton_problem():
        return False
    from molink.stage.decoder.fused_check import check_fused_rows

    return check_fused_rows(TrialShapes.from_config(config, BLOCK_SIZE, device), dtype, device)


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
