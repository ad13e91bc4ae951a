"""Tensors that a model of this config doesn't have: then the config belongs to another model.

A checkpoint with more layers than its config says, or with biases where the config has none, would
be served without them: it would answer, and wrongly.
"""

from collections.abc import Mapping
from pathlib import Path

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.low_bit import can_be_low_bit
from molink.checkpoint.prequantized import companion_names, required_tensors
from molink.checkpoint.quantization import is_quantizable
from molink.checkpoint.safetensors_header import TensorSpan
from molink.checkpoint.stacked_experts import find_stack
from molink.checkpoint.tensor_layout import OUTPUT_HEAD_NAME, TensorShapes, stage_tensors
from molink.errors import BrokenModel
from molink.gguf.ggml_types import packed_names

#: Tensors of a decoder have names that begin so; in files of other kinds anything may be.
_MODEL_PREFIXES = ("model.", "lm_head.")
#: What old checkpoints hold beside weights: constants that follow from the config.
_CONSTANT_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def refuse_unknown_tensors(
    path: Path, config: ModelConfig, tensors: Mapping[str, TensorSpan]
) -> None:
    """Check that a folder has no tensors that its config knows nothing of.

    Files that hold none of the model's tensors (an adapter, weights in another naming) are left
    alone. A stage's folder has some layers only: what is missing is not looked at here.

    Raises:
        BrokenModel: there are such tensors; the first is named.
    """
    known = _expected_names(config, stage_tensors(config, 0, config.layers), tensors)
    files = {span.file for name, span in tensors.items() if name in known}
    strays = [
        name
        for name, span in tensors.items()
        if name not in known
        and (name.startswith(_MODEL_PREFIXES) or span.file in files)
        and not name.endswith(_CONSTANT_SUFFIXES)
    ]
    if strays:
        first = min(strays)
        more = f" and {len(strays) - 1} more" if len(strays) > 1 else ""
        raise BrokenModel(
            f"{path / tensors[first].file}: tensor {first}{more} has no place in a model of this "
            "config.json: it belongs to another model, or a feature of it is switched off there"
        )


def _expected_names(
    config: ModelConfig, shapes: TensorShapes, tensors: Mapping[str, TensorSpan]
) -> set[str]:
    known = {*shapes, OUTPUT_HEAD_NAME} if config.tied_embeddings else {*shapes}
    scheme = config.low_bit
    if scheme is not None:
        held = [
            n for n, s in shapes.items() if can_be_low_bit(n, s) and scheme.is_stored(n, tensors)
        ]
        known -= {*held}
        known.update(required_tensors(shapes, "none", tensors, scheme))
        known.update(unused for name in held for unused in scheme.unused_names(name))
    elif config.quantized == "none":
        for name in (*known,):
            place = find_stack(name, tensors)
            known.update(packed_names(name) if place is None else place.names)
    else:
        for name, shape in shapes.items():
            if is_quantizable(name, shape):
                known.update(companion_names(name))
    return known
