"""What a stage's passes have to read and to compute: the measure of how well it does."""

from dataclasses import dataclass

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.layout import layer_tensors
from molink.facts.dtypes import DTYPE_SIZES
from molink.facts.model import LayerRange

#: Floating-point operations of a multiplication that is added up.
_MULTIPLY_ADD = 2


@dataclass(frozen=True, slots=True)
class StageWork:
    """Layers ``first:last`` of a model with their ends, computed in ``dtype``.

    ``weight_bytes`` are those of all its weights as they lie on the device. Of experts, a row reads
    and computes those that are chosen for it; every other one counts for nothing.
    """

    config: ModelConfig
    layers: LayerRange
    dtype: str
    weight_bytes: int

    def decode_bytes(self, context: int) -> int:
        """Bytes that a single decode row reads: weights, and the KV of ``context`` tokens.

        Of the embedding it reads one row.
        """
        table, element = self._table * DTYPE_SIZES[self.dtype], DTYPE_SIZES[self.dtype]
        ends = int(self._embeds) + int(self._samples)
        held = min(ends, 1) if self.config.tied else ends
        elements = [self._elements(layer) for layer in range(*self.layers)]
        share = sum(active for _, active in elements) / max(1, sum(every for every, _ in elements))
        weights = max(0, self.weight_bytes - held * table) * share + table * self._samples
        heads = self.config.kv_heads * self.config.head_dim
        return int(weights) + 2 * heads * element * self._positions(context)

    def prefill_flops(self, rows: int) -> int:
        """Operations of a chunk of ``rows`` rows that begins a prompt; only its last is sampled."""
        products = rows * sum(self._elements(layer)[1] for layer in range(*self.layers))
        products += self._table * self._samples
        pairs = sum(self._positions(row) for row in range(1, rows + 1))
        products += 2 * self.config.heads * self.config.head_dim * pairs
        return _MULTIPLY_ADD * products

    @property
    def _embeds(self) -> bool:
        return self.layers[0] == 0

    @property
    def _samples(self) -> bool:
        return self.layers[1] == self.config.layers

    @property
    def _table(self) -> int:
        """Elements of the embedding, and of the output head."""
        return self.config.vocab_size * self.config.hidden_size

    def _positions(self, context: int) -> int:
        """Positions that a row attends to, over all layers."""
        windows = self.config.windows[slice(*self.layers)]
        return sum(min(context, window) if window else context for window in windows)

    def _elements(self, layer: int) -> tuple[int, int]:
        """Elements of a layer's matrices: of all, and of those that a row meets."""
        experts = self.config.experts_of(layer)
        every = active = 0.0
        for name, shape in layer_tensors(self.config, layer).items():
            if len(shape) == 2:
                size = shape[0] * shape[1]
                chosen = experts is not None and ".experts." in name
                every += size
                active += size * experts.chosen / experts.count if chosen and experts else size
        return round(every), round(active)
