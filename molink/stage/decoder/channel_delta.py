"""A layer with the delta rule and a decay per channel (Kimi Linear)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.recurrent import ChannelDeltaShape
from molink.stage.decoder.causal_conv import CausalConv, load_conv
from molink.stage.decoder.delta_rule import divide_lengths, run_chunks, update_memories
from molink.stage.decoder.mixer import ForwardContext, RecurrentMixer, StateContext
from molink.stage.linear import Projection
from molink.stage.linear.base import total_bytes
from molink.stage.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class ChannelDelta(RecurrentMixer):
    """Weights of such a layer; small ones are float32.

    ``rows`` projects to queries, keys, values and latents, which ``gate_up`` projects to gates.
    ``rates`` projects to rates and latents, which ``decay_up`` projects to decays. ``decays``
    (negative) is ``[heads, 1]``, ``decay_bias`` ``[heads, dim]``, ``norm_weight`` ``[dim]``.
    """

    shape: ChannelDeltaShape
    rows: Projection
    gate_up: Projection
    rates: Projection
    decay_up: Projection
    conv: CausalConv
    decays: Tensor
    decay_bias: Tensor
    norm_weight: Tensor
    norm_eps: float
    output: Projection

    def __call__(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """See :class:`~molink.stage.decoder.mixer.Mixer`."""
        shape, states = self.shape, context.require_states()
        mixed, latents = torch.split(self.rows(normed), [shape.channels, shape.dim], dim=1)
        mixed, rates = states.keep_inputs(self.index, mixed, self.rates(normed))
        mixed = silu(self.conv(mixed, states, self.index), inplace=True)
        read = self._apply_rule(mixed, rates, states)[: len(normed)]
        read = rms_norm(read, self.norm_weight.shape, self.norm_weight, self.norm_eps)
        gates = self.gate_up(latents.contiguous()).float().sigmoid_()
        return self.output(read.flatten(1).mul_(gates).to(normed.dtype))

    @property
    def nbytes(self) -> int:
        large = (self.rows, self.gate_up, self.rates, self.decay_up, self.conv, self.output)
        small = total_bytes(self.decays, self.decay_bias, self.norm_weight)
        return sum(part.nbytes for part in large) + small

    def _apply_rule(self, mixed: Tensor, rates: Tensor, states: StateContext) -> Tensor:
        """Apply convolved rows to the memories; returns ``[T, heads, dim]``.

        ``rates`` are rows ``[T, heads + dim]``.
        """
        shape = self.shape
        heads = mixed.view(len(mixed), 3, shape.heads, shape.dim)
        queries, keys, values = heads.unbind(1)
        chosen, latents = torch.split(rates, [shape.heads, shape.dim], dim=1)
        faded = self.decay_up(latents.contiguous()).float().view(values.shape)
        parts = (
            divide_lengths(queries) * shape.dim**-0.5,
            divide_lengths(keys),
            values,
            softplus(faded + self.decay_bias).mul_(self.decays),
            chosen.float().sigmoid_(),
        )
        memories, read = states.pool.memories[self.index], torch.empty_like(values)
        return states.apply_rows(memories, parts, read, update_memories, run_chunks)


def load_channel_delta(
    reader: WeightReader, config: ModelConfig, shape: ChannelDeltaShape, layer: int, index: int
) -> ChannelDelta:
    """Load the model's layer ``layer``, which has index ``index`` in the stage's state pool."""
    prefix = f"model.layers.{layer}."

    def read(name: str) -> Tensor:
        return reader.read_tensors(f"{prefix}self_attn.{name}", dtype=torch.float32)

    def project(*names: str) -> Projection:
        return reader.load_projection([prefix + name for name in names], shape.is_biased)

    return ChannelDelta(
        index=index,
        shape=shape,
        rows=project(*shape.projections),
        gate_up=project(shape.gate_name),
        rates=project(*shape.rate_projections),
        decay_up=project(shape.decay_name),
        conv=load_conv(reader, *(prefix + name for name in shape.convolutions), biased=False),
        decays=read("A_log").view(shape.heads, 1).exp_().neg_(),
        decay_bias=read("dt_bias").view(shape.heads, shape.dim),
        norm_weight=read("o_norm.weight"),
        norm_eps=config.norm_eps,
        output=project(shape.output_projection[0]),
    )
