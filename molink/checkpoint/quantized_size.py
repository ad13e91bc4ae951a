"""Decides which weights can be quantized, and computes their size.

The projections of decoder layers (attention, MLP, experts) make up nearly all bytes. Embedding,
norms, router and output head are not quantized. ``int8`` has a scale per output row (LLM.int8(),
Dettmers et al. 2022, without outliers); ``nf4`` has 4-bit normal floats in blocks of 64 weights
(QLoRA, Dettmers et al. 2023, §3).
"""

from collections.abc import Iterable, Sequence
from math import prod

from molink.facts.model import Quantize

#: Weights per nf4 scale, along the flattened ``[out, in]``.
NF4_BLOCK = 64
#: Routers are too sensitive to quantize.
ROUTER_SUFFIXES = (
    ".gate.weight",
    ".gate.wg.weight",
    ".router.weight",
    ".router.layer.weight",
    ".router.proj.weight",
    ".shared_expert_gate.weight",
    # The indexer's projection, which selects positions instead of experts.
    ".indexer.weights_proj.weight",
)
#: Small projections to rates and decays of recurrent states, whose errors add up over all rows.
RATE_SUFFIXES = (
    *(f".in_proj_{part}.weight" for part in ("ba", "b", "a")),
    *(f".linear_attn.{part}_proj.weight" for part in ("b", "a")),
    *(f".self_attn.{part}_proj.weight" for part in ("b", "f_a", "f_b")),
)
#: Norms with one row of weights per head; two-dimensional, but not projections.
HEAD_NORM_SUFFIXES = (".q_norm.weight", ".k_norm.weight")
#: Latent attention (DeepSeek-V3) multiplies by parts of these weights, transposed.
WIDE_SUFFIXES = (".kv_b_proj.weight", ".k_b_proj.weight", ".v_b_proj.weight")
#: Prefixes of layers' tensor names; MTP modules of MiMo and of Qwen have their own.
LAYER_PREFIXES = ("model.layers.", "model.mtp_layers.", "mtp.")
_SCALE_BYTES = 4


def quantized_bytes(shape: Sequence[int], mode: Quantize, element_bytes: int) -> int:
    """Bytes of a quantized projection weight ``[out, in]``, including scales.

    ``element_bytes`` is the size of an unquantized element.
    """
    elements = prod(shape)
    if mode == "int8":
        return elements + shape[0] * _SCALE_BYTES
    if mode == "nf4":
        return -(-elements // 2) + -(-elements // NF4_BLOCK) * _SCALE_BYTES
    return elements * element_bytes


def is_quantizable(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is a projection weight that a stage may quantize."""
    inner = name.startswith(LAYER_PREFIXES) and name.endswith(".weight")
    kept = (*ROUTER_SUFFIXES, *RATE_SUFFIXES, *WIDE_SUFFIXES, *HEAD_NORM_SUFFIXES)
    return inner and len(shape) == 2 and not name.endswith(kept)


def can_hold(mode: Quantize, shapes: Iterable[Sequence[int]]) -> bool:
    """Whether weights of these shapes can be stacked into one quantized weight.

    Each must begin at the start of an nf4 block, as in nearly all models.
    """
    return mode != "nf4" or all(prod(shape) % NF4_BLOCK == 0 for shape in shapes)
