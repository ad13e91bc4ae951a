"""Detects folders in other formats, and tensors that do not belong to the config.

A checkpoint with more layers than its config says, or with biases where the config has none, would
be served without them and give wrong answers.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.config_fields import read_json
from molink.checkpoint.low_bit import can_be_low_bit, parse_low_bit
from molink.checkpoint.prequantized import companion_names, required_tensors
from molink.checkpoint.quantized_size import is_quantizable
from molink.checkpoint.safetensors_header import TensorSpan
from molink.checkpoint.stacked_experts import find_stack
from molink.checkpoint.tensor_layout import OUTPUT_HEAD_NAME, TensorShapes, stage_tensors
from molink.checkpoint.traits import MtpShape
from molink.errors import BrokenModel, ModelError, UnsupportedModel
from molink.gguf.ggml_types import packed_names

#: Start of a git-lfs pointer, and its maximum size.
_POINTER, _POINTER_BYTES = b"version https://git-lfs", 1024
#: Advice for unsupported quantization formats.
UNQUANTIZED_HINT = "take the model's bf16 or fp16 files, and --quantize if they are too large"
_QUANTIZED_SUFFIXES = {
    ".qweight": "4-bit weights of GPTQ or AWQ",
    ".weight_packed": "weights of compressed-tensors",
    ".weight_scale": "the scales of fp8 or int8 weights",
    ".weight_scale_inv": "the scales of fp8 weights",
    ".scales": "the scales of MLX's (Apple's) weights",
}
_VALUE_HEAD_NAMES = ("v_head.", "value_head.")
#: Files of the original authors' layouts, which have no config.json.
_ORIGINAL_CONFIGS = ("params.json", "consolidated.safetensors", "consolidated.00.pth")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".npz", ".onnx")
#: Unsupported tokenizer files.
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json")


def refuse_foreign_folder(folder: Path, elsewhere: Collection[str] = ()) -> None:
    """Refuse a folder that is incomplete or in another format.

    ``elsewhere`` names weight files that belong to the model but are stored elsewhere.

    Raises:
        UnsupportedModel: an adapter, an unsupported tokenizer or layout, or AutoGPTQ's old format.
        BrokenModel: a file is a git-lfs pointer, or config.json is missing.
    """
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        if name.endswith((".json", ".safetensors")):
            _refuse_pointer(folder / name)
    weights = [name for name in (*names, *elsewhere) if name.endswith(_WEIGHT_SUFFIXES)]
    adapts = "adapter_config.json" in names
    if adapts and not any(name for name in weights if not name.startswith("adapter_model.")):
        raise UnsupportedModel(_explain_adapter(folder))
    if "config.json" not in names:
        raise _explain_missing_config(folder, names, weights)
    if "config.json" in names and "tokenizer.json" not in names:
        other = next((name for name in _OTHER_TOKENIZERS if name in names), None)
        if other is not None:
            raise UnsupportedModel(
                f"{folder} has its tokenizer as {other}, but no tokenizer.json: have transformers "
                'write one, python -c "from transformers import AutoTokenizer as T; '
                f"T.from_pretrained(r'{folder}').save_pretrained(r'{folder}')\""
            )
    if "quantize_config.json" in names and "config.json" in names:
        config = read_json(folder / "config.json")
        if not config.get("quantization_config"):
            raise UnsupportedModel(
                f"{folder / 'quantize_config.json'} is of AutoGPTQ's old layout: put its content "
                'into config.json as "quantization_config", with "quant_method": "gptq", or '
                f"{UNQUANTIZED_HINT}"
            )


def explain_missing_weights(folder: Path) -> BrokenModel:
    """Explain that a folder has no safetensors; names weights in other formats."""
    names = sorted(path.name for path in folder.iterdir())
    other = next((name for name in names if name.endswith(_WEIGHT_SUFFIXES[1:])), None)
    if other is None:
        return BrokenModel(
            f"{folder} has no weights (no *.safetensors file); fetch the complete model"
        )
    hint = UNQUANTIZED_HINT.partition(",")[0] + ", as safetensors"
    if other.endswith(".bin"):
        hint = (
            'have transformers write safetensors, python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained(r'{folder}', torch_dtype='auto')"
            f".save_pretrained(r'{folder}')\""
        )
    return BrokenModel(
        f"{folder} has no weights: no *.safetensors file ({other} is of a kind that molink doesn't "
        f"read): {hint}"
    )


def refuse_foreign_tensors(path: Path, tensors: Mapping[str, TensorSpan]) -> None:
    """Refuse tensors of other model kinds or of quantizations that the config does not name.

    Raises:
        UnsupportedModel: such a tensor exists; the first is named.
    """
    config = path / "config.json"
    named = parse_low_bit(read_json(config), str(config)) is not None
    for name in sorted(tensors):
        ends = () if named else _QUANTIZED_SUFFIXES.items()
        made = next((made for end, made in ends if name.endswith(end)), None)
        where = f"{path / tensors[name].file}: tensor {name}"
        if made is not None:
            raise UnsupportedModel(
                f"{where} belongs to {made}, but config.json has no quantization_config that "
                f"molink reads: {UNQUANTIZED_HINT}"
            )
        if name.startswith(_VALUE_HEAD_NAMES):
            raise UnsupportedModel(
                f"{where} is a value head left over from training: save the model without it (trl: "
                "model.pretrained_model.save_pretrained)"
            )


def _refuse_pointer(file: Path) -> None:
    try:
        is_short = file.is_file() and file.stat().st_size <= _POINTER_BYTES
        is_pointer = is_short and file.read_bytes().startswith(_POINTER)
    except OSError:
        return  # the reader of the file reports the error
    if is_pointer:
        raise BrokenModel(
            f"{file} is a git-lfs pointer, not the file itself: run git lfs install, then git lfs "
            f"pull, in {file.parent}"
        )


def _explain_missing_config(folder: Path, names: list[str], weights: list[str]) -> ModelError:
    authors = next((name for name in _ORIGINAL_CONFIGS if name in names), None)
    tokenizer = next((name for name in _OTHER_TOKENIZERS if name in names), None)
    wanted = "config.json, tokenizer.json and *.safetensors"
    if authors is not None:
        return UnsupportedModel(
            f"{folder} is in its authors' own layout ({authors}), without a config.json: take the "
            f"files that the Hugging Face hub has of this model, {wanted}"
        )
    if tokenizer is not None and not weights:
        return BrokenModel(
            f"{folder} has only a tokenizer ({tokenizer}): a model folder has {wanted}"
        )
    return BrokenModel(
        f"config.json is missing in the model folder {folder}: a model folder has {wanted}"
    )


def _explain_adapter(folder: Path) -> str:
    base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    of = f" of {base[:200]}" if isinstance(base, str) and base else ""
    return (
        f"{folder} is an adapter{of}, not a whole model: serve that one with --adapter "
        f"NAME={folder}"
    )


#: Prefixes of a decoder's tensors; names with other prefixes are ignored.
_MODEL_PREFIXES = ("model.", "lm_head.")
#: Constants that old checkpoints store with the weights; they follow from the config.
_CONSTANT_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def refuse_unknown_tensors(
    path: Path, config: ModelConfig, tensors: Mapping[str, TensorSpan]
) -> None:
    """Refuse tensors that the config does not account for.

    Folders without any of the model's tensors, such as adapters, are accepted. Missing tensors are
    not checked here, since a stage's folder has some layers only.

    Raises:
        BrokenModel: such tensors exist; the first is named.
    """
    expected = _expected_names(config, stage_tensors(config, 0, config.layers), tensors)
    files = {span.file for name, span in tensors.items() if name in expected}
    unread = _unread_prefixes(config, tensors)
    strays = [
        name
        for name, span in tensors.items()
        if name not in expected
        and (name.startswith(_MODEL_PREFIXES) or span.file in files)
        and not name.endswith(_CONSTANT_SUFFIXES)
        and not name.startswith(unread)
    ]
    if strays:
        first = min(strays)
        more = f" and {len(strays) - 1} more" if len(strays) > 1 else ""
        raise BrokenModel(
            f"{path / tensors[first].file}: tensor {first}{more} does not fit this config.json: it "
            "belongs to another model, or the config disables its feature"
        )


#: Prefixes of ERNIE's MTP modules.
_DRAFT_PREFIXES = tuple(
    f"model.mtp_{part}." for part in ("block", "emb_norm", "hidden_norm", "linear_proj")
)
#: Prefix of Qwen's MTP modules, which its configs may not mention.
_QWEN_DRAFTS = "mtp."


def _unread_prefixes(config: ModelConfig, tensors: Mapping[str, TensorSpan]) -> tuple[str, ...]:
    """List prefixes of MTP modules; every tensor below them is accepted."""
    if not config.draft_layers:
        return (_QWEN_DRAFTS,)
    mtp = config.mtp or MtpShape(prefix=f"model.layers.{config.layers}.")
    # These prefixes also cover copies of the embedding and the output head.
    found = (
        mtp.module_prefix(index)
        for index in range(config.draft_layers)
        if mtp.is_stored(tensors, index)
    )
    return (_QWEN_DRAFTS, *_DRAFT_PREFIXES, *found)


def _expected_names(
    config: ModelConfig, shapes: TensorShapes, tensors: Mapping[str, TensorSpan]
) -> set[str]:
    expected = {*shapes, OUTPUT_HEAD_NAME}  # tied models and embedding models may store it, too
    scheme = config.low_bit
    if scheme is not None:
        held = [
            n for n, s in shapes.items() if can_be_low_bit(n, s) and scheme.is_stored(n, tensors)
        ]
        expected -= {*held}
        expected.update(required_tensors(shapes, "none", tensors, scheme))
        expected.update(unused for name in held for unused in scheme.unused_names(name))
    elif config.quantized == "none":
        for name in (*expected,):
            stack = find_stack(name, tensors)
            expected.update(packed_names(name) if stack is None else stack.names)
    else:
        for name, shape in shapes.items():
            if is_quantizable(name, shape):
                expected.update(companion_names(name))
    return expected
