"""The key and value heads of a stage's layers."""

from collections import Counter
from dataclasses import dataclass

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.tensor_layout import mtp_layers
from molink.checkpoint.traits import HeadShape


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The distinct ``kinds`` of heads, and the kind of each layer with attention.

    ``places`` has, for each layer, the index of its kind and its index among the layers of that
    kind.
    """

    kinds: tuple[HeadShape, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def from_config(cls, config: ModelConfig, layers: tuple[int, int]) -> "LayerHeads":
        """Collect the heads of layers ``first:last``; without attention, one unused kind.

        At the last stage the MTP layer follows the others.
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
        """Count the layers with heads of a kind."""
        return sum(one == kind for one, _ in self.places)
