"""A layer with the gated delta rule instead of attention (Qwen3-Next, Qwen3.5, OLMo Hybrid)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.recurrent import DeltaRuleShape
from molink.stage.decoder.causal_conv import CausalConv, load_conv
from molink.stage.decoder.delta_rule import divide_lengths, run_chunks, update_memories
from molink.stage.decoder.mixer import ForwardContext, RecurrentMixer, StateContext
from molink.stage.linear import Projection
from molink.stage.linear.base import total_bytes
from molink.stage.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class DeltaNet(RecurrentMixer):
    """Weights of such a layer; small ones are float32.

    ``rows`` projects to queries, keys, values and gates, ``rates`` to rates and decays. ``decays``
    (negative) and ``decay_bias`` are ``[value_heads]``, ``norm_weight`` is ``[value_dim]``.
    """

    shape: DeltaRuleShape
    rows: Projection
    rates: Projection
    conv: CausalConv
    decays: Tensor
    decay_bias: Tensor
    norm_weight: Tensor
    norm_eps: float
    output: Projection

    def __call__(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """See :class:`~molink.stage.decoder.mixer.Mixer`."""
        states = context.require_states()
        mixed, gates = self._split_rows(self.rows(normed))
        mixed, rows = states.keep_inputs(self.index, mixed, self.rates(normed))
        rates, decays = self._split_rates(rows)
        mixed = silu(self.conv(mixed, states, self.index), inplace=True)
        read = self._apply_rule(mixed, decays, rates, states)[: len(normed)]
        read = rms_norm(read, self.norm_weight.shape, self.norm_weight, self.norm_eps)
        read = read.mul_(silu(gates.float()))
        return self.output(read.flatten(1).to(normed.dtype))

    @property
    def nbytes(self) -> int:
        large = (self.rows, self.rates, self.conv, self.output)
        small = total_bytes(self.decays, self.decay_bias, self.norm_weight)
        return sum(part.nbytes for part in large) + small

    def _split_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split rows into channels ``[T, channels]`` and gates ``[T, value_heads, value_dim]``."""
        shape = self.shape
        if not shape.grouped_rows:
            mixed, gates = torch.split(rows, [shape.channels, shape.values_size], dim=1)
        else:
            values = shape.groups * shape.value_dim
            by_head = rows.view(len(rows), shape.key_heads, -1)
            sizes = [shape.key_dim, shape.key_dim, values, values]
            *parts, gates = torch.split(by_head, sizes, dim=2)
            mixed = torch.cat([part.flatten(1) for part in parts], dim=1)
        return mixed, gates.reshape(len(rows), shape.value_heads, shape.value_dim)

    def _split_rates(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return rates and logarithms of decays, both float32 ``[T, value_heads]``."""
        shape = self.shape
        heads = shape.key_heads if shape.grouped_rates else 1
        rates, decays = rows.float().view(len(rows), heads, -1).chunk(2, dim=2)
        steps = softplus(decays.flatten(1) + self.decay_bias)
        rates = rates.flatten(1).sigmoid().mul_(shape.rate_scale)
        return rates, steps.mul_(self.decays)

    def _apply_rule(
        self, mixed: Tensor, decays: Tensor, rates: Tensor, states: StateContext
    ) -> Tensor:
        """Apply convolved rows to the memories; returns ``[T, value_heads, value_dim]``."""
        shape = self.shape
        sizes = [shape.keys_size, shape.keys_size, shape.values_size]
        queries, keys, values = torch.split(mixed, sizes, dim=1)
        values = values.view(len(mixed), shape.value_heads, shape.value_dim)
        parts = (
            self._spread_heads(queries) * shape.key_dim**-0.5,
            self._spread_heads(keys),
            values,
            decays,
            rates,
        )
        memories, read = states.pool.memories[self.index], torch.empty_like(values)
        return states.apply_rows(memories, parts, read, update_memories, run_chunks)

    def _spread_heads(self, rows: Tensor) -> Tensor:
        """Norm queries or keys and repeat them for value heads: ``[T, value_heads, key_dim]``."""
        heads = rows.view(len(rows), self.shape.key_heads, self.shape.key_dim)
        unit = divide_lengths(heads)
        if self.shape.is_tiled:
            return unit.repeat(1, self.shape.groups, 1)
        return unit.repeat_interleave(self.shape.groups, dim=1)


def load_delta_net(
    reader: WeightReader, config: ModelConfig, shape: DeltaRuleShape, layer: int, index: int
) -> DeltaNet:
    """Load the model's layer ``layer``, which has index ``index`` in the stage's state pool."""
    prefix = f"model.layers.{layer}."

    def read(name: str) -> Tensor:
        return reader.read_tensors(f"{prefix}linear_attn.{name}", dtype=torch.float32)

    return DeltaNet(
        index=index,
        shape=shape,
        rows=reader.load_projection([prefix + name for name in shape.projections], False),
        rates=reader.load_projection([prefix + name for name in shape.rate_projections], False),
        conv=load_conv(
            reader, *(prefix + name for name in shape.convolutions), biased=shape.is_biased
        ),
        decays=read("A") if shape.has_decays else read("A_log").exp_().neg_(),
        decay_bias=read("dt_bias"),
        norm_weight=reader.read_tensors(f"{prefix}{shape.norm_name}.weight", dtype=torch.float32),
        norm_eps=config.norm_eps if shape.norm_eps is None else shape.norm_eps,
        output=reader.load_projection([prefix + shape.output_projection[0]], False),
    )
