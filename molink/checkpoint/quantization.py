"""Which weights are quantized, how, and what they take.

Quantized are the projections of the decoder layers (attention, MLP, experts): nearly all bytes.
Embedding, norms, router and output head stay as they are. ``int8`` has a scale per output row
(LLM.int8(), Dettmers et al. 2022, without the outlier part); ``nf4`` has 4-bit normal floats in
blocks of 64 weights (QLoRA, Dettmers et al. 2023, §3).

Which weights stay in few bits where a CPU multiplies by these: one rule for reader and plan.
"""

from collections.abc import Iterable, Sequence
from math import prod

from molink.facts.model import Quantize

#: Weights that share a scale in nf4, along the flattened ``[out, in]``.
NF4_BLOCK = 64
#: What rates the experts of a layer is too sensitive.
ROUTER_SUFFIXES = (".gate.weight", ".router.weight", ".shared_expert_gate.weight")
#: Scales are float32.
_SCALE_BYTES = 4


def quantized_bytes(shape: Sequence[int], mode: Quantize, element_bytes: int) -> int:
    """Bytes on the device of a projection weight ``[out, in]``, its scales included.

    ``element_bytes`` is the size of an element that isn't quantized.
    """
    elements = prod(shape)
    if mode == "int8":
        return elements + shape[0] * _SCALE_BYTES
    if mode == "nf4":
        return -(-elements // 2) + -(-elements // NF4_BLOCK) * _SCALE_BYTES
    return elements * element_bytes


def is_quantizable(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is the weight of a projection that a stage may quantize."""
    inner = name.startswith("model.layers.") and name.endswith(".weight")
    return inner and len(shape) == 2 and not name.endswith(ROUTER_SUFFIXES)


def can_hold(mode: Quantize, shapes: Iterable[Sequence[int]]) -> bool:
    """Whether weights of these shapes can be one quantized weight, one below the other.

    Each has to begin with a block of nf4; nearly all models' do.
    """
    return mode != "nf4" or all(prod(shape) % NF4_BLOCK == 0 for shape in shapes)
