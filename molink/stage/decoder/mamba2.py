"""A Mamba-2 layer (arXiv 2405.21060) instead of attention, as in Granite 4."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.recurrent import Mamba2Shape
from molink.stage.decoder.causal_conv import CausalConv, load_conv
from molink.stage.decoder.mixer import ForwardContext, RecurrentMixer, StateContext
from molink.stage.decoder.scaled import scale_outputs
from molink.stage.decoder.state_scan import scan_chunks, update_states
from molink.stage.linear import Projection
from molink.stage.linear.base import total_bytes
from molink.stage.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class Mamba2(RecurrentMixer):
    """Weights of such a layer; small ones are float32.

    ``rows`` projects to gates, to values, keys and queries, and to steps. ``decays`` (negative),
    ``step_bias`` and ``skips`` are ``[heads]``; ``norm_weight``, if any, is ``[heads * head_dim]``.
    """

    shape: Mamba2Shape
    rows: Projection
    conv: CausalConv
    decays: Tensor
    step_bias: Tensor
    skips: Tensor
    norm_weight: Tensor | None
    norm_eps: float
    output: Projection

    def __call__(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """See :class:`~molink.stage.decoder.mixer.Mixer`."""
        shape, states = self.shape, context.require_states()
        sizes = [shape.inner_size, shape.channels, shape.heads]
        gates, mixed, steps = torch.split(self.rows(normed), sizes, dim=1)
        mixed, steps = states.keep_inputs(self.index, mixed, steps)
        mixed = silu(self.conv(mixed, states, self.index), inplace=True)
        read = self._scan(mixed, softplus(steps.float() + self.step_bias), states)[: len(normed)]
        read = read.flatten(1).mul_(silu(gates.float()))
        if self.norm_weight is not None:
            grouped = read.view(len(read), shape.groups, -1)
            read = rms_norm(grouped, grouped.shape[2:], None, self.norm_eps).flatten(1)
            read = read.mul_(self.norm_weight)
        return self.output(read.to(normed.dtype))

    @property
    def nbytes(self) -> int:
        large = (self.rows, self.conv, self.output)
        small = total_bytes(self.decays, self.step_bias, self.skips, self.norm_weight)
        return sum(part.nbytes for part in large) + small

    def _scan(self, mixed: Tensor, steps: Tensor, states: StateContext) -> Tensor:
        """Apply convolved rows to the memories; returns ``[T, heads, head_dim]``.

        ``steps`` are ``[T, heads]``.
        """
        shape = self.shape
        keys_size = shape.groups * shape.state_size
        sizes = [shape.inner_size, keys_size, keys_size]
        values, keys, queries = torch.split(mixed, sizes, dim=1)
        values = values.view(len(mixed), shape.heads, shape.head_dim)
        parts = (
            self._spread_groups(queries),
            self._spread_groups(keys),
            values * steps.unsqueeze(-1),
            steps * self.decays,
        )
        memories, read = states.pool.memories[self.index], torch.empty_like(values)
        states.apply_rows(memories, parts, read, update_states, scan_chunks)
        return read.addcmul_(values, self.skips.unsqueeze(-1))

    def _spread_groups(self, rows: Tensor) -> Tensor:
        """Repeat groups' queries or keys for all heads, ``[T, heads, state_size]``."""
        grouped = rows.view(len(rows), self.shape.groups, self.shape.state_size)
        return grouped.repeat_interleave(self.shape.heads // self.shape.groups, dim=1)


def load_mamba2(
    reader: WeightReader, config: ModelConfig, shape: Mamba2Shape, layer: int, index: int
) -> Mamba2:
    """Load the model's layer ``layer``, which has index ``index`` in the stage's state pool."""
    prefix = f"model.layers.{layer}."

    def read(name: str) -> Tensor:
        return reader.read_tensors(f"{prefix}mamba.{name}", dtype=torch.float32)

    rows = reader.load_projection([prefix + name for name in shape.projections], shape.is_biased)
    output = reader.load_projection([prefix + shape.output_projection[0]], shape.is_biased)
    if factors := config.output_factors:
        rows = scale_outputs(rows, shape.row_sizes, factors.recurrent, reader)
        output = scale_outputs(output, [config.hidden_size], [factors.recurrent_output], reader)
    return Mamba2(
        index=index,
        shape=shape,
        rows=rows,
        conv=load_conv(reader, f"{prefix}mamba.conv1d", biased=shape.has_conv_bias),
        decays=read("A") if shape.has_decays else read("A_log").exp_().neg_(),
        step_bias=read("dt_bias"),
        skips=read("D"),
        norm_weight=read("norm.weight") if shape.has_norm else None,
        norm_eps=config.norm_eps,
        output=output,
    )
