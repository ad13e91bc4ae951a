"""Which heads of keys and values the layers of a stage have."""

from collections import Counter
from dataclasses import dataclass

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.tensor_layout import mtp_layers
from molink.checkpoint.traits import HeadShape


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """Different heads of layers, and of each layer with attention which ``kinds`` it has.

    ``places`` are indices of a kind, and of the layer among those of its kind.
    """

    kinds: tuple[HeadShape, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def from_config(cls, config: ModelConfig, layers: tuple[int, int]) -> "LayerHeads":
        """Heads of layers ``first:last``; without attention, one kind that no layer has.

        At the last stage the MTP layer comes after the others.
        """
        behind = mtp_layers(config) if layers[1] == config.layers else ()
        every = (*range(*layers), *behind)
        found = [config.head_shape(layer) for layer in every if config.has_attention(layer)]
        kinds = tuple(dict.fromkeys(found)) or (config.head_shape(0),)
        places, counts = [], Counter[int]()
        for kind in map(kinds.index, found):
            places.append((kind, counts[kind]))
            counts[kind] += 1
        return cls(kinds, tuple(places))

    def count_layers(self, kind: int) -> int:
        """Layers with heads of a kind."""
        return sum(one == kind for one, _ in self.places)
