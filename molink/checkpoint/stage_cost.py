"""Counts bytes and operations of a stage's passes, for roofline figures."""

from dataclasses import dataclass

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.tensor_layout import layer_tensors, mtp_layers
from molink.facts.dtypes import DTYPE_SIZES, KV_SCALE_BYTES
from molink.facts.model import KVCacheDType, LayerRange

_FLOPS_PER_MULTIPLY_ADD = 2


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of layers ``first:last``, computed in ``dtype``, and of the model's ends they include.

    ``weight_bytes`` counts the weights on the device. Only the experts chosen for a row count.
    """

    config: ModelConfig
    layers: LayerRange
    dtype: str
    weight_bytes: int
    kv_cache_dtype: KVCacheDType = "auto"

    def decode_bytes(self, context: int) -> int:
        """Count bytes that a single decode row reads: weights, and KV of ``context`` tokens."""
        table, element = self._table_elements * DTYPE_SIZES[self.dtype], DTYPE_SIZES[self.dtype]
        ends = int(self._has_embedding) + int(self._has_output_head)
        held = min(ends, 1) if self.config.tied_embeddings else ends
        elements = [self._matrix_elements(layer) for layer in self._all_layers]
        share = sum(active for _, active in elements) / max(1, sum(every for every, _ in elements))
        weights = max(0, self.weight_bytes - held * table) * share + table * self._has_output_head
        # States are read and written.
        states = 2 * self._state_elements * DTYPE_SIZES["f32"]
        kept = sum(
            positions * self._position_bytes(layer, element)
            for layer, positions in self._attended_positions(context).items()
        )
        return int(weights) + kept + states

    def _position_bytes(self, layer: int, element: int) -> int:
        """Count bytes of a position's keys and values in a layer."""
        shape = self.config.head_shape(layer)
        head = shape.head_dim * element
        if self.kv_cache_dtype == "int8":
            head = shape.head_dim + KV_SCALE_BYTES
        return self.config.kv_kinds * shape.kv_heads * head

    def prefill_flops(self, rows: int) -> int:
        """Count operations of a prompt's first chunk of ``rows`` rows; the last one is sampled."""
        products = rows * sum(self._matrix_elements(layer)[1] for layer in self._all_layers)
        products += self._table_elements * self._has_output_head
        for row in range(1, rows + 1):
            for layer, positions in self._attended_positions(row).items():
                size = self.config.head_shape(layer).head_dim
                products += 2 * self.config.heads * size * positions
        # Decay, read by key, update, and read by query.
        products += 4 * rows * self._state_elements
        return _FLOPS_PER_MULTIPLY_ADD * products

    @property
    def _has_embedding(self) -> bool:
        return self.layers[0] == 0

    @property
    def _has_output_head(self) -> bool:
        return self.layers[1] == self.config.layers and self.config.has_output_head

    @property
    def _table_elements(self) -> int:
        """Elements of the embedding; the output head has as many."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def _all_layers(self) -> tuple[int, ...]:
        """The stage's layers; the last stage's include the MTP layer."""
        behind = mtp_layers(self.config) if self._has_output_head else ()
        return (*range(*self.layers), *behind)

    def _attended_positions(self, context: int) -> dict[int, int]:
        """Count the positions that a row attends to, by layer."""
        windows = {
            layer: self.config.layer_window(layer)
            for layer in self._all_layers
            if self.config.has_attention(layer)
        }
        return {
            layer: min(context, window) if window else context for layer, window in windows.items()
        }

    @property
    def _state_elements(self) -> int:
        """Elements of a request's states, summed over layers."""
        return self.config.count_recurrent(self.layers) * self.config.state_elements

    def _matrix_elements(self, layer: int) -> tuple[int, int]:
        """Count elements of a layer's matrices: all, and those used per row."""
        experts = self.config.layer_experts(layer)
        every = active = 0.0
        for name, shape in layer_tensors(self.config, layer).items():
            if len(shape) == 2:
                size = shape[0] * shape[1]
                chosen = experts is not None and ".experts." in name
                every += size
                active += size * experts.top_k / experts.num_experts if chosen and experts else size
        return round(every), round(active)
