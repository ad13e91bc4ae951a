"""Describes models for plans: a shape and the facts that placement needs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.foreign_formats import refuse_foreign_folder
from molink.checkpoint.gguf_import import find_gguf, read_gguf_model
from molink.checkpoint.hub_catalog import CatalogEntry
from molink.checkpoint.model_folder import scan_tensors
from molink.checkpoint.model_source import find_local_model, name_local_model
from molink.checkpoint.placement_facts import model_facts
from molink.checkpoint.quantized_size import quantized_bytes
from molink.checkpoint.safetensors_header import TensorSpec
from molink.checkpoint.tensor_layout import layer_tensors
from molink.facts.dtypes import DTYPE_SIZES
from molink.facts.model import ModelFacts
from molink.sim.profiles import MAX_MODEL_LEN, ModelProfile, load_model


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model's shape and the facts that placement needs."""

    name: str
    shape: ModelProfile
    facts: ModelFacts

    @classmethod
    def from_profile(cls, name: str) -> "ModelDescription":
        """Describe a model by profile name or ``.toml`` file.

        Raises:
            UsageError: there is no such profile, or it is invalid.
        """
        shape = load_model(name)
        weight = shape.bytes_per_parameter
        ends = int(shape.vocabulary * shape.hidden * weight)
        merged = (int(shape.layer_parameters / shape.hidden), shape.hidden)
        facts = ModelFacts(
            name=shape.name,
            layers=shape.layers,
            layer_bytes=int(shape.layer_parameters * weight),
            first_bytes=ends,
            last_bytes=ends,
            kv_bytes=shape.kv_bytes,
            int8_kv_bytes=replace(shape, kv_cache_dtype="int8").kv_bytes,
            max_model_len=MAX_MODEL_LEN,
            projection_bytes=int(shape.layer_parameters * weight),
            int8_bytes=quantized_bytes(merged, "int8", 0),
            nf4_bytes=quantized_bytes(merged, "nf4", 0),
            widest=2 * shape.intermediate * shape.hidden,
            row_elements=2 * shape.intermediate + shape.hidden,
            hidden=shape.hidden,
            vocabulary=shape.vocabulary,
        )
        return cls(shape.name, shape, facts)

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelDescription":
        """Describe the model of a folder or a GGUF file.

        A folder's ``config.json`` suffices. If weights are present, their quantization is read.

        Raises:
            ModelError: the model is missing, broken or unsupported.
        """
        found = find_local_model(str(folder)) or folder
        file = find_gguf(found) if found.is_dir() else found if found.is_file() else None
        config, tensors = _read_folder(found) if file is None else read_gguf_model(file)
        facts = model_facts(config, name_local_model(found), tensors)
        return cls.from_facts(config, facts, str(folder))

    @classmethod
    def from_catalog(cls, entry: CatalogEntry) -> "ModelDescription":
        """Describe a model of the catalog, without any of its files on this PC.

        Raises:
            ModelError: molink does not serve it.
        """
        config, weights = entry.parse_config(), entry.describe_weights()
        facts = model_facts(config, entry.name, weights.tensors, weights.typical_layers)
        return cls.from_facts(config, facts, entry.source)

    @classmethod
    def from_facts(cls, config: ModelConfig, facts: ModelFacts, source: str) -> "ModelDescription":
        """Describe a model by its config and facts; ``source`` says where they come from."""
        recurrent = len(config.recurrent_layers) / config.layers * DTYPE_SIZES["f32"]
        shape = ModelProfile(
            name=facts.name,
            source=source,
            layers=config.layers,
            hidden=config.hidden_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_size=config.head_dim,
            kv_kinds=config.kv_kinds,
            mtp_layers=facts.mtp_layers,
            vocabulary=config.vocab_size,
            head_bytes=facts.element_bytes,
            attention_share=config.count_attention((0, config.layers)) / config.layers,
            state_bytes=recurrent * config.state_elements,
            slot_bytes=recurrent * config.slot_elements,
            **{"intermediate": config.intermediate_size, **_mixture_fields(config)},
        )
        # Average bytes per parameter of the stored tensors.
        weight = facts.layer_bytes / shape.layer_parameters
        kept = facts.block_weights
        if kept is not None:
            shape = replace(
                shape,
                block_bytes=sum(kept.layer) / shape.layer_parameters,
                head_block_bytes=sum(kept.last) / (shape.vocabulary * shape.hidden),
            )
        return cls(facts.name, replace(shape, bytes_per_parameter=weight), facts)


def _read_folder(folder: Path) -> tuple[ModelConfig, Mapping[str, TensorSpec]]:
    """Read a folder's config and tensors; there may be no tensors."""
    if folder.is_dir():
        refuse_foreign_folder(folder)
    config = ModelConfig.load_folder(folder, "bf16")
    if not any(folder.glob("*.safetensors")):
        return config, {}
    tensors = scan_tensors(folder)
    return config.drop_absent_mtp(tensors), tensors


def _mixture_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the profile's fields for experts, from the last layer that has experts."""
    with_experts = [layer for layer in range(config.layers) if config.layer_experts(layer)]
    if config.experts is None or not with_experts:
        return {}
    experts, shapes = config.experts, layer_tensors(config, with_experts[-1])
    chosen = experts.top_k * experts.intermediate_size
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    return {
        "intermediate": chosen + experts.shared_intermediate_size,
        "expert_share": routed / sum(sizes.values()),
        "chosen_share": experts.top_k / experts.num_experts,
    }
